"""The command `moe-train inspect`."""

import argparse
from pathlib import Path

from moe_train.commands.options import Command


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="DIR", type=Path, help="a checkpoint's folder")


def _inspect(arguments: argparse.Namespace) -> int:
    """List the tensors, parts and training state of a checkpoint."""
    from moe_train.jobs import describe_checkpoint

    print(describe_checkpoint(arguments.checkpoint))
    return 0


INSPECT = Command(
    name="inspect", text="list what a checkpoint holds", add=_add_inspect, run=_inspect
)
