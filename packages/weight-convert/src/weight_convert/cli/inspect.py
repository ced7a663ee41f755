"""`weight-convert inspect DIR`: what a directory holds."""

import argparse
from collections.abc import Sequence
from itertools import groupby

from weight_convert.cli.arguments import add_family, add_layout, family_given, layout_given
from weight_convert.files import read_catalog
from weight_convert.verification import inspect, rank_bytes, tensor_tree


def add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("inspect", help="say what the model directory DIR holds")
    parser.add_argument("directory", metavar="DIR", help="model directory")
    parser.add_argument(
        "--tree", action="store_true", help="list the tensors, numbers taken together"
    )
    parser.add_argument(
        "--dtype",
        default="",
        metavar="NAME",
        help="with degrees: bytes as if the weights were in fp8 (blocks of 128), bfloat16, ...",
    )
    add_layout(parser)
    add_family(parser)
    parser.set_defaults(run=_run_inspect)


def _run_inspect(args: argparse.Namespace) -> int:
    spec, layout = family_given(args), layout_given(args)
    summary = inspect(args.directory, spec=spec)
    dtypes = ", ".join(f"{name} {size:,} bytes" for name, size in summary.bytes_by_dtype.items())
    print(f"family      {summary.model_type or 'unknown'}")
    print(f"format      {summary.format or 'unknown'}")
    if summary.model_type:
        print(f"MoE layers  {summary.num_moe_layers:,}, {summary.num_experts:,} experts each")
    print(f"tensors     {summary.num_tensors:,} in {summary.num_files:,} files")
    print(f"data        {summary.data_bytes:,} bytes: {dtypes or 'none'}")
    print(f"problem     {summary.problem or 'none'}")
    if args.tree:
        for branch in tensor_tree(read_catalog(args.directory)):
            shape = " x ".join(map(str, branch.shape)) or "scalar"
            print(
                f"{branch.size_bytes:>16,}  {branch.count:>6,}  {branch.dtype:8} {shape:20} "
                f"{branch.name}"
            )
    if layout.world_size > 1 or args.dtype:
        _print_ranks(rank_bytes(read_catalog(args.directory), layout, spec=spec, dtype=args.dtype))
    return 0


def _print_ranks(held: Sequence[int]) -> None:
    """One line for each run of ranks that hold the same number of bytes."""
    begin = 0
    for size_bytes, run in groupby(held):
        end = begin + len(list(run))
        name = f"rank {begin}" if end == begin + 1 else f"ranks {begin} to {end - 1}"
        print(f"{size_bytes:>16,}  bytes on {name}{'' if end == begin + 1 else ', each'}")
        begin = end
