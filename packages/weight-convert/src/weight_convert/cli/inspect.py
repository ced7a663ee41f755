"""`weight-convert inspect DIR`: what a directory holds."""

import argparse

from weight_convert.cli.arguments import add_family, family_given
from weight_convert.verification import inspect


def add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("inspect", help="say what the model directory DIR holds")
    parser.add_argument("directory", metavar="DIR", help="model directory")
    add_family(parser)
    parser.set_defaults(run=_run_inspect)


def _run_inspect(args: argparse.Namespace) -> int:
    summary = inspect(args.directory, spec=family_given(args))
    dtypes = ", ".join(f"{name} {size:,} bytes" for name, size in summary.bytes_by_dtype.items())
    print(f"family      {summary.model_type or 'unknown'}")
    print(f"format      {summary.format or 'unknown'}")
    if summary.model_type:
        print(f"MoE layers  {summary.num_moe_layers:,}, {summary.num_experts:,} experts each")
    print(f"tensors     {summary.num_tensors:,} in {summary.num_files:,} files")
    print(f"data        {summary.data_bytes:,} bytes: {dtypes or 'none'}")
    print(f"problem     {summary.problem or 'none'}")
    return 0
