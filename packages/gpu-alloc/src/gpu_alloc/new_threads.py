"""Run something in every thread that is started meanwhile, before what the thread is there for.

Python runs it through `threading.setprofile`, for the first call that a thread makes; a profiler
that was set before is set again there. Threads that ran before, and those that no Python code has
started, are not seen.

    with in_new_threads(hook.enter):
        program()
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def in_new_threads(run: Callable[[], object]) -> Iterator[None]:
    """Inside, each new thread calls `run` first."""
    before: Any = threading.getprofile()

    def first_call(frame: FrameType, event: str, arg: object) -> None:
        sys.setprofile(None)
        run()
        if before is not None:
            sys.setprofile(before)
            before(frame, event, arg)

    threading.setprofile(first_call)
    try:
        yield
    finally:
        threading.setprofile(before)
