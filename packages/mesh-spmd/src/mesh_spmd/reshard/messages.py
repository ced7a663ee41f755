"""What one rank sends, receives and keeps in one step: derived from the plan when it is asked for.

A plan of 4,096 ranks would be billions of messages. Each rank needs only its own, and both ends of
a message derive it alike: what others need of a cell stands in one order (target ranks in mesh
order), its holders share it out as consecutive runs, and a message is where a run meets a need.

Invariant: a pair of ranks has at most one message of each move, and orders them by moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mesh_spmd.reshard.caches import remembered
from mesh_spmd.reshard.cells import Shared, shared
from mesh_spmd.reshard.moves import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements `begin` to `end` of a box, in row-major order, as one message or one local copy.

    `peer` is the other rank; `move` numbers the moves of the step.
    """

    peer: int
    move: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


def sends_of(move: Move, number: int, shares: torch.Tensor, rank: int) -> list[Piece]:
    """Return what `rank` sends of a move; nothing if it does not hold the source."""
    position = move.source.spec.mesh.position(rank)
    if position is None:
        return []
    cell = int(move.source.cells.cell[position])
    holders = move.source.cells.holders[cell]
    demands = move.demands(holders[:1])
    run_end = int(shares[cell].cumsum(0)[(holders == position).nonzero()[0, 0]])
    run_begin = run_end - int(shares[cell][(holders == position).nonzero()[0, 0]])
    due_end = demands.numel.cumsum(0)
    due_begin = due_end - demands.numel
    low, high = due_begin.clamp(min=run_begin), due_end.clamp(max=run_end)
    ranks = move.target.spec.mesh.ranks
    return [
        _piece(demands, i, ranks[i], number, (int(low[i] - due_begin[i]), int(high[i] - low[i])))
        for i in (high > low).nonzero().flatten().tolist()
    ]


def receives_of(move: Move, number: int, shares: torch.Tensor, rank: int) -> list[Piece]:
    """Return what `rank` receives of a move; nothing if it does not hold the target."""
    position = move.target.spec.mesh.position(rank)
    if position is None:
        return []
    cells, ranks = move.source.cells, move.source.spec.mesh.ranks
    found = shared(cells.pick(cells.holders[:, 0]), move.target.cells.pick(_one(position)))
    here = move.source.spec.mesh.position(rank)
    mine = -1 if here is None else int(cells.cell[here])
    pieces = []
    for cell in found.numel.nonzero().flatten().tolist():
        if cell == mine:
            continue
        need = int(found.numel[cell])
        due = _due_before(move, cell, position) if cells.num_replicas > 1 else 0
        run_end = 0
        for holder, share in zip(cells.holders[cell].tolist(), shares[cell].tolist(), strict=True):
            run_begin, run_end = run_end, run_end + share
            low, high = max(run_begin, due), min(run_end, due + need)
            if cells.num_replicas == 1:
                low, high = 0, need
            if low < high:
                run = (low - due, high - low)
                pieces.append(_piece(found, cell, ranks[holder], number, run))
    return pieces


def copy_of(move: Move, number: int, rank: int) -> list[Piece]:
    """Return what `rank` holds in the source and in the target: one piece, or none."""
    source = move.source.spec.mesh.position(rank)
    target = move.target.spec.mesh.position(rank)
    if source is None or target is None:
        return []
    found = shared(move.source.cells.pick(_one(source)), move.target.cells.pick(_one(target)))
    need = int(found.numel[0])
    return [_piece(found, 0, rank, number, (0, need))] if need else []


def _due_before(move: Move, cell: int, position: int) -> int:
    """How many elements of a source cell are due to the target ranks before that at `position`."""
    return int(_due_begins(move, cell)[position])


@remembered(maxsize=512)
def _due_begins(move: Move, cell: int) -> torch.Tensor:
    demands = move.demands(move.source.cells.holders[cell][:1]).numel
    return demands.cumsum(0) - demands


def _piece(found: Shared, index: int, peer: int, move: int, run: tuple[int, int]) -> Piece:
    """The piece of `run` = (first element, number of elements) of what a pair shares."""
    begin = int(found.begin[index]) + run[0]
    return Piece(
        peer=peer,
        move=move,
        offset=tuple(int(column[index]) for column in found.offset),
        shape=tuple(int(column[index]) for column in found.length),
        begin=begin,
        end=begin + run[1],
    )


def _one(position: int) -> torch.Tensor:
    return torch.tensor([position])
