"""`mesh-spmd place`: placements that cut a tensor evenly."""

from __future__ import annotations

import argparse
import json

from mesh_spmd.commands.options import (
    Command,
    add_mesh,
    add_shape,
    parse_mesh,
    parse_pairs,
    parse_shape,
    show_table,
)


def _place_options(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    add_shape(parser)
    parser.add_argument("--shard", required=True, help="wanted shards, axis=dim, as in dp=0,ep=0")
    parser.add_argument(
        "--strict", action="store_true", help="fail instead of falling back to fewer axes"
    )


def run_place(arguments: argparse.Namespace) -> str:
    """Return the chosen placements, and what fell back."""
    from torch.distributed.tensor import Shard

    from mesh_spmd.layout import choose_placements

    mesh = parse_mesh(arguments.mesh)
    shape = parse_shape(arguments.shape)
    wanted = parse_pairs(arguments.shard, option="--shard")
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
    return show_table(["axis", "size", "wanted", "chosen"], rows) + "\n\n" + note


def _shard(dim: int | None) -> str:
    return "replicate" if dim is None else f"shard dim {dim}"


PLACE = Command(
    name="place",
    text="choose placements that cut a tensor evenly",
    add=_place_options,
    run=run_place,
)
