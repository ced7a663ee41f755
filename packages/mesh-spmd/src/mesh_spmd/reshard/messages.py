"""What one rank sends, receives and keeps in one step: derived from the plan when it is asked for.

A plan of 4,096 ranks would be billions of messages. Each rank needs only its own, and both ends of
a message derive it alike: what others need of a cell stands in one order (target ranks in mesh
order), its holders share it out as consecutive runs, and a message is where a run meets a need.

Invariant: a pair of ranks has at most one message of each move from one cell, and orders them by
moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from mesh_spmd.reshard.caches import remembered
from mesh_spmd.reshard.moves import Move, Shares
from mesh_spmd.reshard.tilings import Meeting, Tile, Tiling, overlap


class Piece(NamedTuple):
    """Elements `begin` to `end` of a box, in row-major order, as one message or one local copy.

    `peer` is the other rank; `move` numbers the moves of the step. `whole` is the range that the
    receiver gets of this box, from one holder or from several.
    """

    peer: int
    move: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int
    whole: tuple[int, int]


def sends_of(move: Move, number: int, shares: Shares, rank: int) -> list[Piece]:
    """Return what `rank` sends of a move; nothing if it does not hold the source."""
    position = move.source.spec.mesh.position(rank)
    if position is None:
        return []
    source, target = move.source.tiling, move.target.tiling
    mine = source.tile_at(position)
    holders = source.holders(mine.base)
    split = _row(shares, mine.number)
    place = holders.index(position)
    run_begin = sum(split[:place])
    run_end = run_begin + split[place]
    if run_begin == run_end:
        return []
    own = set(_in_target(move, holders))
    due = [
        (there, found)
        for found in target.meeting(mine)
        for there in [found.base + other for other in target.replicas]
        if there not in own
    ]
    if len(holders) > 1:
        due.sort(key=itemgetter(0))
    pieces, due_end = [], 0
    ranks = target.mesh.ranks
    for there, found in due:
        due_begin, due_end = due_end, due_end + found.end - found.begin
        low, high = max(due_begin, run_begin), min(due_end, run_end)
        if low < high:
            pieces.append(_piece(found, ranks[there], number, (low - due_begin, high - due_begin)))
    return pieces


def receives_of(move: Move, number: int, shares: Shares, rank: int) -> list[Piece]:
    """Return what `rank` receives of a move; nothing if it does not hold the target."""
    position = move.target.spec.mesh.position(rank)
    if position is None:
        return []
    source, target = move.source.tiling, move.target.tiling
    here = source.mesh.position(rank)
    kept = -1 if here is None else source.tile_at(here).number
    wanted = target.tile_at(position)
    ranks = source.mesh.ranks
    pieces = []
    for found in source.meeting(wanted):
        need = found.end - found.begin
        if found.number == kept:
            continue
        holders = source.holders(found.base)
        if len(holders) == 1:
            pieces.append(_piece(found, ranks[holders[0]], number, (0, need)))
            continue
        due = _due_before(move, source.numbered(found.number), holders, position)
        run_end = 0
        for holder, share in zip(holders, _row(shares, found.number), strict=True):
            run_begin, run_end = run_end, run_end + share
            low, high = max(run_begin, due), min(run_end, due + need)
            if low < high:
                pieces.append(_piece(found, ranks[holder], number, (low - due, high - due)))
    return pieces


def copy_of(move: Move, number: int, rank: int) -> list[Piece]:
    """Return what `rank` holds in the source and in the target: one piece, or none."""
    source = move.source.spec.mesh.position(rank)
    target = move.target.spec.mesh.position(rank)
    if source is None or target is None:
        return []
    found = overlap(move.source.tiling.tile_at(source), move.target.tiling.tile_at(target))
    return [] if found is None else [_piece(found, rank, number, (0, found.end - found.begin))]


def _row(shares: Shares, cell: int) -> Sequence[int]:
    """What each holder of a cell sends."""
    return shares[cell].tolist() if isinstance(shares, torch.Tensor) else shares[cell]


def _due_before(move: Move, tile: Tile, holders: list[int], position: int) -> int:
    """How many elements of a source tile are due to the target ranks before that at `position`."""
    target = move.target.tiling
    needs = _needs(target, tile._replace(number=0, base=0))
    due = sum(need * bisect_left(target.replicas, position - base) for base, need in needs.values())
    for there in _in_target(move, holders):
        if there < position:
            due -= needs.get(target.tile_at(there).number, (0, 0))[1]
    return due


@remembered(maxsize=8)
def _needs(target: Tiling, tile: Tile) -> dict[int, tuple[int, int]]:
    """Of each target tile that meets a source tile, by its number: its base, and what they share.

    The tiles of all addends of a reduction lie alike, and are looked at once.
    """
    return {found.number: (found.base, found.end - found.begin) for found in target.meeting(tile)}


def _in_target(move: Move, positions: list[int]) -> list[int]:
    """Where ranks at positions of the source's mesh stand in the target's; without the others."""
    source, target = move.source.spec.mesh, move.target.spec.mesh
    if source is target or source == target:
        return positions
    found = [target.position(source.ranks[at]) for at in positions]
    return [there for there in found if there is not None]


def _piece(found: Meeting, peer: int, move: int, run: tuple[int, int]) -> Piece:
    """The piece of `run`, elements of what a pair shares."""
    begin = found.begin
    whole = begin, found.end
    return Piece(peer, move, found.offset, found.shape, begin + run[0], begin + run[1], whole)
