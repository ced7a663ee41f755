"""The command `moe-train relayout`."""

import argparse
from pathlib import Path

from moe_train.commands.options import Command


def _add_relayout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder of the running job")
    for axis, meaning in (
        ("pp", "pipeline stages"),
        ("dp", "data-parallel replicas of the experts"),
        ("ep", "ranks that share the experts of a layer"),
    ):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{meaning}; 1")


def _relayout(arguments: argparse.Namespace) -> int:
    """Change pp, dp and ep of a running job after its next step, in memory; ranks stay as many."""
    from moe_train.jobs import request_relayout

    print(request_relayout(arguments.folder, (arguments.pp, arguments.dp, arguments.ep)))
    return 0


RELAYOUT = Command(
    name="relayout", text="change the layout of a running job", add=_add_relayout, run=_relayout
)
