"""The command `moe-train plan`."""

import argparse

from moe_train.commands.options import Command, add_config
from moe_train.config import load_config


def _plan(arguments: argparse.Namespace) -> int:
    """Estimate what a job needs before it is started."""
    config = load_config(arguments.config, arguments.overrides)
    from moe_train.jobs import plan_report

    print(plan_report(config))
    return 0


PLAN = Command(name="plan", text="estimate memory before a run", add=add_config, run=_plan)
