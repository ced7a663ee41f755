"""The command `moe-train plan`."""

import argparse
from pathlib import Path

from moe_train.commands.options import Command, add_config
from moe_train.config import load_config


def _plan(arguments: argparse.Namespace) -> int:
    """Estimate what a job needs before it is started."""
    config = load_config(arguments.config, arguments.overrides)
    from moe_train.jobs import plan_report

    print(plan_report(config, traces=arguments.traces, ranks=arguments.rank))
    return 0


def _add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        metavar="RANK",
        help="only this rank, again for more; else all",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="keep each rank's allocation trace there, for `gpu-alloc explain` and `tune`",
    )


PLAN = Command(name="plan", text="estimate memory before a run", add=_add, run=_plan)
