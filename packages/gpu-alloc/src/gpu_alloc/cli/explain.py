"""The command `gpu-alloc explain`: why a trace fails on a device, and what would have fitted.

    gpu-alloc explain trace.jsonl --capacity-bytes 80GiB

Invariant: a change that is printed was replayed. Exit status: 0 the trace runs as it is, or with
the change; 1 it does not.
"""

import argparse
import json

from gpu_alloc.cli.options import Commands, add_conf, add_trace, effective_config, parse_size
from gpu_alloc.trace import explain, load_trace

_FACTS = (
    "num_event",
    "phase",
    "capacity_bytes",
    "live_bytes",
    "fragmented_bytes",
    "idle_elsewhere_bytes",
    "unreserved_bytes",
    "possible",
    "num_tried",
)


def add_explain(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("explain", help="say why a trace fails, and which change helps")
    add_trace(parser)
    parser.add_argument(
        "--capacity-bytes",
        type=parse_size,
        metavar="SIZE",
        required=True,
        help="memory of the device, for example 80GiB",
    )
    add_conf(parser)
    parser.set_defaults(run=_run_explain)


def _run_explain(arguments: argparse.Namespace) -> int:
    found = explain(
        load_trace(arguments.trace, device=arguments.device),
        effective_config(arguments),
        arguments.capacity_bytes,
    )
    if arguments.json:
        facts = None
        if found is not None:
            facts = {name: getattr(found, name) for name in _FACTS}
            facts["change"] = None if found.change is None else found.change.format()
        print(json.dumps({"failure": facts}))
    else:
        print("the trace runs on this device" if found is None else found.message())
    return 0 if found is None or found.change is not None else 1
