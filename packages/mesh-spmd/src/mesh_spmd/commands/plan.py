"""`mesh-spmd plan`: what a change of layout moves and allocates, and the limits beside it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from mesh_spmd.commands.layouts import SYNTAX
from mesh_spmd.commands.options import Command, parse_integer, show_table
from mesh_spmd.commands.shapes import Entry, read_entries, shape_of
from mesh_spmd.commands.tensors import (
    add_dtype,
    add_layouts,
    make_pair,
    pair_of_line,
    parse_dtype,
)
from mesh_spmd.errors import MeshSpmdError, MeshValueError

if TYPE_CHECKING:
    from mesh_spmd.layout import TensorSpec
    from mesh_spmd.reshard import Plan, Topology

_EPILOG = f"""{SYNTAX}
a file of tensors, TOML or JSON, moves them in one plan; what it leaves out, the command line gives:
  [experts]
  shape = [64, 1024, 512]
  dtype = "bfloat16"                # or as in safetensors, BF16
  [moments]
  shape = [64, 1024, 512]
  dtype = "float32"
  source = "dp=2,ep=8/ep=0/flat=dp"
  target = "dp=1,ep=16/ep=0/flat=dp"

columns, in bytes:
  received, sent   from and to other ranks
  limit            what the rank is to hold and does not yet; no plan can bring it less
  blocks           its parts of the sources and targets together
  peak             what execute allocates at one time beside the sources: targets and buffers
"""


def _plan_options(parser: argparse.ArgumentParser) -> None:
    add_layouts(parser)
    parser.epilog = _EPILOG
    parser.add_argument("--shape", help="sizes of the whole tensor, as in 60,512")
    add_dtype(parser)
    parser.add_argument(
        "--tensors",
        metavar="FILE",
        help="many tensors instead of one: TOML or JSON, a safetensors file or a folder of them "
        "(headers are read, no data)",
    )
    parser.add_argument(
        "--buffer-bytes", help="what a rank's buffers may take, in bytes (33554432)"
    )
    parser.add_argument(
        "--ranks-per-node",
        help="choose between one exchange and several by a model of nodes of so many ranks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_plan(arguments: argparse.Namespace) -> str:
    """Return the table of bytes by rank, or a line of JSON for each rank."""
    from mesh_spmd.reshard import plan_reshard

    if (arguments.tensors is None) == (arguments.shape is None):
        raise MeshValueError("give one of --shape (one tensor) and --tensors (a file of them)")
    pairs = _from_file(arguments) if arguments.tensors is not None else [pair_of_line(arguments)]
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    limit = {} if arguments.buffer_bytes is None else {"buffer_bytes": _count(arguments)}
    plan = plan_reshard(sources, targets, _topology(arguments.ranks_per_node), **limit)
    columns = {
        "received": plan.received_bytes,
        "limit": _lacking(plan),
        "sent": plan.sent_bytes,
        "blocks": plan.block_bytes,
        "peak": plan.peak_bytes,
    }
    rows = [(r, *(column and column[r] for column in columns.values())) for r in plan.ranks]
    header = ["rank", *columns]
    if arguments.json:
        return "\n".join(json.dumps(dict(zip(header, row, strict=True))) for row in rows)
    cells = [["-" if number is None else f"{number:,}" for number in row] for row in rows]
    return show_table(header, cells) + "\n\n" + _summary(plan)


def _summary(plan: Plan) -> str:
    busiest, rounds = plan.busiest_bytes, [step.rounds for step in plan.steps]
    lines = [
        f"{len(plan.sources)} tensor(s) in {len(plan.steps)} step(s) of "
        f"{' + '.join(map(str, rounds))} exchange(s)",
        f"busiest rank: {busiest[0]:,} bytes received, {busiest[1]:,} sent; "
        f"{sum(plan.received_bytes.values()):,} bytes in all",
    ]
    if _lacking(plan) is None:
        lines.append("no limit is shown, since values are partial or go through several steps")
    return "\n".join([*lines, f"plan {plan.hash}"])


def _from_file(arguments: argparse.Namespace) -> list[tuple[TensorSpec, TensorSpec]]:
    """The tensors of a file; layouts and a dtype that it leaves out are those of the line."""
    found = []
    for where, fields in read_entries(arguments.tensors).values():
        unknown = sorted(fields.keys() - {"shape", "dtype", "source", "target", "data_offsets"})
        if unknown:
            raise MeshValueError(
                f"{where} has {', '.join(unknown)}; it may have shape, dtype, source and target"
            )
        layouts = []
        for name in ("source", "target"):
            text = fields.get(name, getattr(arguments, name))
            if text is None:
                raise MeshValueError(
                    f"{where} has no {name} layout; give it there, as in "
                    f'{name} = "ep=8/ep=0", or for all tensors on the command line'
                )
            if not isinstance(text, str):
                raise MeshValueError(
                    f'{where}: the {name} layout is {text!r}; write it as in "ep=8/ep=0"'
                )
            layouts.append(text)
        dtype = fields.get("dtype", arguments.dtype or "bfloat16")
        try:
            pair = make_pair(
                shape_of(Entry(where, fields)), parse_dtype(dtype, where="dtype"), tuple(layouts)
            )
        except MeshSpmdError as error:
            text = str(error)
            raise type(error)(text if text.startswith(where) else f"{where}: {text}") from error
        found.append(pair)
    return found


def _count(arguments: argparse.Namespace) -> int:
    return parse_integer(arguments.buffer_bytes, option="--buffer-bytes")


def _topology(ranks_per_node: str | None) -> Topology | None:
    from mesh_spmd.reshard import Topology

    if ranks_per_node is None:
        return None
    return Topology(ranks_per_node=parse_integer(ranks_per_node, option="--ranks-per-node"))


def _lacking(plan: Plan) -> dict[int, int] | None:
    """Bytes that each rank is to hold and does not; None where reductions make that no limit."""
    if len(plan.steps) > 1 or any(t.partials for t in (*plan.sources, *plan.targets)):
        return None
    lacking = dict.fromkeys(plan.ranks, 0)
    for rank in plan.ranks:
        for tensor in plan.targets:
            if tensor.mesh.position(rank) is not None:
                begin, end = tensor.flat_range(rank)
                lacking[rank] += (end - begin) * tensor.dtype.itemsize
        moves = plan.steps[0].moves
        lacking[rank] -= sum(
            (p.end - p.begin) * moves[p.move].dtype.itemsize for p in plan.copies(rank)
        )
    return lacking


PLAN = Command(
    name="plan",
    text="print what a change of layout moves and allocates, and the limits beside it",
    add=_plan_options,
    run=run_plan,
)
