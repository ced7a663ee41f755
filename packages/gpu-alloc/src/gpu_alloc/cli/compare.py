"""The command `gpu-alloc compare`: policies, and torch's own snapshots, in one table.

    gpu-alloc compare trace.jsonl snapshot.pickle --conf large_pool_pre_alloc_in_mb:60000

Invariant: each row is a capacity on which the policy was replayed; of a snapshot, what torch itself
reserved at its peak.
"""

import argparse
import json
from dataclasses import asdict

from gpu_alloc.cli.options import Commands, add_device, add_json
from gpu_alloc.core import AllocatorConfig, format_bytes
from gpu_alloc.trace import compare


def add_compare(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("compare", help="policies and torch snapshots in one table")
    parser.add_argument("trace", nargs="+", help="traces, or torch snapshots")
    add_device(parser)
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY:VALUE,...",
        help="settings to compare, beside the defaults and the tuned ones; may be repeated",
    )
    add_json(parser)
    parser.set_defaults(run=_run_compare)


def _run_compare(arguments: argparse.Namespace) -> int:
    policies = {"default settings": AllocatorConfig()}
    policies |= {text: AllocatorConfig.parse(text) for text in arguments.conf}
    tables = {path: compare(path, policies, device=arguments.device) for path in arguments.trace}
    if arguments.json:
        print(json.dumps({path: [asdict(row) for row in rows] for path, rows in tables.items()}))
        return 0
    for path, rows in tables.items():
        print(path)
        for row in rows:
            print(f"  {row.ratio:>7.3f} x {format_bytes(row.capacity_bytes):>12}  {row.policy}")
    return 0
