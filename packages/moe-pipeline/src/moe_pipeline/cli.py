"""The command `moe-pipeline`: print, simulate, plan and check schedules.

    moe-pipeline schedule zbv --stages 4 --microbatches 8 --svg zbv.svg
    moe-pipeline simulate v_half --stages 8 --microbatches 16 --forward 1.2
    moe-pipeline plan --stages 8 --microbatches 32 --memory-cap 10 --csv > plan.csv
    moe-pipeline check plan.csv

Nothing here imports torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_pipeline.errors import MoEPipelineError, MoEValueError
from moe_pipeline.schedules import plan
from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import (
    COMPUTE,
    Schedule,
    StageCosts,
    add_transfers,
    check,
    simulate,
)
from moe_pipeline.schedules.views import format_schedule, read_csv, to_csv, to_svg


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 when a schedule is wrong, 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    run = {"schedule": _schedule, "simulate": _simulate, "plan": _plan, "check": _check}
    try:
        status = run[arguments.command](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MoEPipelineError, OSError, UnicodeError, ValueError) as error:
        print(f"moe-pipeline: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-pipeline", description="Print, simulate, plan and check pipeline schedules."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    schedule = commands.add_parser("schedule", help="print a schedule as a picture or as CSV")
    schedule.add_argument("name", choices=sorted(SCHEDULES))
    _add_sizes(schedule)
    _add_output(schedule)
    simulation = commands.add_parser("simulate", help="time, bubble and memory under given costs")
    simulation.add_argument("what", help="a schedule's name, or a CSV file")
    _add_sizes(simulation, required=False)
    _add_costs(simulation)
    simulation.add_argument("--svg", type=Path, help="write the timeline there")
    _add_copies(simulation, "of a file: ")
    planned = commands.add_parser("plan", help="the best schedule under a memory cap")
    _add_sizes(planned)
    _add_costs(planned)
    planned.add_argument(
        "--memory-cap", type=int, required=True, help="bytes of activations on each rank"
    )
    _add_output(planned)
    check_command = commands.add_parser("check", help="say what is wrong with a schedule file")
    check_command.add_argument("file", type=Path, help="CSV, one row per rank (as torch writes it)")
    check_command.add_argument(
        "--send-buffers",
        type=int,
        default=1,
        help="messages under way per link and direction; 0: every send waits for its receive",
    )
    check_command.add_argument(
        "--communicators",
        type=int,
        choices=(1, 2),
        help="instead, as on NCCL: the transfers of a pair of ranks are done in order on each of "
        "so many, and sends wait for their receives",
    )
    _add_copies(check_command)
    return parser


def _add_copies(parser: argparse.ArgumentParser, of_what: str = "") -> None:
    parser.add_argument(
        "--copies",
        type=int,
        default=1,
        help=f"{of_what}ranks on which a stage may lie (DualPipe: 2)",
    )


def _add_sizes(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--stages",
        type=int,
        required=required,
        help="depth of the pipeline, that is ranks; where a rank has several parts of the model, "
        "each part is numbered as a stage of its own",
    )
    parser.add_argument("--microbatches", type=int, required=required)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", action="store_true", help="all actions, one row per rank")
    parser.add_argument("--svg", type=Path, help="write a drawing there")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    unit = StageCosts()
    parser.add_argument("--forward", type=float, default=unit.forward_s, help="time of F")
    parser.add_argument("--input-gradient", type=float, default=unit.input_gradient_s)
    parser.add_argument("--weight-gradient", type=float, default=unit.weight_gradient_s)
    parser.add_argument("--transfer", type=float, default=0.0, help="time from rank to rank")
    parser.add_argument(
        "--activation-bytes",
        type=int,
        default=unit.activation_bytes,
        help="of one microbatch on one stage, from F to W",
    )


def _costs(arguments: argparse.Namespace) -> StageCosts:
    return StageCosts(
        forward_s=arguments.forward,
        input_gradient_s=arguments.input_gradient,
        weight_gradient_s=arguments.weight_gradient,
        forward_transfer_s=arguments.transfer,
        backward_transfer_s=arguments.transfer,
        activation_bytes=arguments.activation_bytes,
    )


def _schedule(arguments: argparse.Namespace) -> int:
    schedule = SCHEDULES[arguments.name](arguments.stages, arguments.microbatches)
    if arguments.svg:
        arguments.svg.write_text(to_svg(schedule), encoding="utf-8")
    print(to_csv(schedule) if arguments.csv else format_schedule(schedule) + "\n", end="")
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    sizes = (arguments.stages, arguments.microbatches)
    if arguments.what in SCHEDULES:
        if None in sizes:
            raise MoEValueError(f"{arguments.what} needs --stages and --microbatches")
        schedule = SCHEDULES[arguments.what](*sizes)
    elif sizes != (None, None):
        raise MoEValueError(
            f"--stages and --microbatches are for schedules by name ({', '.join(sorted(SCHEDULES))}"
            f"); {arguments.what} is read as a file, which has its own"
        )
    else:
        schedule = read_csv(Path(arguments.what), copies=arguments.copies)
        problems = check(add_transfers(schedule) if _has_no_transfers(schedule) else schedule)
        if problems:  # times of a table that cannot run would be of another one
            print("\n".join(map(str, problems)), file=sys.stderr)
            return 1
    costs = _costs(arguments)
    print(_summary(schedule, costs))
    if arguments.svg:
        arguments.svg.write_text(to_svg(schedule, costs), encoding="utf-8")
    return 0


def _summary(schedule: Schedule, costs: StageCosts) -> str:
    found = simulate(schedule, costs)
    lines = [
        f"{schedule.name}: {schedule.num_stages} stages on {len(schedule.ranks)} ranks, "
        f"{schedule.num_microbatches} microbatches",
        f"makespan {found.makespan_s:g}, idle {100 * found.bubble:.1f} %",
    ]
    for rank, busy in enumerate(found.busy_s):
        lines.append(f"rank {rank}: busy {busy:g}, peak {found.peak_bytes[rank]} bytes")
    return "\n".join(lines)


def _plan(arguments: argparse.Namespace) -> int:
    costs = _costs(arguments)
    schedule = plan(costs, arguments.stages, arguments.microbatches, arguments.memory_cap)
    if arguments.svg:
        arguments.svg.write_text(to_svg(schedule, costs), encoding="utf-8")
    print(to_csv(schedule) if arguments.csv else _summary(schedule, costs) + "\n", end="")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    schedule = read_csv(arguments.file, copies=arguments.copies)
    if _has_no_transfers(schedule):
        schedule = add_transfers(schedule)
        print("no sends or receives in the file: added where stages lie on different ranks")
    problems = check(schedule, send_buffers=arguments.send_buffers)
    if arguments.communicators is not None:
        problems = check(schedule, edges="pair_fifo", communicators=arguments.communicators)
    for problem in problems:
        print(problem)
    size = f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    print(f"{arguments.file}: {size}, {len(problems)} problems")
    return 1 if problems else 0


def _has_no_transfers(schedule: Schedule) -> bool:
    return all(action.kind in COMPUTE for actions in schedule.ranks for action in actions)
