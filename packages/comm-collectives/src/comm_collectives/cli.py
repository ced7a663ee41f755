"""The command `comm-collectives`; sub-commands import torch themselves, so `--help` is quick."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 right, 1 wrong, 2 misused."""
    args = _parser().parse_args(argv)
    return _check(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="comm-collectives",
        description="Collectives that are right for every shape and dtype, and MoE dispatch.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="run every collective with every dtype and shape on local ranks",
        description="Start gloo ranks on this machine, run every collective with every dtype and "
        "shape, compare each result with the known answer and print a table.",
    )
    check.add_argument("--world-size", type=int, default=2, help="number of ranks (default: 2)")
    check.add_argument(
        "--timeout-s", type=float, default=120.0, help="limit in seconds for it all (default: 120)"
    )
    check.add_argument("--json", action="store_true", help="print every cell as JSON instead")
    return parser


def _check(args: argparse.Namespace) -> int:
    from comm_collectives.check import check_machine, format_table, to_json
    from comm_collectives.errors import CommError

    if args.world_size < 1 or args.timeout_s <= 0:
        print("comm-collectives: --world-size and --timeout-s must be positive", file=sys.stderr)
        return 2
    try:
        report = check_machine(args.world_size, timeout_s=args.timeout_s)
    except CommError as error:
        print(f"comm-collectives: {error}", file=sys.stderr)
        return 1
    print(to_json(report) if args.json else format_table(report))
    return 1 if report.problems or report.is_blind else 0
