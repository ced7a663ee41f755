"""The command `moe-train data`."""

import argparse

from moe_train.commands.options import Command, add_config
from moe_train.config import load_config


def _data(arguments: argparse.Namespace) -> int:
    """Prepare what a job trains on, in parallel, and print what it is.

    A run that was interrupted goes on where it was.
    """
    config = load_config(arguments.config, arguments.overrides)
    from moe_train.jobs import prepare_and_describe

    print(prepare_and_describe(config))
    return 0


DATA = Command(name="data", text="prepare and show what a job trains on", add=add_config, run=_data)
