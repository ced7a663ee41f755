"""The command `moe-train inspect`."""

import argparse
from pathlib import Path

from moe_train.commands.options import Command
from moe_train.errors import TrainValueError

_EXIT_FAULTS = 1


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="DIR", help="a checkpoint's or run's folder, or URL")
    parser.add_argument(
        "--samples",
        action="store_true",
        help="which samples the run has used, checked; exit code 1 if one is missing or used twice",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        type=Path,
        help="with --samples: write step, skipped, sample, epoch, source and sequence of each",
    )


def _inspect(arguments: argparse.Namespace) -> int:
    """List the tensors, parts and training state of a checkpoint, or the samples that it used."""
    from moe_train.jobs import audit_samples, describe_checkpoint, write_samples

    if not arguments.samples:
        if arguments.csv is not None:
            raise TrainValueError("--csv writes samples; give --samples with it")
        print(describe_checkpoint(arguments.checkpoint))
        return 0
    audit = audit_samples(arguments.checkpoint)
    print(audit.text)
    if arguments.csv is not None:
        count = write_samples(arguments.checkpoint, arguments.csv)
        print(f"wrote       {count:,} samples to {arguments.csv}")
    return _EXIT_FAULTS if audit.faults else 0


INSPECT = Command(
    name="inspect", text="list what a checkpoint holds", add=_add_inspect, run=_inspect
)
