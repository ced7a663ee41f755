"""What several commands share: arguments of an output, its progress and its report.

add_output(parser)
report = dequantize(..., options=output_options(args), on_progress=progress_line())
print_written(report, started_s)
"""

import argparse
import sys
import time

from weight_convert.cli.arguments import parse_size
from weight_convert.run import OutputOptions, Progress, Report

_SHOWN_KEYS = 3
_PERIOD_S = 0.1


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `--max-shard-size`, `--resume` and `--dry-run`."""
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=OutputOptions().max_shard_bytes,
        metavar="SIZE",
        help="limit on the tensor bytes of one file, such as 5GB or 500MiB (default: 50GB)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where a killed run with the same arguments was",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the exact output sizes, write nothing"
    )
    add_memory(parser)


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add `--max-memory`."""
    parser.add_argument(
        "--max-memory",
        type=parse_size,
        metavar="SIZE",
        help="limit on the resident memory of this process, such as 500MiB: what is computed is "
        "cut smaller (default: what is fastest)",
    )


def output_options(args: argparse.Namespace) -> OutputOptions:
    """The options that `add_output` added."""
    return OutputOptions(
        max_shard_bytes=args.max_shard_size,
        resume=args.resume,
        dry_run=args.dry_run,
        max_memory_bytes=args.max_memory,
    )


def print_written(report: Report, started_s: float) -> None:
    """Print the report of a job that began at `started_s`, by `time.perf_counter`."""
    print_output(report)
    computed = f"{report.num_computed:,} of {report.num_tensors:,} tensors computed"
    if report.dry_run:
        print(f"dry run, nothing written: {computed}")
    else:
        print(f"wrote {report.dst} in {time.perf_counter() - started_s:.1f} s: {computed}")


def print_output(report: Report) -> None:
    """Print every file of an output, and what became of things that the user may miss."""
    for name, size_bytes in report.files:
        print(f"{size_bytes:>16,}  {name}")
    print(f"{report.total_bytes:>16,}  bytes in {len(report.files)} files")
    if report.dry_run and report.peak_memory_bytes is None:
        print("peak memory unknown: computing needs torch, pip install 'weight-convert[compute]'")
    elif report.dry_run:
        print(f"{report.peak_memory_bytes:>16,}  bytes of memory at the peak, imports included")
    for item in report.left_out:
        print(f"left out: {item.name} ({item.reason})")
    if report.removed_keys:
        print(
            f"removed: {len(report.removed_keys):,} tensors of {report.removed_bytes:,} bytes, "
            f"such as {report.removed_keys[0]}"
        )
    if report.unknown_keys:
        shown = ", ".join(report.unknown_keys[:_SHOWN_KEYS])
        print(
            f"carried as they are: {len(report.unknown_keys)} tensors without a name in "
            f"the spec: {shown}"
        )
    if report.other_keys:
        print(
            f"carried as they are: {len(report.other_keys)} tensors of other parts of the model, "
            f"such as {report.other_keys[0]}"
        )
    if report.is_experimental:
        print(f"experimental: no other project's code has shown that it reads {report.to}")


def progress_line() -> Progress | None:
    """What rewrites one line on a terminal, at most ten times a second; None elsewhere."""
    if not sys.stderr.isatty():
        return None
    started_s = time.monotonic()
    shown_s = 0.0

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < _PERIOD_S and done_bytes < total_bytes:
            return
        shown_s = now_s
        bytes_per_s = done_bytes / max(now_s - started_s, 1e-9)
        left_s = (total_bytes - done_bytes) / max(bytes_per_s, 1.0)
        end = "\n" if done_bytes == total_bytes else ""
        text = (
            f"\r{100 * done_bytes / max(total_bytes, 1):5.1f}% of {total_bytes:,} bytes, "
            f"{bytes_per_s / 1e6:,.0f} MB/s, {left_s:,.0f} s left "
        )
        print(text, end=end, file=sys.stderr, flush=True)

    return show
