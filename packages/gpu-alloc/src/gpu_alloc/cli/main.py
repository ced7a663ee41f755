"""The command `gpu-alloc`: replay a trace without a device, and show what a configuration means.

    gpu-alloc replay trace.jsonl --conf large_pool_auto_growth_chunk_size_in_mb:64
    gpu-alloc sizes 1000 2MiB --conf small_pool_size_in_mb:2
    gpu-alloc config

Invariant: exit status 0 means done, 1 that the trace ran out of memory, 2 that the input was wrong.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from gpu_alloc.core import ENV_VARIABLE, AllocatorConfig, TwoPoolAllocator, format_bytes
from gpu_alloc.errors import AllocError
from gpu_alloc.sources import AddressSource
from gpu_alloc.trace import ReplayResult, load_trace, minimal_capacity, replay

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        config = _effective_config(arguments)
        status: int = arguments.run(arguments, config)
        return status
    except (AllocError, OSError) as error:
        print(f"gpu-alloc: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-alloc",
        description="A two-pool best-fit GPU allocator: replay allocation traces, show settings.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay_parser = commands.add_parser("replay", help="run a trace through the policy")
    replay_parser.add_argument("trace", help="trace file, as save_trace writes it")
    replay_parser.add_argument(
        "--capacity-bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory of the simulated device, for example 80GiB (default: no limit)",
    )
    replay_parser.add_argument(
        "--minimal-capacity",
        action="store_true",
        help="also search the smallest device on which the trace runs (about 15 replays)",
    )
    replay_parser.set_defaults(run=_run_replay)
    sizes_parser = commands.add_parser("sizes", help="show how requests are padded and routed")
    sizes_parser.add_argument("size", nargs="+", type=parse_size, help="for example 1000 or 3MiB")
    sizes_parser.set_defaults(run=_run_sizes)
    config_parser = commands.add_parser("config", help="print the effective configuration")
    config_parser.set_defaults(run=_run_config)
    for each in (replay_parser, sizes_parser, config_parser):
        each.add_argument(
            "--conf",
            default="",
            metavar="KEY:VALUE,...",
            help=f"settings on top of the environment variable {ENV_VARIABLE}",
        )
        each.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parse_size(text: str) -> int:
    """Bytes from `1000`, `2MiB` or `1.5 GiB`. Raises argparse.ArgumentTypeError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB or TiB"
        )
    if "." not in match[1]:
        return int(match[1]) * _UNITS[match[2]]
    return int(float(match[1]) * _UNITS[match[2]])


def _effective_config(arguments: argparse.Namespace) -> AllocatorConfig:
    return AllocatorConfig.parse(arguments.conf, base=AllocatorConfig.from_env())


def _run_replay(arguments: argparse.Namespace, config: AllocatorConfig) -> int:
    trace = load_trace(arguments.trace)
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


def _run_sizes(arguments: argparse.Namespace, config: AllocatorConfig) -> int:
    rows = []
    for size in arguments.size:
        allocator = TwoPoolAllocator(AddressSource(), config)
        padded = allocator.malloc(size).size
        stats = allocator.stats()
        pool = "small" if stats.small.num_live_blocks else "large" if padded else "none"
        chunk = {"small": stats.small, "large": stats.large}.get(pool)
        rows.append(
            {
                "requested_bytes": size,
                "padded_bytes": padded,
                "pool": pool,
                "first_chunk_bytes": chunk.reserved_bytes if chunk is not None else 0,
            }
        )
    if arguments.json:
        print(json.dumps({"sizes": rows}))
        return 0
    print(f"{'requested':>16} {'padded':>16}  pool   first chunk")
    for row in rows:
        chunk_text = format_bytes(int(row["first_chunk_bytes"]))
        print(
            f"{row['requested_bytes']:>16} {row['padded_bytes']:>16}  {row['pool']:<6} {chunk_text}"
        )
    return 0


def _run_config(arguments: argparse.Namespace, config: AllocatorConfig) -> int:
    if arguments.json:
        print(json.dumps(asdict(config)))
        return 0
    environment = AllocatorConfig.from_env()
    defaults = AllocatorConfig()
    for field in fields(config):
        value, default = getattr(config, field.name), getattr(defaults, field.name)
        in_environment = getattr(environment, field.name)
        origin = "--conf" if value != in_environment else ENV_VARIABLE
        origin = "default" if value == default else origin
        print(f"{field.name:<42} {str(value).lower():<8} {origin}")
    print(f"\n{ENV_VARIABLE}={config.format()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
