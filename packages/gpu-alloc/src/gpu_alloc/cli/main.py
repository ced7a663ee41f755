"""The command `gpu-alloc`: record, explain and tune allocations, without a device.

    gpu-alloc record train.py --steps 3
    gpu-alloc replay trace.jsonl --capacity-bytes 80GiB
    gpu-alloc run --settings tuned.toml train.py --steps 3

Invariant: exit status 0 means done, 1 that the trace ran out of memory, 2 that the input was wrong.
"""

import argparse
import os
import select
import sys
from collections.abc import Sequence

from gpu_alloc.cli.compare import add_compare
from gpu_alloc.cli.config import add_config
from gpu_alloc.cli.explain import add_explain
from gpu_alloc.cli.info import add_info
from gpu_alloc.cli.plan import add_plan
from gpu_alloc.cli.plot import add_plot
from gpu_alloc.cli.record import add_record
from gpu_alloc.cli.replay import add_replay
from gpu_alloc.cli.run import add_run
from gpu_alloc.cli.sizes import add_sizes
from gpu_alloc.cli.tune import add_tune
from gpu_alloc.errors import AllocError

_COMMANDS = (
    add_record,
    add_info,
    add_explain,
    add_tune,
    add_compare,
    add_plan,
    add_plot,
    add_replay,
    add_run,
    add_sizes,
    add_config,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu-alloc",
        description="A two-pool best-fit GPU allocator: record, replay, tune; run scripts on it.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except (AllocError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 1
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        print(f"gpu-alloc: {said}", file=sys.stderr)
        return 2
    return status


def _is_unread() -> bool:
    """Whether the reader of our output, such as `head`, has seen enough; if so, drop the rest."""
    poll, output = select.poll(), sys.stdout.fileno()
    poll.register(output, 0)
    return bool(poll.poll(0)) and os.dup2(os.open(os.devnull, os.O_WRONLY), output) == output


if __name__ == "__main__":
    sys.exit(main())
