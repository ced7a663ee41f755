"""The command `moe-train train`: it starts ranks, or is one that torchrun, srun or mpirun made."""

import argparse
import logging
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moe_train.commands.options import OVERRIDE, Command, add_config
from moe_train.config import Config, KeyChange, format_compact, keys_help, load_config
from moe_train.early_checks import check_early
from moe_train.errors import TrainValueError
from moe_train.rank import ForkServer, RankPlace, find_place

logger = logging.getLogger(__name__)

_NOTES = """\
Each key can be set in the file or, later and stronger, on the command line as table.key=value:

  moe-train train examples/python_stdlib.toml parallel.pp=1 train.max_steps=50 data.corpus=./docs

Relative paths in the file start at the file's folder, those on the command line at the current
folder. By itself the command starts parallel.pp * parallel.dp * parallel.ep processes on this
machine; started so many times by torchrun, srun or mpirun, each is one rank of the job.

Ctrl-C or SIGTERM: the ranks finish the step, save a checkpoint and end; a second Ctrl-C ends them
at once. Exit codes: 0 finished, 130 stopped by Ctrl-C, 143 by SIGTERM or since
train.exit_duration_minutes are over, 2 a mistake in what was given, 1 a rank failed.
"""


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _NOTES + "\nKeys:\n\n" + keys_help()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config(parser)
    parser.add_argument(
        "--resume",
        metavar="latest|auto|DIR|URL",
        nargs="?",
        const="latest",
        default="",
        help="go on from the newest checkpoint in train.output_dir, or from a named one (of a "
        "run's folder: its newest); auto: begin anew where there is none",
    )
    parser.add_argument(
        "--allow-change",
        metavar="KEY",
        action="append",
        default=[],
        help="with --resume: a key, or model.KEY of config.json, that may differ from the "
        "checkpoint's own job although it makes the run another one; may be given several times",
    )


def _train(arguments: argparse.Namespace) -> int:
    """Train the model that a TOML file describes, and save it as a transformers checkpoint."""
    started_s = time.monotonic()
    resume, overrides = arguments.resume, list(arguments.overrides)
    if OVERRIDE.match(resume) and not Path(resume).exists():
        overrides.append(resume)  # `--resume table.key=value`: the value belongs to no option
        resume = "latest"
    place = find_place(os.environ)
    if place is not None:
        os.environ.update(place.variables())
    config = load_config(arguments.config, overrides)
    if place is not None:
        _check_number(config, place)
    KeyChange.check_names(arguments.allow_change)
    if arguments.allow_change and not resume:
        raise TrainValueError("--allow-change is only for --resume; leave it out")
    if resume == "auto":
        resume = "latest" if _has_begun(config) else ""
    elif resume not in ("", "latest") and "://" not in resume:
        resume = str(Path(resume).expanduser().absolute())
    check_early(config, resuming=bool(resume))
    if place is None or place.rank == 0:  # before torch is imported, which takes some seconds
        print(format_compact(config), flush=True)
    again = ["moe-train", "train", str(arguments.config), *overrides]
    if place is not None:
        job = _Job(config, resume, again, arguments.allow_change, started_s)
        return _train_as_rank(job, place)
    stopped_by = _train_here(_Job(config, resume, again, arguments.allow_change, started_s))
    if stopped_by is None:
        return 0
    resumed = shlex.join([*again, "--resume"])
    print(f"{_why(stopped_by)}; go on with: {resumed}", file=sys.stderr)
    return _exit_code(stopped_by)


class _Job(NamedTuple):
    """What to train, what was typed for that, and when (on the monotonic clock)."""

    config: Config
    resume: str
    again: list[str]
    allow_change: list[str]
    started_s: float

    def resumed_by_ranks(self, source: object) -> str:
        """What ranks go on from: the checkpoint that was checked, or a newer state of nodes."""
        looks_on_nodes = self.config.checkpoint.node_folder is not None
        return self.resume if self.resume == "latest" and looks_on_nodes else str(source or "")


def _why(stopped_by: signal.Signals) -> str:
    is_own_clock = stopped_by == signal.SIGALRM
    name = "train.exit_duration_minutes" if is_own_clock else stopped_by.name
    return f"stopped by {name} after saving"


def _exit_code(stopped_by: signal.Signals) -> int:
    # As of SIGTERM, so that a script queues the job again whichever clock has ended it.
    return 128 + int(signal.SIGTERM if stopped_by == signal.SIGALRM else stopped_by)


def _has_begun(config: Config) -> bool:
    folder = config.local_folders.get("train.output_dir")
    if folder is not None:
        return any(folder.glob("checkpoint-*"))
    from moe_train.jobs import has_begun

    return has_begun(config)


def _train_here(job: _Job) -> signal.Signals | None:
    """Start the ranks on this machine; the signal on which they saved and stopped, if any."""
    ForkServer.begin("moe_train.jobs.rank_job")
    from moe_train.jobs import check, run_folder
    from moe_train.launch import run_local

    config = job.config
    source = check(config, job.resume, job.allow_change)
    with run_folder(config, source, command=shlex.join(job.again)) as folder:
        argv = [str(folder.resolved), job.resumed_by_ranks(source)]
        logger.info("starting %d rank(s) on this machine", config.world_size)
        stopped_by = run_local(
            config.world_size, "moe_train.jobs.rank_job", argv, started_s=job.started_s
        )
        if stopped_by is not None:
            folder.end(_why(stopped_by))
    return stopped_by


def _train_as_rank(job: _Job, place: RankPlace) -> int:
    """Train as one of the ranks that another program has started."""
    from moe_train.jobs import check, run_folder
    from moe_train.rank import RankJobError, leave, run_rank, watch_stop_signals

    config = job.config
    if place.rank > 0:  # what every rank finds out about the checkpoints, one says
        logging.getLogger("moe_train").setLevel(logging.ERROR)
    source = check(config, job.resume, job.allow_change)
    job_file, *overrides = job.again[2:]
    argv = [job_file, job.resumed_by_ranks(source), *overrides]
    with ExitStack() as stack:
        folder = None
        if place.rank == 0:
            folder = stack.enter_context(run_folder(config, source, command=shlex.join(job.again)))
        context = watch_stop_signals()
        context.started_s = job.started_s
        try:
            run_rank("moe_train.jobs.rank_job", argv, context)
        except RankJobError as failure:
            error = failure.error
            print(f"rank {place.rank}, step {error.step}: {error.text}", file=sys.stderr)
            if folder is not None:
                folder.end(f"failed: rank {place.rank}, step {error.step}: {error.summary}")
            leave(1)
        clock = signal.SIGALRM if context.out_of_time else None
        stopped_by = next(iter(context.signals.seen), clock)
        if stopped_by is None or context.is_finished:
            return 0
        if folder is not None:
            folder.end(_why(stopped_by))
    # torchrun takes any other code for a failure, and ends ranks that are still about to leave.
    return 0 if place.started_by == "torchrun" else _exit_code(stopped_by)


def _check_number(config: Config, place: RankPlace) -> None:
    """Refuse another number of ranks than the layout has."""
    parallel, wanted = config.parallel, config.world_size
    if place.world_size != wanted:
        raise TrainValueError(
            f"WORLD_SIZE={place.world_size} ranks were started by {place.started_by}, but "
            f"parallel.pp={parallel.pp} * parallel.dp={parallel.dp} * parallel.ep={parallel.ep} = "
            f"{wanted}; start {wanted} ranks ({place.remedy.format(wanted)}) or change [parallel]"
        )


TRAIN = Command(name="train", text="train a model, or go on with a run", add=_add_train, run=_train)
