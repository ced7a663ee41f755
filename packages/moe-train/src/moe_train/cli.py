"""The command `moe-train`: train, generate, inspect and plan.

Torch is imported by the sub-commands only, so that `--help` and a mistake in the config answer at
once. A mistake of the user ends in one line on standard error and exit code 2; a defect of the
program keeps its traceback.

    moe-train train examples/python_stdlib.toml train.max_steps=50
"""

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_train.config import Config, dump_toml, format_compact, keys_help, load_config
from moe_train.errors import MoeTrainError, RankFailedError, StoppedUnsavedError, TrainValueError
from unified_ckpt import CheckpointError

_EXIT_FAILED = 1
_EXIT_USER_ERROR = 2
_OVERRIDE = re.compile(r"\w+(\.\w+)?\s*=")

_TRAIN_NOTES = """\
Each key can be set in the file or, later and stronger, on the command line as table.key=value:

  moe-train train examples/python_stdlib.toml parallel.pp=1 train.max_steps=50 data.corpus=./docs

Relative paths in the file start at the file's folder, those on the command line at the current
folder. By itself the command starts parallel.pp * parallel.dp * parallel.ep processes on this
machine; under torchrun it is one of the ranks that torchrun starts.

Ctrl-C or SIGTERM: the ranks finish the step, save a checkpoint and end; a second Ctrl-C ends them
at once. Exit codes: 0 finished, 130 stopped by Ctrl-C, 143 by SIGTERM, 2 a mistake in what was
given, 1 a rank failed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or not _OVERRIDE.match(text)]
    if unknown or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        arguments.overrides += rest
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    command: Callable[[argparse.Namespace], int] = arguments.command
    if arguments.traceback:
        return command(arguments)
    try:
        return command(arguments)
    except RankFailedError as error:
        print(f"moe-train: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except StoppedUnsavedError as error:
        print(f"moe-train: {error}", file=sys.stderr)
        return 128 + error.signal_number
    except KeyboardInterrupt:
        print("moe-train: interrupted before training began", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, MoeTrainError, CheckpointError) as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun one of the ranks says it
            print(f"moe-train: {' '.join(str(error).split())}", file=sys.stderr)
        return _EXIT_USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-train", description="Train Mixture-of-Experts language models across processes."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", help="show the traceback of a mistake, not one line"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        name = run.__name__.strip("_")
        added = commands.add_parser(name, parents=[common], help=text, description=run.__doc__)
        added.set_defaults(command=run)
        return added

    train = add(_train, "train a model, or go on with a run")
    train.epilog = _TRAIN_NOTES + "\nKeys:\n\n" + keys_help()
    train.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_config(train)
    train.add_argument(
        "--resume",
        metavar="latest|DIR",
        nargs="?",
        const="latest",
        default="",
        help="go on from the newest checkpoint in train.output_dir, or from a named one",
    )
    _add_generate(add(_generate, "print text from a model"))
    inspect = add(_inspect, "list what a checkpoint holds")
    inspect.add_argument("checkpoint", metavar="DIR", type=Path, help="a checkpoint's folder")
    _add_config(add(_plan, "estimate memory before a run"))
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="the job's TOML file")
    parser.add_argument(
        "overrides", metavar="table.key=value", nargs="*", default=[], help="keys to set otherwise"
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", type=Path, required=True)
    add("--prompt", metavar="TEXT", required=True, help="how the text begins")
    add("--max-new-tokens", metavar="N", type=int, default=64, help="default 64")
    text = "0 takes the likeliest token each time; default 0.8"
    add("--temperature", metavar="T", type=float, default=0.8, help=text)
    text = "choose among the K likeliest tokens, 0 among all; default 50"
    add("--top-k", metavar="K", type=int, default=50, help=text)
    add("--seed", metavar="S", type=int, default=0, help="default 0")


def _train(arguments: argparse.Namespace) -> int:
    """Train the model that a TOML file describes, and save it as a transformers checkpoint."""
    resume, overrides = arguments.resume, list(arguments.overrides)
    if _OVERRIDE.match(resume) and not Path(resume).exists():
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
        leave(_EXIT_FAILED)
    return 0


def _save_resolved(config: Config) -> Path:
    path = Path(config.train.output_dir) / "config.resolved.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_toml(config), encoding="utf-8")
    return path


def _generate(arguments: argparse.Namespace) -> int:
    """Print the prompt and what a trained model makes of it."""
    from moe_train.jobs import generate_text

    text = generate_text(
        arguments.checkpoint,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(text)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    """List the tensors, parts and training state of a checkpoint."""
    from moe_train.jobs import describe_checkpoint

    print(describe_checkpoint(arguments.checkpoint))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    """Estimate what a job needs before it is started."""
    config = load_config(arguments.config, arguments.overrides)
    from moe_train.jobs import plan_report

    print(plan_report(config))
    return 0
