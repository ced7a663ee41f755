"""The command `gpu-alloc plot`: a trace as a picture that opens offline, or for torch's viewer.

    gpu-alloc plot trace.jsonl -o trace.svg
    gpu-alloc plot trace.jsonl -o ours.pickle     # a snapshot for torch's viewer

Invariant: the placements shown are those of a replay under the settings given.
"""

import argparse
from pathlib import Path

from gpu_alloc.cli.options import Commands, add_conf, add_trace, effective_config
from gpu_alloc.errors import AllocValueError
from gpu_alloc.trace import load_trace, save_plot, save_torch_snapshot


def add_plot(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("plot", help="draw a trace: live, reserved, map of addresses")
    add_trace(parser)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("trace.svg"), help=".svg, or .pickle for torch"
    )
    add_conf(parser)
    parser.set_defaults(run=_run_plot)


def _run_plot(arguments: argparse.Namespace) -> int:
    trace = load_trace(arguments.trace, device=arguments.device)
    config = effective_config(arguments)
    if all(event.action != "alloc" for event in trace):
        raise AllocValueError("the trace allocates nothing; record a program that does")
    if arguments.out.suffix == ".pickle":
        save_torch_snapshot(trace, arguments.out, config)
    elif arguments.out.suffix == ".svg":
        left_out = save_plot(trace, arguments.out, config)
        if left_out:
            print(f"{left_out} of the smallest blocks are not drawn")
    else:
        raise AllocValueError(f"{arguments.out}: write a .svg, or a .pickle for torch's viewer")
    print(arguments.out)
    return 0
