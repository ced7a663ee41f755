"""The command `weight-convert`: convert, verify and inspect model directories.

    weight-convert convert Qwen3-30B-A3B fused --to fused --dry-run
    weight-convert convert Qwen3-30B-A3B fused --to fused
    weight-convert verify Qwen3-30B-A3B fused
    weight-convert inspect fused

Exit status: 0 done (or equal), 1 the directories differ, 2 an error, 130 interrupted.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from weight_convert.catalog import detect_spec
from weight_convert.conversion import Progress, convert
from weight_convert.errors import WeightConvertError
from weight_convert.families import FAMILIES, FamilySpec, get_spec
from weight_convert.inspection import inspect
from weight_convert.plan import DEFAULT_MAX_SHARD_BYTES
from weight_convert.verification import verify

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SHOWN_DIFFERENCES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (WeightConvertError, OSError) as error:
        print(f"weight-convert: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("weight-convert: interrupted; no output was left", file=sys.stderr)
        return 130
    return status


def parse_size(text: str) -> int:
    """Return the bytes of `5GB` (decimal, as transformers reads it), `5GiB` or a plain number.

    Raises:
        argparse.ArgumentTypeError: anything else, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected for example 5GB or 500MiB")
    size_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if size_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte")
    return size_bytes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weight-convert",
        description="Convert MoE checkpoints between fused and per-expert form, bit for bit.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("convert", help="convert SRC into the new directory DST")
    command.add_argument("src", metavar="SRC", help="model directory with safetensors weights")
    command.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    command.add_argument(
        "--to",
        required=True,
        choices=["fused", "per-expert"],
        help="fused: one tensor per layer and projection; per-expert: as transformers writes them",
    )
    command.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=DEFAULT_MAX_SHARD_BYTES,
        metavar="SIZE",
        help="limit on the tensor bytes of one file, such as 5GB or 500MiB (default: 50GB)",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print the exact output sizes, write nothing"
    )
    command.set_defaults(run=_convert)

    check = commands.add_parser("verify", help="compare the tensors of A and B bit for bit")
    check.add_argument("a", metavar="A", help="model directory, in any form")
    check.add_argument("b", metavar="B", help="model directory, in any form")
    check.set_defaults(run=_verify)

    show = commands.add_parser("inspect", help="say what the model directory DIR holds")
    show.add_argument("directory", metavar="DIR", help="model directory")
    show.set_defaults(run=_inspect)

    for sub in (command, check, show):
        sub.add_argument(
            "--model-type",
            metavar="NAME",
            help=f"family of the model: {', '.join(sorted(FAMILIES))} (default: from config.json)",
        )
    return parser


def _spec(args: argparse.Namespace) -> FamilySpec | None:
    """Return the family that the user named, if any."""
    return None if args.model_type is None else get_spec(args.model_type)


def _convert(args: argparse.Namespace) -> int:
    src = Path(args.src)
    started_s = time.perf_counter()
    report = convert(
        src,
        args.dst,
        spec=_spec(args) or detect_spec(src),
        to="fused" if args.to == "fused" else "per_expert",
        max_shard_bytes=args.max_shard_size,
        dry_run=args.dry_run,
        on_progress=_progress_line() if sys.stderr.isatty() else None,
    )
    for name, size_bytes in report.files:
        print(f"{size_bytes:>16,}  {name}")
    print(f"{report.total_bytes:>16,}  bytes in {len(report.files)} files")
    for item in report.left_out:
        print(f"left out: {item.name} ({item.reason})")
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    regrouped = f"{report.num_regrouped:,} of {report.num_tensors:,} tensors regrouped"
    if report.num_regrouped == 0:
        regrouped = f"the experts already were {args.to}"
    if report.dry_run:
        print(f"dry run, nothing written: {regrouped}")
    else:
        print(f"wrote {report.dst} in {time.perf_counter() - started_s:.1f} s: {regrouped}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    report = verify(args.a, args.b, spec=_spec(args))
    for difference in report.differences[:_SHOWN_DIFFERENCES]:
        print(f"{difference.key}: {difference.detail}")
    if len(report.differences) > _SHOWN_DIFFERENCES:
        print(f"... and {len(report.differences) - _SHOWN_DIFFERENCES:,} more")
    verdict = "equal" if report.equal else f"{len(report.differences):,} differ"
    print(f"{verdict}: {report.num_tensors:,} tensors, {report.compared_bytes:,} bytes compared")
    return 0 if report.equal else 1


def _inspect(args: argparse.Namespace) -> int:
    summary = inspect(args.directory, spec=_spec(args))
    dtypes = ", ".join(f"{name} {size:,} bytes" for name, size in summary.bytes_by_dtype.items())
    print(f"family      {summary.model_type}")
    print(f"experts     {summary.form.replace('_', '-')}")
    print(f"MoE layers  {summary.num_moe_layers}, {summary.num_experts} experts each")
    print(f"tensors     {summary.num_tensors:,} in {summary.num_files} files")
    print(f"data        {summary.data_bytes:,} bytes ({dtypes})")
    if summary.num_unmapped:
        print(f"unmapped    {summary.num_unmapped:,} tensors of single experts (carried unchanged)")
    print(f"problem     {summary.problem or 'none'}")
    return 0


def _progress_line() -> Progress:
    """Return a callback that rewrites one line on a terminal, at most ten times a second."""
    shown_s = 0.0

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < 0.1 and done_bytes < total_bytes:
            return
        shown_s = now_s
        end = "\n" if done_bytes == total_bytes else ""
        percent = 100 * done_bytes / max(total_bytes, 1)
        print(f"\r{percent:5.1f}% of {total_bytes:,} bytes", end=end, file=sys.stderr, flush=True)

    return show
