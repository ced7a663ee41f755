"""A program that calls `torch.distributed`, run with this package's functions in their place."""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from comm_collectives.collectives.drop_in import patched_torch


def run_program(program: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> None:
    """Run a script or module as `python` would, with this package's functions in torch's place.

    Its collectives and transfers are those of `collectives.drop_in`, also where it imports them
    from torch by name. Collectives inside torch (DistributedDataParallel's reducer, FSDP,
    functional collectives) stay torch's. Not collective, but all ranks of a group have to run the
    program in this way: a line says so if none of its calls came here.

    Args:
        program: path of a script, or the name of a module.
        arguments: its command line.
        is_module: whether `program` is a module's name, as after `python -m`.

    Raises:
        OSError: the script cannot be read.
        Exception: what the program raises.
    """
    sys.argv = [program, *arguments]
    # Python's own first folder: the script's, or where a module is run.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program))
    with patched_torch() as has_served:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(program), run_name="__main__")
    if not has_served():
        print(
            f"comm-collectives: {program} made no call of torch.distributed's in this process, so "
            "nothing was compared; the ranks that it starts itself keep torch's functions: start "
            "them with torchrun, as 'comm-collectives run --help' says",
            file=sys.stderr,
        )


def is_there(program: str, *, is_module: bool) -> bool:
    """Whether `run_program` can begin. Imports nothing of the program."""
    if not is_module:
        return os.path.isfile(program)
    folder = sys.path[0]
    sys.path[0] = os.getcwd()
    try:
        # Not all of a dotted name: to find it imports the package, which may take torch's names.
        top = program.partition(".")[0]
        return bool(top) and find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[0] = folder
