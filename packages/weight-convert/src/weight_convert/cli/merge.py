"""`weight-convert merge CONFIG.toml DST`: several models made one.

weight-convert merge ties.toml merged
"""

import argparse
import time

from weight_convert.cli.reporting import (
    add_output,
    output_options,
    print_written,
    progress_line,
)
from weight_convert.merging import merge, read_config


def add_merge(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("merge", help="merge models as CONFIG says (needs torch)")
    parser.add_argument(
        "config",
        metavar="CONFIG.toml",
        help="method, models with weights, base, remove_keys; paths are relative to it",
    )
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    add_output(parser)
    parser.set_defaults(run=_run_merge)


def _run_merge(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = merge(
        read_config(args.config),
        args.dst,
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0
