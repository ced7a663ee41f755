"""The command `gpu-alloc replay`: a trace on an imagined device.

    gpu-alloc replay trace.jsonl --conf large_pool_auto_growth_chunk_size_in_mb:64

Invariant: exit status 0 means that the trace ran, 1 that it ran out of memory.
"""

import argparse
import json
import sys
from typing import Any

from gpu_alloc.cli.options import Commands, add_conf, add_trace, effective_config, parse_size
from gpu_alloc.core import format_bytes
from gpu_alloc.trace import ReplayResult, load_trace, minimal_capacity, replay


def add_replay(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("replay", help="run a trace through the policy")
    add_trace(parser)
    parser.add_argument(
        "--capacity-bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory of the simulated device, for example 80GiB (default: no limit)",
    )
    parser.add_argument(
        "--minimal-capacity",
        action="store_true",
        help="also search the smallest device on which the trace runs (about 15 replays)",
    )
    add_conf(parser)
    parser.set_defaults(run=_run_replay)


def _run_replay(arguments: argparse.Namespace) -> int:
    config = effective_config(arguments)
    trace = load_trace(arguments.trace, device=arguments.device)
    result = replay(trace, config, arguments.capacity_bytes)
    facts: dict[str, Any] = {
        "num_events": result.num_events,
        "peak_live_bytes": result.peak_live_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "small_pool_peak_bytes": result.stats.small.reserved_peak_bytes,
        "large_pool_peak_bytes": result.stats.large.reserved_peak_bytes,
        "num_source_calls": result.stats.num_source_calls,
        "oom": None if result.oom is None else result.oom.message(),
    }
    if arguments.minimal_capacity:
        facts["minimal_capacity_bytes"] = minimal_capacity(trace, config)
    if arguments.json:
        print(json.dumps(facts))
    else:
        _print_replay(result, facts, len(trace))
    return 0 if result.oom is None else 1


def _print_replay(result: ReplayResult, facts: dict[str, Any], num_trace_events: int) -> None:
    print(f"events          {result.num_events} of {num_trace_events}")
    for label, key in (
        ("peak live", "peak_live_bytes"),
        ("peak reserved", "peak_reserved_bytes"),
        ("  small pool", "small_pool_peak_bytes"),
        ("  large pool", "large_pool_peak_bytes"),
        ("needs at least", "minimal_capacity_bytes"),
    ):
        if key in facts:
            live = result.peak_live_bytes
            ratio = f"  ({facts[key] / live:.3f} x live)" if live else ""
            print(f"{label:<15} {format_bytes(facts[key]):>12}{ratio}")
    print(f"source calls    {result.stats.num_source_calls}")
    if result.oom is not None:
        print(f"event {result.num_events}: {result.oom.message()}", file=sys.stderr)
