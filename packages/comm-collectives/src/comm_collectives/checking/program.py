"""A program that calls `torch.distributed`, run with this package's functions in their place."""

import os
import runpy
import sys
from collections.abc import Sequence

from comm_collectives.collectives.drop_in import patched_torch


def run_program(program: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> None:
    """Run a script or module as `python` would, with this package's functions in torch's place.

    Its collectives and transfers are those of `collectives.drop_in`, also where it imports them
    from torch by name. Collectives inside torch (DistributedDataParallel's reducer, FSDP,
    functional collectives) stay torch's. Not collective, but all ranks of a group have to run the
    program in this way.

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
    with patched_torch():
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(program), run_name="__main__")
