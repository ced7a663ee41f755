"""`mesh-spmd plan`: what a change of layout moves, and the limit beside it."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from mesh_spmd.commands.options import (
    Command,
    add_shape,
    parse_mesh,
    parse_pairs,
    parse_shape,
    show_table,
)
from mesh_spmd.errors import MeshValueError

if TYPE_CHECKING:
    from mesh_spmd.layout import TensorSpec


def _plan_options(parser: argparse.ArgumentParser) -> None:
    layout = "mesh, and shards behind a slash, as in dp=2,ep=8/ep=0"
    parser.add_argument("source", help=f"the layout before: {layout}")
    parser.add_argument("target", help="the layout after")
    add_shape(parser)
    parser.add_argument("--dtype", default="bfloat16", help="torch's name of the dtype")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_plan(arguments: argparse.Namespace) -> str:
    """Return the table of bytes by rank, or a line of JSON for each rank."""
    from mesh_spmd.reshard import plan_reshard

    source, target = (
        _tensor(text, arguments.shape, arguments.dtype)
        for text in (arguments.source, arguments.target)
    )
    plan = plan_reshard(source, target)
    received, sent, peak = plan.received_bytes, plan.sent_bytes, plan.peak_bytes
    rows = [(r, received[r], _lacking(source, target, r), sent[r], peak[r]) for r in plan.ranks]
    header = ["rank", "received", "limit", "sent", "buffers"]
    if arguments.json:
        return "\n".join(json.dumps(dict(zip(header, row, strict=True))) for row in rows)
    busiest = plan.busiest_bytes
    summary = (
        f"busiest rank: {busiest[0]:,} bytes received, {busiest[1]:,} sent; "
        f"{sum(received.values()):,} bytes in all; {plan.steps[0].rounds} exchange(s)"
    )
    cells = [[f"{number:,}" for number in row] for row in rows]
    return show_table(header, cells) + "\n\n" + summary + f"\nplan {plan.hash}"


def _tensor(text: str, shape: str, dtype: str) -> TensorSpec:
    import torch
    from torch.distributed.tensor import Shard

    from mesh_spmd.layout import Spec, TensorSpec

    mesh, _, shards = text.partition("/")
    option = f"the layout {text!r}"
    wanted = parse_pairs(shards, option=option)
    cut = {axis: Shard(dim) for axis, dim in wanted.items()}
    spec = Spec.from_axes(parse_mesh(mesh, option=option), cut)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise MeshValueError(f"--dtype got {dtype!r}; give a dtype of torch, as in float32")
    return TensorSpec(parse_shape(shape), kind, spec)


def _lacking(source: TensorSpec, target: TensorSpec, rank: int) -> int:
    """Bytes that a rank is to hold and does not: no plan can bring it less."""
    if target.mesh.position(rank) is None:
        return 0
    wanted = target.box(rank)
    held = 0
    if source.mesh.position(rank) is not None:
        pairs = zip(wanted.slices(), source.box(rank).slices(), strict=True)
        held = math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in pairs)
    return (wanted.numel - held) * target.dtype.itemsize


PLAN = Command(
    name="plan",
    text="print what a change of layout moves, and the limit beside it",
    add=_plan_options,
    run=run_plan,
)
