"""The command `gpu-alloc tune`: the settings under which a trace needs the smallest device.

    gpu-alloc tune trace.jsonl -o tuned.toml

Invariant: what is printed was replayed on the whole trace.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from gpu_alloc.cli.options import Commands, add_json, add_trace
from gpu_alloc.core import format_bytes
from gpu_alloc.trace import load_trace, tune


def add_tune(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("tune", help="search the settings that need the smallest device")
    add_trace(parser)
    parser.add_argument("-o", "--out", type=Path, help="write the settings there, as TOML")
    parser.add_argument(
        "--first", type=float, default=0.4, help="part of the trace that the choice may see"
    )
    parser.add_argument(
        "--calls-per-event",
        type=float,
        default=0.05,
        help="how often memory may be taken from the device or given back; each waits for it",
    )
    parser.add_argument(
        "--virtual-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="try use_virtual_memory, too, for programs that run where pages can be mapped",
    )
    add_json(parser)
    parser.set_defaults(run=_run_tune)


def _run_tune(arguments: argparse.Namespace) -> int:
    tuned = tune(
        load_trace(arguments.trace, device=arguments.device),
        first=arguments.first,
        calls_per_event=arguments.calls_per_event,
        virtual_memory=arguments.virtual_memory,
    )
    if arguments.out is not None:
        tuned.save(arguments.out)
    if arguments.json:
        print(json.dumps(asdict(tuned)))
        return 0
    print(f"{tuned.name}: {tuned.ratio:.3f} x the peak of live bytes", end="")
    print(f" ({tuned.first_ratio:.3f} x on the part that chose it)")
    print(f"needs {format_bytes(tuned.capacity_bytes)} ({tuned.capacity_bytes} bytes)")
    print(f"takes memory from the device, or gives it back, {tuned.num_source_calls} times")
    print(f"GPU_ALLOC_CONF={tuned.config.format()}")
    if arguments.out is not None:
        print(f"written to {arguments.out}")
    return 0
