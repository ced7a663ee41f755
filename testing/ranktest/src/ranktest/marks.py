"""Ranks that wait for each other beside what is under test, instead of sleeping for a guess.

if rank == 0:
    with pytest.raises(CollectiveTimeoutError):
        cc.all_reduce(x, timeout_s=0.1)
    mark("gave up")
else:
    until_marked("gave up")
"""

import os
import time
from pathlib import Path

_LOOK_S = 5e-3
_FOLDER = "RANKTEST_FOLDER"


def open_marks(folder: str) -> None:
    """Keep the marks of this rank's run in a folder that all its ranks see."""
    os.environ[_FOLDER] = folder


def mark(name: str) -> None:
    """Say to the other ranks that this point is reached. Not collective.

    Raises:
        RuntimeError: this process is no rank of `run_ranks`.
    """
    _file(name).touch()


def until_marked(name: str, *, timeout_s: float = 60.0) -> None:
    """Wait until some rank has called `mark(name)`.

    Raises:
        TimeoutError: none has in `timeout_s` seconds.
        RuntimeError: this process is no rank of `run_ranks`.
    """
    file, until_s = _file(name), time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() >= until_s:
            raise TimeoutError(f"no rank has marked {name!r} in {timeout_s:g} s")
        time.sleep(_LOOK_S)


def _file(name: str) -> Path:
    if _FOLDER not in os.environ:
        raise RuntimeError("marks are for the ranks of run_ranks and collect_ranks")
    return Path(os.environ[_FOLDER], f"mark {name}")
