"""The command `mesh-spmd`: look at a layout before any process is started.

    mesh-spmd boxes --mesh pp=2,ep=4 --shape 60,512 --place ep=0
    mesh-spmd groups --mesh pp=2,dp=2,ep=2 --axes dp,ep
    mesh-spmd place --mesh dp=2,ep=4 --shape 60,512 --shard dp=0,ep=0

torch is imported by the commands and not by `--help`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mesh_spmd.errors import MeshSpmdError, MeshValueError

if TYPE_CHECKING:
    from mesh_spmd.boxes import Box
    from mesh_spmd.mesh import ProcessMesh
    from mesh_spmd.spec import Spec


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; return the exit code: 0, or 2 after a message for bad input."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    commands = {"boxes": _boxes, "groups": _groups, "place": _place}
    try:
        print(commands[arguments.command](arguments))
        sys.stdout.flush()
    except MeshSpmdError as error:
        print(f"mesh-spmd: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `| head` has closed the pipe; without this, Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mesh-spmd", description="Process meshes and sharding geometry, without any process."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    boxes = commands.add_parser("boxes", help="print the box of a tensor that each rank holds")
    groups = commands.add_parser("groups", help="print the ranks of every group along some axes")
    place = commands.add_parser("place", help="choose placements that cut a tensor evenly")
    for command in (boxes, groups, place):
        command.add_argument(
            "--mesh", required=True, help="axes and sizes, outermost first, as in pp=2,ep=4"
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for command in (boxes, place):
        command.add_argument(
            "--shape", required=True, help="sizes of the whole tensor, as in 60,512"
        )
    boxes.add_argument(
        "--place", default="", help="axis=dim shards a tensor dim, as in ep=0; other axes replicate"
    )
    boxes.add_argument("--rank", type=int, help="print this rank only")
    groups.add_argument("--axes", required=True, help="the axes that vary, as in dp,ep")
    place.add_argument("--shard", required=True, help="wanted shards, axis=dim, as in dp=0,ep=0")
    place.add_argument(
        "--strict", action="store_true", help="fail instead of falling back to fewer axes"
    )
    return parser


def _boxes(arguments: argparse.Namespace) -> str:
    from torch.distributed.tensor import Shard

    from mesh_spmd.boxes import all_boxes
    from mesh_spmd.spec import Spec

    mesh = _mesh(arguments.mesh)
    wanted = _pairs(arguments.place, option="--place")
    spec = Spec.from_axes(mesh, {axis: Shard(dim) for axis, dim in wanted.items()})
    shape = _shape(arguments.shape)
    boxes = all_boxes(shape, spec)
    ranks = mesh.ranks if arguments.rank is None else (arguments.rank,)
    coordinates = {rank: mesh.coordinate(rank) for rank in ranks}
    if arguments.json:
        return "\n".join(
            json.dumps(
                {
                    "rank": rank,
                    "coordinate": coordinates[rank],
                    "offset": boxes[rank].offset,
                    "shape": boxes[rank].shape,
                }
            )
            for rank in ranks
        )
    rows = [
        [
            str(rank),
            *map(str, coordinates[rank].values()),
            _tuple(boxes[rank].offset),
            _tuple(boxes[rank].shape),
            f"{boxes[rank].numel:,}",
        ]
        for rank in ranks
    ]
    header = ["rank", *mesh.axis_names, "offset", "shape", "elements"]
    return _table(header, rows) + "\n\n" + _box_summary(spec, boxes)


def _groups(arguments: argparse.Namespace) -> str:
    mesh = _mesh(arguments.mesh)
    axes = tuple(name.strip() for name in arguments.axes.split(",") if name.strip())
    groups = mesh.groups(*axes)
    fixed = [axis for axis in mesh.axis_names if axis not in axes]
    found = [({axis: mesh.coordinate(group[0])[axis] for axis in fixed}, group) for group in groups]
    if arguments.json:
        return "\n".join(json.dumps({"fixed": at, "ranks": ranks}) for at, ranks in found)
    rows = [[*map(str, at.values()), " ".join(map(str, ranks))] for at, ranks in found]
    summary = f"{len(groups)} group(s) of {len(groups[0])} rank(s) along {', '.join(axes)}"
    return _table([*fixed, "ranks"], rows) + "\n\n" + summary


def _place(arguments: argparse.Namespace) -> str:
    from torch.distributed.tensor import Shard

    from mesh_spmd.choice import choose_placements

    mesh = _mesh(arguments.mesh)
    shape = _shape(arguments.shape)
    wanted = _pairs(arguments.shard, option="--shard")
    placements = choose_placements(shape, mesh, shard=wanted, strict=arguments.strict)
    chosen = {
        axis: placement.dim if isinstance(placement, Shard) else None
        for axis, placement in zip(mesh.axis_names, placements, strict=True)
    }
    if arguments.json:
        return json.dumps({"shape": shape, "shard": chosen})
    rows = [
        [axis, str(mesh.axis_size(axis)), _shard(wanted.get(axis)), _shard(chosen[axis])]
        for axis in mesh.axis_names
    ]
    dropped = [axis for axis in wanted if chosen[axis] is None]
    note = (
        f"does not divide: {', '.join(dropped)} replicates" if dropped else "all wanted shards fit"
    )
    return _table(["axis", "size", "wanted", "chosen"], rows) + "\n\n" + note


def _mesh(text: str) -> ProcessMesh:
    from mesh_spmd.mesh import ProcessMesh

    axes = _pairs(text, option="--mesh")
    return ProcessMesh(tuple(axes.values()), tuple(axes))


def _pairs(text: str, *, option: str) -> dict[str, int]:
    pairs: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = item.partition("=")
        if not (name and number):
            raise MeshValueError(f"{option} got {item!r}; write name=number, as in ep=4")
        if name in pairs:
            raise MeshValueError(f"{option} names {name} twice in {text!r}; name each axis once")
        pairs[name] = _integer(number, option=option)
    return pairs


def _shape(text: str) -> tuple[int, ...]:
    if not text.strip():
        return ()
    return tuple(_integer(part, option="--shape") for part in text.split(","))


def _integer(text: str, *, option: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise MeshValueError(f"{option} got {text!r} where a whole number must stand") from error


def _box_summary(spec: Spec, boxes: dict[int, Box]) -> str:
    holders = Counter(boxes.values())
    sizes = [box.numel for box in holders]
    return (
        f"{len(boxes)} ranks of {spec.mesh!r}, {len(holders)} distinct boxes; "
        f"elements in a box: {_range(sizes)}; ranks that hold a box: {_range(holders.values())}"
    )


def _range(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    lowest, highest = ordered[0], ordered[-1]
    return f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"


def _shard(dim: int | None) -> str:
    return "replicate" if dim is None else f"shard dim {dim}"


def _tuple(numbers: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, numbers)) + ")"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
