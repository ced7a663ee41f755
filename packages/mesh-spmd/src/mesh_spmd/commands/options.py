"""What a sub-command is, and how meshes, shapes and tables are read and printed.

parse_mesh("pp=2,ep=4")     # ProcessMesh(pp=2, ep=4)
parse_shape("60,512")       # (60, 512)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mesh_spmd.errors import MeshValueError

if TYPE_CHECKING:
    from mesh_spmd.mesh import ProcessMesh


class Answer(NamedTuple):
    """What a sub-command prints, with the exit code where that is part of what it says."""

    text: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command: its name, its line of help, its options, and what it prints."""

    name: str
    text: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], str | Answer]


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """The options that every command about one mesh takes."""
    parser.add_argument(
        "--mesh", required=True, help="axes and sizes, outermost first, as in pp=2,ep=4"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The shape of the one tensor that a command is about."""
    parser.add_argument("--shape", required=True, help="sizes of the whole tensor, as in 60,512")


def parse_mesh(text: str, *, option: str = "--mesh") -> ProcessMesh:
    """Return the mesh of `pp=2,ep=4`; `option` is named in errors."""
    from mesh_spmd.mesh import ProcessMesh

    axes = parse_pairs(text, option=option)
    return ProcessMesh(tuple(axes.values()), tuple(axes))


def parse_pairs(text: str, *, option: str) -> dict[str, int]:
    """Return the integers by name of `ep=4,dp=2`; `option` is named in errors."""
    pairs: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = item.partition("=")
        if not (name and number):
            raise MeshValueError(f"{option} got {item!r}; write name=number, as in ep=4")
        if name in pairs:
            raise MeshValueError(f"{option} names {name} twice in {text!r}; name each axis once")
        pairs[name] = parse_integer(number, option=option)
    return pairs


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape of `60,512`; nothing is a scalar."""
    if not text.strip():
        return ()
    return tuple(parse_integer(part, option="--shape") for part in text.split(","))


def parse_integer(text: str, *, option: str) -> int:
    """Return a whole number; `option` is named in errors."""
    try:
        return int(text)
    except ValueError as error:
        raise MeshValueError(f"{option} got {text!r} where a whole number must stand") from error


def show_tuple(numbers: tuple[int, ...]) -> str:
    """Return numbers as `(60, 512)`."""
    return "(" + ", ".join(map(str, numbers)) + ")"


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
