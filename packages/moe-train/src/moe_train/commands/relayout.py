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
        ("cp", "ranks that share out the positions of each sample"),
        ("tp", "ranks that share out heads, widths and positions"),
        ("etp", "ranks that share each expert"),
    ):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{meaning}; 1")
    parser.add_argument(
        "--experts",
        default="",
        metavar="PARTS",
        help="experts of each rank along ep, as in 3,5; or load: by the tokens that they have got "
        "since the layout changed; equal parts",
    )


def _relayout(arguments: argparse.Namespace) -> int:
    """Change pp, dp, ep, cp, tp, etp and the experts' places of a running job in memory.

    That is after its next step, and the ranks stay as many.
    """
    from moe_train.jobs import request_relayout

    asked = arguments
    sizes = (asked.pp, asked.dp, asked.ep, asked.cp, asked.tp, asked.etp)
    print(request_relayout(asked.folder, sizes, asked.experts))
    return 0


RELAYOUT = Command(
    name="relayout", text="change the layout of a running job", add=_add_relayout, run=_relayout
)
