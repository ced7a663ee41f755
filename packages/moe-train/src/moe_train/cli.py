"""The command `moe-train`, made of the sub-commands in `moe_train.commands`.

Torch is imported by the sub-commands only, so that `--help` and a mistake in the config answer at
once. A mistake of the user ends in one line on standard error and exit code 2; a defect of the
program keeps its traceback.

    moe-train train examples/python_stdlib.toml train.max_steps=50
"""

import argparse
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence

from moe_train.commands import (
    CHAT,
    DATA,
    EVAL,
    EXPORT,
    GENERATE,
    INSPECT,
    OVERRIDE,
    PLAN,
    RELAYOUT,
    TRAIN,
    VERIFY_LAYOUTS,
)
from moe_train.errors import MoeTrainError, RankFailedError, StoppedUnsavedError
from unified_ckpt import CheckpointError

_EXIT_FAILED = 1
_EXIT_USER_ERROR = 2
_COMMANDS = (TRAIN, DATA, GENERATE, CHAT, EVAL, INSPECT, EXPORT, PLAN, RELAYOUT, VERIFY_LAYOUTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or not OVERRIDE.match(text)]
    if unknown or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        arguments.overrides += rest
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    command: Callable[[argparse.Namespace], int] = arguments.command
    if arguments.traceback:
        return command(arguments)
    try:
        status = command(arguments)
        sys.stdout.flush()
        return status
    except RankFailedError as error:
        print(f"moe-train: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except StoppedUnsavedError as error:
        print(f"moe-train: {error}", file=sys.stderr)
        return 128 + error.signal_number
    except KeyboardInterrupt:
        print("moe-train: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, MoeTrainError, CheckpointError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 1
        rank = os.environ.get("RANK", "0")
        if not rank.isdecimal() or not int(rank):  # under torchrun one of the ranks says it
            print(f"moe-train: {' '.join(str(error).split())}", file=sys.stderr)
        return _EXIT_USER_ERROR


def _is_unread() -> bool:
    """Whether the reader of our output, such as `head`, has seen enough; if so, drop the rest."""
    poll, output = select.poll(), sys.stdout.fileno()
    poll.register(output, 0)
    return bool(poll.poll(0)) and os.dup2(os.open(os.devnull, os.O_WRONLY), output) == output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-train", description="Train Mixture-of-Experts language models across processes."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", help="show the traceback of a mistake, not one line"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        added = commands.add_parser(
            command.name, parents=[common], help=command.text, description=command.run.__doc__
        )
        command.add(added)
        added.set_defaults(command=command.run)
    return parser
