"""What a sub-command is, and the options that several of them have."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OVERRIDE = re.compile(r"\w+(\.[\w-]+){0,2}\s*=")
"""How an argument of the form `table.key=value` or `sources.NAME.key=value` begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command.

    Attributes:
        name: as it is typed.
        text: its line in `moe-train --help`; the docstring of `run` heads its own help.
        add: gives a parser the command's options.
        run: what the command does with the parsed arguments; returns the exit code.
    """

    name: str
    text: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_config(parser: argparse.ArgumentParser) -> None:
    """The job's file, and keys to set otherwise."""
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="the job's TOML file")
    parser.add_argument(
        "overrides", metavar="table.key=value", nargs="*", default=[], help="keys to set otherwise"
    )
