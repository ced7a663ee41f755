"""The command `gpu-alloc sizes`: how requests are padded and routed.

    gpu-alloc sizes 1000 2MiB --conf small_pool_size_in_mb:2

Invariant: what is printed is what an allocator did, not what a formula says.
"""

import argparse
import json

from gpu_alloc.cli.options import Commands, add_conf, effective_config, parse_size
from gpu_alloc.core import TwoPoolAllocator, format_bytes
from gpu_alloc.sources import AddressSource, PagedAddressSource


def add_sizes(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("sizes", help="show how requests are padded and routed")
    parser.add_argument("size", nargs="+", type=parse_size, help="for example 1000 or 3MiB")
    add_conf(parser)
    parser.set_defaults(run=_run_sizes)


def _run_sizes(arguments: argparse.Namespace) -> int:
    config = effective_config(arguments)
    rows = []
    for size in arguments.size:
        source = PagedAddressSource() if config.use_virtual_memory else AddressSource()
        allocator = TwoPoolAllocator(source, config)
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
