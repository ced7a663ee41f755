"""Keep Python's cycle collector from walking the heap while thousands of small objects are made.

A plan of 20,000 tensors allocates some hundred thousand tuples, each few hundred of which make the
collector look at everything that is alive; half the time of such a save goes there. Nothing is
leaked: reference counts free what a plan drops, and cycles are found after the block.

    with collector_paused():
        plan = plan_save(held)
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Stop automatic collections in this process until the block ends; nests and threads are fine.

    Where two threads overlap, the first one to leave lets collections run again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
