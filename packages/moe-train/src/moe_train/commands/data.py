"""The command `moe-train data`."""

import argparse

from moe_train.commands.options import Command, add_config
from moe_train.config import load_config


def _data(arguments: argparse.Namespace) -> int:
    """Prepare what a job trains on, in parallel, and print what it is.

    A run that was interrupted goes on where it was. What was prepared before is read through, and
    made again where it is damaged. Pairs, which are not trained on yet, are read and checked.
    """
    config = load_config(arguments.config, arguments.overrides)
    from moe_train.data import describe_corpus, prepare

    prepared = prepare(config, verify=True, only_check=True)
    print(describe_corpus(prepared, sequence_length=config.data.sequence_length))
    return 0


DATA = Command(name="data", text="prepare and show what a job trains on", add=add_config, run=_data)
