"""The command `comm-collectives`; sub-commands import torch themselves, so `--help` is quick."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence

from comm_collectives.planning import add_plan_arguments, run_plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 right, 1 wrong, 2 misused."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        return 1
    return status


def _is_unread() -> bool:
    """Whether the reader of our output, such as `head`, has seen enough; if so, drop the rest."""
    poll, output = select.poll(), sys.stdout.fileno()
    poll.register(output, 0)
    return bool(poll.poll(0)) and os.dup2(os.open(os.devnull, os.O_WRONLY), output) == output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="comm-collectives",
        description="Collectives that are right for every shape and dtype, and MoE dispatch.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="run every collective with every dtype, shape and mistake on local ranks",
        description="Start ranks on this machine, run every collective with every dtype and shape, "
        "compare each result with the known answer, make every mistake on purpose, and print a "
        "table. Takes a quarter of a minute for two ranks and half a minute for four, and --raw "
        "half a minute more. Exit status 1 if anything did not end as it must.",
    )
    check.add_argument("--world-size", type=int, default=2, help="number of ranks (default: 2)")
    check.add_argument(
        "--backend",
        choices=("gloo", "comm_shm"),
        default="gloo",
        help="of the process groups; comm_shm goes through shared memory (default: gloo)",
    )
    check.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tensors are; cuda deals ranks to the devices in turn, over NCCL if there "
        "is one for each, else over gloo (default: cpu)",
    )
    check.add_argument(
        "--wire",
        action="store_true",
        help="compare calls over TCP as well, as it is across hosts",
    )
    check.add_argument(
        "--raw",
        action="store_true",
        help="do the same with torch.distributed itself, for comparison: a few dtypes",
    )
    check.add_argument("--all", action="store_true", help="with --raw: every dtype")
    check.add_argument("--json", action="store_true", help="print every outcome as JSON instead")
    check.set_defaults(run=_check)
    plan = commands.add_parser(
        "plan",
        help="predict bytes and times of MoE dispatch and choose how rows travel",
        description="Predict, for uniform routing, the bytes per rank and the time of every way to "
        "move MoE rows between ranks, and choose one. Nothing is run.",
    )
    add_plan_arguments(plan)
    plan.set_defaults(run=run_plan)
    _add_fuzz(commands)
    _add_run(commands)
    return parser


def _add_fuzz(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    fuzz = commands.add_parser(
        "fuzz",
        help="run random programs under random faults on simulated ranks",
        description="Simulate ranks in this process, with delays, kills, reordered and truncated "
        "calls, and print each schedule that ends wrong, made short. Exit status 1 if one does.",
    )
    fuzz.add_argument("--schedules", type=int, default=100, help="how many (default: 100)")
    fuzz.add_argument("--seed", type=int, default=0, help="of the first one (default: 0)")
    fuzz.set_defaults(run=_fuzz)


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser(
        "run",
        help="run a program that calls torch.distributed, with its collectives compared",
        description="Run a script with this package's collectives and transfers in the place of "
        "torch.distributed's: strided tensors and all dtypes are right, and ranks that make "
        "different calls, or none, are named. What torch calls inside (DistributedDataParallel's "
        "reducer, FSDP) stays torch's. On every rank: torchrun --nproc-per-node 2 -m "
        "comm_collectives run train.py --its-own-options",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module's name")
    # One list: argparse takes the first "--" away from arguments that stand behind another.
    text = "path of the script, and its own arguments"
    run.add_argument("program", nargs=argparse.PARSER, metavar="PROGRAM", help=text)
    run.set_defaults(run=_run)


def _check(args: argparse.Namespace) -> int:
    from comm_collectives.base import DTYPES
    from comm_collectives.checking import (
        FEW_DTYPES,
        HERE,
        WIRE,
        check_machine,
        format_table,
        on_devices,
        to_json,
    )
    from comm_collectives.errors import CommError

    if args.all and not args.raw:
        print("comm-collectives: --all: every dtype of --raw; give both", file=sys.stderr)
        return 2
    raw_dtypes = () if not args.raw else DTYPES if args.all else FEW_DTYPES
    option = "--device"
    try:
        backend = args.backend
        if args.device == "cuda":
            backend = on_devices(backend, args.world_size)
        option = "--world-size"
        report = check_machine(
            args.world_size,
            places=(HERE, WIRE) if args.wire else (HERE,),
            raw_dtypes=raw_dtypes,
            backend=backend,
        )
    except ValueError as error:
        print(f"comm-collectives: {option}: {error}", file=sys.stderr)
        return 2
    except CommError as error:
        print(f"comm-collectives: {error}", file=sys.stderr)
        return 1
    print(to_json(report) if args.json else format_table(report))
    return 1 if report.problems or report.missed_canaries else 0


def _fuzz(args: argparse.Namespace) -> int:
    from comm_collectives.simulation.fuzz import fuzz

    try:
        report = fuzz(args.schedules, seed=args.seed)
    except ValueError as error:
        print(f"comm-collectives: --schedules: {error}", file=sys.stderr)
        return 2
    print(report)
    return 1 if report.violations else 0


def _run(args: argparse.Namespace) -> int:
    from comm_collectives.checking import is_there, run_program

    program, *arguments = args.program[args.program[0] == "--" :]
    if not is_there(program, is_module=args.is_module):
        kind = "module" if args.is_module else "script"
        print(
            f"comm-collectives: there is no {kind} {program!r}; give the path of a script, or -m "
            "and a module's name",
            file=sys.stderr,
        )
        return 2
    run_program(program, arguments, is_module=args.is_module)
    return 0
