"""What a run is busy with before its first step, in lines of the log.

with phase("starting 4 ranks"):
    ...
# starting 4 ranks
# starting 4 ranks: done in 3.2 s         only where it took more than a second
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHORT_S = 1.0

logger = logging.getLogger(__name__)


@contextmanager
def phase(text: str, *, shown: bool = True) -> Iterator[None]:
    """Say what begins, and how long it took where a person has noticed.

    Args:
        shown: false on ranks that say nothing.
    """
    started_s = time.monotonic()
    if shown:
        logger.info("%s", text)
    yield
    elapsed_s = time.monotonic() - started_s
    if shown and elapsed_s > _SHORT_S:
        logger.info("%s: done in %.1f s", text, elapsed_s)
