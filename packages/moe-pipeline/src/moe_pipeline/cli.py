"""The command `moe-pipeline`: print schedules and check schedule files.

    moe-pipeline schedule 1f1b --stages 4 --microbatches 8
    moe-pipeline schedule 1f1b --stages 4 --microbatches 8 --csv > plan.csv
    moe-pipeline check plan.csv

Nothing here imports torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_pipeline.checker import check
from moe_pipeline.errors import MoEPipelineError
from moe_pipeline.generators import GENERATORS
from moe_pipeline.picture import format_schedule
from moe_pipeline.schedule import COMPUTE, Schedule, add_transfers
from moe_pipeline.schedule_csv import read_csv, to_csv


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 when a schedule is wrong, 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "schedule":
            return _schedule(arguments)
        return _check(arguments)
    except (MoEPipelineError, OSError, UnicodeError, ValueError) as error:
        print(f"moe-pipeline: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-pipeline", description="Print pipeline schedules and check schedule files."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    schedule = commands.add_parser("schedule", help="print a schedule as a picture or as CSV")
    schedule.add_argument("name", choices=sorted(GENERATORS))
    schedule.add_argument("--stages", type=int, required=True)
    schedule.add_argument("--microbatches", type=int, required=True)
    schedule.add_argument("--csv", action="store_true", help="all actions, one row per rank")
    check_command = commands.add_parser("check", help="say what is wrong with a schedule file")
    check_command.add_argument("file", type=Path, help="CSV, one row per rank (as torch writes it)")
    check_command.add_argument(
        "--send-buffers",
        type=int,
        default=1,
        help="messages under way per link and direction; 0: every send waits for its receive",
    )
    return parser


def _schedule(arguments: argparse.Namespace) -> int:
    schedule = GENERATORS[arguments.name](arguments.stages, arguments.microbatches)
    print(to_csv(schedule) if arguments.csv else format_schedule(schedule) + "\n", end="")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    schedule = read_csv(arguments.file)
    if _has_no_transfers(schedule):
        schedule = add_transfers(schedule)
        print("no sends or receives in the file: added where stages lie on different ranks")
    problems = check(schedule, send_buffers=arguments.send_buffers)
    for problem in problems:
        print(problem)
    size = f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    print(f"{arguments.file}: {size}, {len(problems)} problems")
    return 1 if problems else 0


def _has_no_transfers(schedule: Schedule) -> bool:
    return all(action.kind in COMPUTE for actions in schedule.ranks for action in actions)
