"""The command `gpu-alloc info`: what is in a trace.

    gpu-alloc info trace.jsonl

Invariant: the lines' bytes add up to the peak.
"""

import argparse
import json
from dataclasses import asdict

from gpu_alloc.cli.options import Commands, add_json, add_trace
from gpu_alloc.core import format_bytes
from gpu_alloc.trace import load_trace, summarize

_LINES = 10


def add_info(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("info", help="sum a trace up: peak, phase, who holds it")
    add_trace(parser)
    add_json(parser)
    parser.set_defaults(run=_run_info)


def _run_info(arguments: argparse.Namespace) -> int:
    summary = summarize(load_trace(arguments.trace, device=arguments.device))
    if arguments.json:
        print(json.dumps(asdict(summary)))
        return 0
    print(f"events          {summary.num_events} ({summary.num_allocations} allocations)")
    print(f"streams         {summary.num_streams}, threads {summary.num_threads}")
    where = f" in {summary.phase!r}" if summary.phase else ""
    print(f"peak live       {format_bytes(summary.peak_live_bytes)}", end="")
    print(f" at event {summary.peak_event}{where}")
    print(f"live at the end {format_bytes(summary.live_at_end_bytes)}")
    print(f"largest request {format_bytes(summary.largest_bytes)}")
    if not summary.num_allocations:
        print("the trace allocates nothing; record a program that does")
        return 0
    print("live at the peak, by the line that asked:")
    for line, size in summary.peak_by_line[:_LINES]:
        print(f"  {format_bytes(size):>12}  {line or 'not known'}")
    rest = summary.peak_by_line[_LINES:]
    if rest:
        print(f"  {format_bytes(sum(size for _, size in rest)):>12}  {len(rest)} other lines")
    return 0
