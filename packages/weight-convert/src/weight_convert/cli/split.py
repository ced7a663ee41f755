"""`weight-convert split SRC DST --tp 4 --ep 2` and `join SRC DST`: directories of ranks."""

import argparse
import time

from weight_convert.cli.arguments import add_family, add_layout, family_given, layout_given
from weight_convert.cli.reporting import add_output, output_options, print_written, progress_line
from weight_convert.splitting import join, split


def add_split(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("split", help="cut SRC into one directory for each rank")
    parser.add_argument("src", metavar="SRC", help="model directory, in any format")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    add_layout(parser)
    add_output(parser)
    add_family(parser)
    parser.set_defaults(run=_run_split)


def add_join(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("join", help="join what split wrote into one model again")
    parser.add_argument("src", metavar="SRC", help="directory that split wrote")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    add_output(parser)
    add_family(parser)
    parser.set_defaults(run=_run_join)


def _run_split(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = split(
        args.src,
        args.dst,
        layout_given(args),
        spec=family_given(args),
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0


def _run_join(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = join(
        args.src,
        args.dst,
        spec=family_given(args),
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0
