"""A script of the user's that a command runs in its own process.

Invariant: the script ends as it would alone, with its exit status or its traceback.
"""

import argparse
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from gpu_alloc.errors import AllocError, AllocValueError

LIBRARIES = ("cupy", "torch")
_INSTALL = {"cupy": "pip install 'gpu-alloc[cuda13]' (or [cuda12])", "torch": "pip install torch"}


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add `--of`, the script and its arguments."""
    parser.add_argument(
        "--of",
        choices=LIBRARIES,
        action="append",
        help="whose allocations; may be given twice (default: of what is installed)",
    )
    parser.add_argument("script", help="the Python script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def libraries_of(arguments: argparse.Namespace) -> list[str]:
    """The libraries that are meant. Raises AllocValueError where there is none, or no script."""
    libraries: list[str] = arguments.of or [name for name in LIBRARIES if find_spec(name)]
    if not libraries:
        raise AllocValueError("neither CuPy nor torch is installed, so there is nothing to serve")
    if not Path(arguments.script).is_file():
        raise AllocValueError(f"{arguments.script} is no file; give the script to run")
    return libraries


def check_installed(libraries: Sequence[str]) -> None:
    """Raise AllocValueError, which says what to install, where one of them is not."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        how = "; ".join(_INSTALL[name] for name in missing)
        raise AllocValueError(f"{' and '.join(missing)}: not installed in this Python; {how}")


def run_program(script: str, args: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGS...` would."""
    with _as_program(script, args):
        try:
            runpy.run_path(script, run_name="__main__")
        except (AllocError, OSError):
            # From the command these are a user's mistakes in its arguments; here they are not.
            traceback.print_exc()
            sys.exit(1)


@contextmanager
def _as_program(script: str, args: Sequence[str]) -> Iterator[None]:
    """What Python itself sets for a script: its arguments, and its folder as the first path."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:1] = [script, *args], [str(Path(script).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
