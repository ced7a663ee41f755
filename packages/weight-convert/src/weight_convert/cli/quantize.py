"""`weight-convert quantize` and `dequantize`: weights in blocks of fp8 or mxfp4, and plain ones.

weight-convert dequantize DeepSeek-V3 plain
weight-convert quantize plain again          # by the scales that were kept: every byte
weight-convert quantize plain other --to fp8 # by fresh ones
"""

import argparse
import time

from weight_convert.cli.arguments import add_family, family_given
from weight_convert.cli.reporting import (
    add_output,
    output_options,
    print_written,
    progress_line,
)
from weight_convert.quantization import dequantize, quantize


def add_quantize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "quantize", help="write SRC with its matrices in fp8 or mxfp4 (needs torch)"
    )
    parser.add_argument("src", metavar="SRC", help="model directory in plain numbers")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    parser.add_argument(
        "--to",
        choices=["fp8", "mxfp4"],
        help="make fresh scales (default: take those that dequantize kept in SRC)",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tensors to leave as they are, such as '*.o_proj.weight'; may be repeated",
    )
    add_output(parser)
    add_family(parser)
    parser.set_defaults(run=_run_quantize)


def add_dequantize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "dequantize", help="write SRC, in fp8 or mxfp4, in plain numbers (needs torch)"
    )
    parser.add_argument("src", metavar="SRC", help="quantised model directory")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    parser.add_argument(
        "--no-scales",
        action="store_true",
        help="do not write quantization.kept, by which quantize gives back every byte",
    )
    add_output(parser)
    parser.set_defaults(run=_run_dequantize)


def _run_quantize(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = quantize(
        args.src,
        args.dst,
        to=args.to,
        skip=args.skip,
        spec=family_given(args),
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0


def _run_dequantize(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = dequantize(
        args.src,
        args.dst,
        dtype=args.dtype,
        keep_scales=not args.no_scales,
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0
