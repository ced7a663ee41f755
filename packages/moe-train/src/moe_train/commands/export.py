"""The command `moe-train export`."""

import argparse
from pathlib import Path

from moe_train.commands.options import Command


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="DIR", help="a checkpoint's folder, or URL")
    parser.add_argument("target", metavar="OUT", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--format",
        default="transformers",
        help="one of the family's formats, as `weight-convert specs` lists them (default: "
        "transformers)",
    )
    parser.add_argument(
        "--files",
        choices=("safetensors", "bin", "pdparams", "dcp"),
        help="kind of weight files (default: the format's)",
    )
    parser.add_argument(
        "--part", default="model", help="model, its moving average ema, or master_weights"
    )


def _export(arguments: argparse.Namespace) -> int:
    """Write the weights of a checkpoint alone, in any format of its family."""
    from moe_train.jobs import export_weights

    for line in export_weights(
        arguments.checkpoint,
        arguments.target,
        to=arguments.format,
        files=arguments.files,
        part=arguments.part,
    ):
        print(line)
    return 0


EXPORT = Command(
    name="export",
    text="write a checkpoint's weights in any format",
    add=_add_export,
    run=_export,
)
