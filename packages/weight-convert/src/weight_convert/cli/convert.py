"""`weight-convert convert SRC DST --to FORMAT`: one format of a family into another."""

import argparse
import time

from weight_convert._kinds import FILES
from weight_convert.cli.arguments import add_family, family_given, parse_size
from weight_convert.cli.reporting import add_memory, print_output, progress_line
from weight_convert.plan import ConversionOptions
from weight_convert.run import convert


def add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("convert", help="convert SRC into the new directory DST")
    parser.add_argument("src", metavar="SRC", help="model directory with safetensors weights")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="transformers: as save_pretrained writes; fused: one tensor per layer and projection; "
        "`weight-convert specs` lists what each family has",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FORMAT",
        help="format of SRC (default: found by the names of its tensors)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=ConversionOptions().max_shard_bytes,
        metavar="SIZE",
        help="limit on the tensor bytes of one file, such as 5GB or 500MiB (default: 50GB)",
    )
    parser.add_argument(
        "--unknown",
        choices=["carry", "refuse"],
        default="carry",
        help="what becomes of a tensor that the family's spec does not name (default: carry)",
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="bfloat16, float16 or float32 for all parameters (needs torch; default: as they are)",
    )
    parser.add_argument(
        "--files",
        choices=FILES,
        help="kind of weight files; dcp: torch's distributed checkpoints (default: the format's)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the exact output sizes, write nothing"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where a killed run with the same arguments was, and keep what is written if "
        "this one fails",
    )
    parser.add_argument(
        "--move",
        action="store_true",
        help="use SRC up: free what is written, so that little more than one copy is on disk; "
        "SRC is removed at the end",
    )
    add_memory(parser)
    add_family(parser)
    parser.set_defaults(run=_run_convert)


def _run_convert(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = convert(
        args.src,
        args.dst,
        to=args.to,
        spec=family_given(args),
        options=ConversionOptions(
            max_shard_bytes=args.max_shard_size,
            source_format=args.source,
            unknown=args.unknown,
            resume=args.resume,
            move=args.move,
            dtype=args.dtype,
            files=args.files,
            max_memory_bytes=args.max_memory,
        ),
        dry_run=args.dry_run,
        on_progress=progress_line(),
    )
    print_output(report)
    regrouped = f"{report.num_regrouped:,} of {report.num_tensors:,} tensors regrouped"
    if report.num_regrouped == report.num_computed == 0:
        regrouped = f"the tensors already were as in {args.to}"
    if report.num_computed:
        regrouped += f", {report.num_computed:,} computed or transposed"
    if args.resume and not report.dry_run:
        print(f"{report.copied_bytes:>16,}  bytes of weight files written by this run")
    if report.dry_run:
        print(f"dry run, nothing written: {regrouped}")
    else:
        print(f"wrote {report.dst} in {time.perf_counter() - started_s:.1f} s: {regrouped}")
    return 0
