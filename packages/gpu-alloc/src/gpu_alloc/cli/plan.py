"""The command `gpu-alloc plan`: a place for every large request of a recorded step.

    gpu-alloc plan trace.jsonl --step "step 1" -o plan.json

Invariant: the plan that is written was followed by a replay of the trace.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from gpu_alloc.cli.options import Commands, add_conf, add_trace, effective_config
from gpu_alloc.core import format_bytes
from gpu_alloc.plan import plan_step
from gpu_alloc.trace import load_trace, minimal_capacity, replay


def add_plan(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("plan", help="plan the places of a recorded step")
    add_trace(parser)
    parser.add_argument("--step", help="the mark at which the step begins (default: the trace)")
    parser.add_argument("-o", "--out", type=Path, help="write the plan there")
    add_conf(parser)
    parser.set_defaults(run=_run_plan)


def _run_plan(arguments: argparse.Namespace) -> int:
    config = effective_config(arguments)
    trace = load_trace(arguments.trace, device=arguments.device)
    plan = plan_step(trace, arguments.step, alignment_size=config.alignment_size)
    live = replay(trace, config).peak_live_bytes
    facts: dict[str, Any] = {
        "num_places": len(plan.places),
        "size_bytes": plan.size_bytes,
        "peak_live_bytes": live,
        "minimal_capacity_bytes": minimal_capacity(trace, config),
        "planned_capacity_bytes": minimal_capacity(trace, config, plan=plan),
    }
    if arguments.out is not None:
        plan.save(arguments.out)
    if arguments.json:
        print(json.dumps(facts))
        return 0
    print(f"places          {len(plan.places)} in {format_bytes(plan.size_bytes)}")
    for label, key in (
        ("needs", "minimal_capacity_bytes"),
        ("  planned", "planned_capacity_bytes"),
    ):
        print(f"{label:<15} {format_bytes(facts[key]):>12}  ({facts[key] / live:.3f} x live)")
    if arguments.out is not None:
        print(f"written to {arguments.out}")
    return 0
