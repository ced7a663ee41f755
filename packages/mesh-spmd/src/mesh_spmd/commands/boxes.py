"""`mesh-spmd boxes`: the box of a tensor that each rank holds."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mesh_spmd.commands.options import (
    Command,
    add_mesh,
    add_shape,
    parse_mesh,
    parse_pairs,
    parse_shape,
    show_table,
    show_tuple,
)

if TYPE_CHECKING:
    from mesh_spmd.layout import Box, Spec


def _box_options(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    add_shape(parser)
    parser.add_argument(
        "--place", default="", help="axis=dim shards a tensor dim, as in ep=0; other axes replicate"
    )
    parser.add_argument("--rank", type=int, help="print this rank only")


def run_boxes(arguments: argparse.Namespace) -> str:
    """Return the table of boxes, or a line of JSON for each rank."""
    from torch.distributed.tensor import Shard

    from mesh_spmd.layout import Spec, all_boxes

    mesh = parse_mesh(arguments.mesh)
    wanted = parse_pairs(arguments.place, option="--place")
    spec = Spec.from_axes(mesh, {axis: Shard(dim) for axis, dim in wanted.items()})
    shape = parse_shape(arguments.shape)
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
            show_tuple(boxes[rank].offset),
            show_tuple(boxes[rank].shape),
            f"{boxes[rank].numel:,}",
        ]
        for rank in ranks
    ]
    header = ["rank", *mesh.axis_names, "offset", "shape", "elements"]
    return show_table(header, rows) + "\n\n" + _box_summary(spec, boxes)


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


BOXES = Command(
    name="boxes",
    text="print the box of a tensor that each rank holds",
    add=_box_options,
    run=run_boxes,
)
