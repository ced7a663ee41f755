"""The command `moe-train train`: by itself it starts the ranks, under torchrun it is one."""

import argparse
import logging
import os
import shlex
import sys
from pathlib import Path

from moe_train.commands.options import OVERRIDE, Command, add_config
from moe_train.config import Config, dump_toml, format_compact, keys_help, load_config
from moe_train.errors import TrainValueError

_NOTES = """\
Each key can be set in the file or, later and stronger, on the command line as table.key=value:

  moe-train train examples/python_stdlib.toml parallel.pp=1 train.max_steps=50 data.corpus=./docs

Relative paths in the file start at the file's folder, those on the command line at the current
folder. By itself the command starts parallel.pp * parallel.dp * parallel.ep processes on this
machine; under torchrun it is one of the ranks that torchrun starts.

Ctrl-C or SIGTERM: the ranks finish the step, save a checkpoint and end; a second Ctrl-C ends them
at once. Exit codes: 0 finished, 130 stopped by Ctrl-C, 143 by SIGTERM, 2 a mistake in what was
given, 1 a rank failed.
"""


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _NOTES + "\nKeys:\n\n" + keys_help()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config(parser)
    parser.add_argument(
        "--resume",
        metavar="latest|DIR",
        nargs="?",
        const="latest",
        default="",
        help="go on from the newest checkpoint in train.output_dir, or from a named one",
    )


def _train(arguments: argparse.Namespace) -> int:
    """Train the model that a TOML file describes, and save it as a transformers checkpoint."""
    resume, overrides = arguments.resume, list(arguments.overrides)
    if OVERRIDE.match(resume) and not Path(resume).exists():
        overrides.append(resume)  # `--resume table.key=value`: the value belongs to no option
        resume = "latest"
    if resume not in ("", "latest"):
        resume = str(Path(resume).expanduser().absolute())
    config = load_config(arguments.config, overrides)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _train_as_rank(config, resume, [str(arguments.config), *overrides])
    from moe_train.jobs import check

    print(format_compact(config), flush=True)
    # Ranks take the checkpoint that was checked, and do not look for it again.
    source = check(config, resume)
    resolved = _save_resolved(config)
    from moe_train.launch import run_local

    argv = [str(resolved), str(source or "")]
    stopped_by = run_local(config.world_size, "moe_train.jobs.rank_job", argv)
    if stopped_by is None:
        return 0
    again = shlex.join(["moe-train", "train", str(arguments.config), *overrides, "--resume"])
    print(f"stopped by {stopped_by.name} after saving; go on with: {again}", file=sys.stderr)
    return 128 + int(stopped_by)


def _train_as_rank(config: Config, resume: str, job_args: list[str]) -> int:
    """Train as one of the ranks that torchrun has started.

    Args:
        job_args: the config's path and the overrides.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != config.world_size:
        raise TrainValueError(
            f"WORLD_SIZE={world_size} ranks were started, but parallel.pp={config.parallel.pp} * "
            f"parallel.dp={config.parallel.dp} * parallel.ep={config.parallel.ep} = "
            f"{config.world_size}; start {config.world_size} ranks or change [parallel]"
        )
    from moe_train.jobs import check
    from moe_train.rank import RankJobError, leave, run_rank, watch_stop_signals

    if rank == 0:
        print(format_compact(config), flush=True)
    else:  # what every rank finds out about the checkpoints, one says
        logging.getLogger("moe_train.checkpoint.training_state").setLevel(logging.ERROR)
    source = check(config, resume)
    if rank == 0:
        _save_resolved(config)
    argv = [job_args[0], str(source or ""), *job_args[1:]]
    try:
        run_rank("moe_train.jobs.rank_job", argv, watch_stop_signals())
    except RankJobError as failure:
        print(f"rank {rank}, step {failure.error.step}: {failure.error.text}", file=sys.stderr)
        leave(1)
    return 0


def _save_resolved(config: Config) -> Path:
    path = Path(config.train.output_dir) / "config.resolved.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_toml(config), encoding="utf-8")
    return path


TRAIN = Command(name="train", text="train a model, or go on with a run", add=_add_train, run=_train)
