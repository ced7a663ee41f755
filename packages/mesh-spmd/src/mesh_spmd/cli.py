"""The command `mesh-spmd`: look at a layout before any process is started, or on ranks of this
machine.

    mesh-spmd boxes --mesh pp=2,ep=4 --shape 60,512 --place ep=0
    mesh-spmd groups --mesh pp=2,dp=2,ep=2 --axes dp,ep
    mesh-spmd place --mesh dp=2,ep=4 --shape 60,512 --shard dp=0,ep=0
    mesh-spmd plan dp=2,ep=8/ep=0 dp=1,ep=16/ep=0 --shape 64,1024,512
    mesh-spmd plan dp=2,ep=4/ep=0:20+0+4+40 dp=2,ep=4/ep=0/flat=dp --shape 64,1024,512
    mesh-spmd plan --tensors tensors.toml
    mesh-spmd check dp=2,ep=2/ep=0 dp=1,ep=4/ep=0 --shape 60,512
    mesh-spmd layout checkpoint-100 --mesh dp=2,ep=8 --rule '*.experts.*:ep=0' --rule '*:'

torch is imported by the commands and not by `--help`.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from mesh_spmd.commands import BOXES, CHECK, GROUPS, LAYOUT, PLACE, PLAN, Answer, Command
from mesh_spmd.errors import MeshSpmdError

COMMANDS: tuple[Command, ...] = (BOXES, GROUPS, PLACE, PLAN, CHECK, LAYOUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; return the exit code: 0, 2 after a message for bad input, or
    1 where a check finds something wrong.
    """
    arguments = _parser().parse_args(argv)
    command = next(c for c in COMMANDS if c.name == arguments.command)
    try:
        with warnings.catch_warnings():
            # torch's, at its import, where there is no numpy; no command needs that.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            found = command.run(arguments)
        answer = found if isinstance(found, Answer) else Answer(found, 0)
        print(answer.text)
        sys.stdout.flush()
    except MeshSpmdError as error:
        print(f"mesh-spmd: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `| head` has closed the pipe; without this, Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return answer.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mesh-spmd",
        description="Process meshes and sharding geometry, without any process; check runs ranks.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add(commands.add_parser(command.name, help=command.text))
    return parser
