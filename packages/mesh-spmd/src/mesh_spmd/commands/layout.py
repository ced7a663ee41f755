"""`mesh-spmd layout`: how a whole state dict would lie on a mesh, and its bytes on each rank."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from typing import TYPE_CHECKING

from mesh_spmd.commands.options import (
    Command,
    add_mesh,
    parse_mesh,
    parse_pairs,
    show_table,
    show_tuple,
)
from mesh_spmd.commands.shapes import StoredShape, read_shapes
from mesh_spmd.errors import MeshValueError

if TYPE_CHECKING:
    from mesh_spmd.layout import TensorLayout


def _layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a safetensors file, a folder of them (headers are read, no data), or a JSON file "
        '{"name": {"dtype": "BF16", "shape": [64, 512]}}',
    )
    add_mesh(parser)
    parser.add_argument(
        "--rule",
        action="append",
        required=True,
        metavar="PATTERN:AXIS=DIM,...",
        help="which axes should shard which dims of the tensors that a pattern meets, as in "
        "'*.experts.*:ep=0'; the first one that meets a name counts; nothing behind the colon "
        "replicates",
    )
    parser.add_argument(
        "--ragged", action="store_true", help="ragged parts where a size does not divide"
    )
    parser.add_argument(
        "--fallbacks", action="store_true", help="only tensors that are not cut as wanted"
    )


def run_layout(arguments: argparse.Namespace) -> str:
    """Return the table of tensors and the bytes of ranks, or both as JSON."""
    from mesh_spmd.layout import choose_layouts

    found = read_shapes(arguments.source)
    layouts = choose_layouts(
        {name: stored.shape for name, stored in found.items()},
        parse_mesh(arguments.mesh),
        rules=_rules(arguments.rule),
        ragged=arguments.ragged,
    )
    by_rank = _bytes_of_ranks(layouts, found)
    shown = [one for one in layouts if one.reason or not arguments.fallbacks]
    if arguments.json:
        rows = [_as_json(one, found[one.name]) for one in shown]
        return "\n".join(map(json.dumps, [*rows, {"bytes_of_ranks": by_rank}]))
    cells = [
        [one.name, found[one.name].dtype, show_tuple(one.shape), _cuts(one), one.reason]
        for one in shown
    ]
    header = ["tensor", "dtype", "shape", "cut by", "why not as wanted"]
    return show_table(header, cells) + "\n\n" + _summary(layouts, found, by_rank)


def _summary(
    layouts: list[TensorLayout], found: dict[str, StoredShape], by_rank: dict[int, int]
) -> str:
    most, least = (pick(by_rank, key=by_rank.__getitem__) for pick in (max, min))
    fallen = sum(1 for one in layouts if one.reason)
    return (
        f"{len(layouts)} tensors, {sum(one.num_bytes for one in found.values()):,} bytes; "
        f"{fallen} not cut as wanted\n"
        f"bytes on a rank: {by_rank[least]:,} (rank {least}) to {by_rank[most]:,} (rank {most})"
    )


def _rules(texts: list[str]) -> dict[str, dict[str, int]]:
    rules: dict[str, dict[str, int]] = {}
    for text in texts:
        pattern, colon, axes = text.rpartition(":")
        if not (pattern and colon):
            raise MeshValueError(f"--rule got {text!r}; write pattern:axis=dim, as in *:dp=0")
        if pattern in rules:
            raise MeshValueError(f"--rule gives the pattern {pattern!r} twice; give it once")
        rules[pattern] = parse_pairs(axes, option="--rule")
    return rules


def _cuts(layout: TensorLayout) -> str:
    """As `dp=0 ep=0(8, 7)`: axes, dims, and the sizes of ragged parts."""
    dims = layout.spec.sharded_dims(len(layout.shape))
    sizes = {axis: tuple(map(int, parts)) for axis, parts in dict(layout.spec.sizes).items()}
    pairs = zip(layout.spec.mesh.axis_names, dims, strict=True)
    named = [
        f"{axis}={dim}" + (show_tuple(sizes[axis]) if axis in sizes else "")
        for axis, dim in pairs
        if dim is not None
    ]
    return " ".join(named) or "replicated"


def _as_json(layout: TensorLayout, stored: StoredShape) -> dict[str, object]:
    dims = layout.spec.sharded_dims(len(layout.shape))
    return {
        "name": layout.name,
        "dtype": stored.dtype,
        "shape": layout.shape,
        "shard": dict(zip(layout.spec.mesh.axis_names, dims, strict=True)),
        "sizes": dict(layout.spec.sizes),
        "rule": layout.rule,
        "reason": layout.reason,
    }


def _bytes_of_ranks(layouts: list[TensorLayout], found: dict[str, StoredShape]) -> dict[int, int]:
    """The bytes that each rank holds of all tensors; alike tensors are looked at once."""
    from mesh_spmd.layout import all_boxes

    alike: Counter[tuple[object, ...]] = Counter()
    first: dict[tuple[object, ...], TensorLayout] = {}
    for one in layouts:
        kind: tuple[object, ...] = (one.shape, one.spec, found[one.name].num_bytes)
        alike[kind] += 1
        first.setdefault(kind, one)
    total: Counter[int] = Counter()
    for kind, count in alike.items():
        one = first[kind]
        whole = math.prod(one.shape)
        for rank, box in all_boxes(one.shape, one.spec).items():
            total[rank] += count * found[one.name].num_bytes * box.numel // max(whole, 1)
    return dict(total)


LAYOUT = Command(
    name="layout",
    text="show how a whole state dict would lie on a mesh, and its bytes on each rank",
    add=_layout_options,
    run=run_layout,
)
