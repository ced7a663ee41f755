"""A cache folder that several processes may use at once.

Invariant: what lies under its final name is complete. Everything is made in a temporary folder and
published by one rename; of two processes that make the same thing, one waits or its copy is
dropped.

    with locked(cache_dir / "corpus.lock"):
        publish(cache_dir / "corpus", make)     # make(folder) fills an empty folder
"""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_LOCK_POLL_S = 0.05
_LOCK_TIMEOUT_S = 3600.0

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """`moe-train` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moe-train"


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path`; the system frees it when the process ends.

    On file systems without locks nothing is held, which is yielded as False: work may be done twice
    at once, so that unfinished work of others must be left alone; `publish` stays right.

    Raises:
        TimeoutError: another process held the lock for `timeout_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        deadline = time.monotonic() + timeout_s
        waiting = False
        while (held := _try_lock(stream.fileno())) is False:
            if not waiting:
                logger.info("waiting for another process that fills %s", path.parent)
                waiting = True
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has held {path} for {timeout_s:g} s; end it, or set "
                    "data.cache_dir to another folder"
                )
            time.sleep(_LOCK_POLL_S)
        yield bool(held)


@contextlib.contextmanager
def claimed(path: Path, refusal: str) -> Iterator[None]:
    """Hold the file `path`, made if needed, or raise at once; the system frees it at the end.

    It says who holds it. On file systems without locks nothing is held.

    Raises:
        BlockingIOError: `refusal`, and which process of which machine holds it.
    """
    with path.open("a+") as stream:
        if _try_lock(stream.fileno()) is False:
            stream.seek(0)
            raise BlockingIOError(f"{refusal} (held by {stream.read().strip()})")
        stream.truncate(0)
        stream.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        stream.flush()
        yield


def _try_lock(descriptor: int) -> bool | None:
    """Whether it is held now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.debug("no locks on this file system; going on without")
        return None
    return True


def publish(
    target: Path, make: Callable[[Path], None], *, is_made: Callable[[], bool] = lambda: False
) -> None:
    """Fill a new folder with `make` and give it the name `target`, replacing what is there.

    Args:
        is_made: whether another process has published the same meanwhile, which then stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(work)
        work.chmod(0o755)
        if target.exists() and not is_made():
            target.replace(work / ".replaced")
        try:
            work.replace(target)
        except OSError:
            if not is_made():
                raise
            shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(target / ".replaced", ignore_errors=True)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_atomic(target: Path, text: str) -> None:
    """Write a small file under a temporary name and rename it to `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(name, target)
