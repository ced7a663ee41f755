"""One exchange between all ranks: the moves of all tensors, who sends how much, and its totals.

step = make_step(sources, targets, links)
step.sent[3], step.received[3]     # bytes of the fourth rank of step.ranks
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mesh_spmd.layout import FlatSpec, Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard.caches import remembered
from mesh_spmd.reshard.cells import cells_of, holders_of
from mesh_spmd.reshard.moves import Link, Move, Reduction, moves_of
from mesh_spmd.reshard.senders import water_fill

SWEEPS = 4
SWEEP_NUMBERS = 2_000_000  # beyond so many shares one pass has to do


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """One exchange. Plain data, equal on every rank.

    Attributes:
        sources, targets: the tensors before and after.
        moves: what moves, in the order in which messages are packed.
        shares: for each move [cells, replicas] elements that each holder sends.
        reductions: for each target how its addends are reduced.
        ranks: every rank that holds something, ascending.
        sent, received: bytes by position in `ranks`.
        rounds: how many exchanges the step is cut into, so that its buffers stay small.
    """

    sources: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...]
    moves: tuple[Move, ...]
    shares: tuple[torch.Tensor, ...]
    reductions: tuple[Reduction, ...]
    ranks: tuple[int, ...]
    sent: torch.Tensor
    received: torch.Tensor
    rounds: int

    def digest(self) -> str:
        """Return a hash of everything that the step says."""
        found = hashlib.sha256()
        for tensor in (*self.sources, *self.targets):
            found.update(f"{tensor.shape}{tensor.dtype}{_described(tensor.spec)};".encode())
        for move, shares in zip(self.moves, self.shares, strict=True):
            found.update(f"{move.link}{move.addend}{_checksum(shares)};".encode())
        found.update(f"{self.rounds}{_checksum(self.sent)}{_checksum(self.received)}".encode())
        return found.hexdigest()


def make_step(
    sources: Sequence[TensorSpec], targets: Sequence[TensorSpec], links: Iterable[Link]
) -> Step:
    """Return the direct exchange of all links, senders balanced over replicas."""
    moves: list[Move] = []
    reductions = [Reduction()] * len(targets)
    for link in links:
        found, reduction = moves_of(link, sources[link.source], targets[link.target])
        moves += found
        reductions[link.target] = reduction
    # Wide elements first: then each message begins at a multiple of its element's size.
    moves.sort(key=lambda move: -move.dtype.itemsize)
    ranks = _all_ranks(tuple(dict.fromkeys(t.mesh for t in (*sources, *targets))))
    received, blocks = torch.zeros(2, len(ranks), dtype=torch.int64)
    amounts = []
    ends: set[tuple[str, int]] = set()
    for move in moves:
        _, missing, due = move.totals()
        for end, number in (("source", move.link.source), ("target", move.link.target)):
            if (end, number) not in ends:
                ends.add((end, number))
                _add_block(blocks, (sources if end == "source" else targets)[number], ranks)
        index = _index_in(ranks, move.target.spec.mesh)
        received.index_add_(0, index, missing * move.dtype.itemsize)
        amounts.append(due)
    sent, shares = _deal_out(moves, amounts, ranks)
    step = Step(
        sources=tuple(sources),
        targets=tuple(targets),
        moves=tuple(moves),
        shares=tuple(shares),
        reductions=tuple(reductions),
        ranks=ranks,
        sent=sent,
        received=received,
        rounds=1,
    )
    return step if any(r.kinds for r in reductions) else _in_rounds(step, blocks)


def _deal_out(
    moves: Sequence[Move], amounts: Sequence[torch.Tensor], ranks: tuple[int, ...]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The bytes each rank sends, and for each move the elements each holder sends."""
    sent = torch.zeros(len(ranks), dtype=torch.int64)
    shares = [torch.empty(0)] * len(moves)
    where = [_holders_in(ranks, move) for move in moves]
    order = sorted(range(len(moves)), key=lambda i: where[i].shape[1])
    for i in order:
        shares[i] = _fill(sent, where[i], amounts[i], moves[i].dtype.itemsize)
    free = [i for i in order if where[i].shape[1] > 1]
    if len(order) == 1 or len(free) * len(ranks) > SWEEP_NUMBERS:
        return sent, shares
    for _ in range(SWEEPS):
        highest = int(sent.max())
        for i in free:
            size = moves[i].dtype.itemsize
            sent.index_add_(0, where[i].flatten(), shares[i].flatten(), alpha=-size)
            shares[i] = _fill(sent, where[i], amounts[i], size)
        if int(sent.max()) >= highest:
            break
    return sent, shares


def _fill(
    sent: torch.Tensor, where: torch.Tensor, amounts: torch.Tensor, itemsize: int
) -> torch.Tensor:
    """Deal one move out to its holders, and add what they send to `sent`."""
    shares = water_fill(sent[where] // itemsize, amounts)
    sent.index_add_(0, where.flatten(), shares.flatten(), alpha=itemsize)
    return shares


def _in_rounds(step: Step, blocks: torch.Tensor) -> Step:
    """Cut the exchange so that its buffers hold no more than the source and target `blocks`."""
    moved = step.sent + step.received
    busy = moved > 0
    if not bool(busy.any()):
        return step
    rounds = int((-(-moved[busy] // blocks[busy].clamp(min=1))).max())
    fields = {name: getattr(step, name) for name in Step.__slots__}
    return Step(**{**fields, "rounds": rounds})


def _add_block(blocks: torch.Tensor, tensor: TensorSpec, ranks: tuple[int, ...]) -> None:
    cells = cells_of(tensor.shape, tensor.spec, (0,) * len(tensor.shape))
    blocks.index_add_(0, _index_in(ranks, tensor.mesh), cells.numel * tensor.dtype.itemsize)


def _holders_in(ranks: tuple[int, ...], move: Move) -> torch.Tensor:
    return _spec_holders(ranks, move.source.spec, len(move.source.shape))


@remembered(maxsize=256)
def _spec_holders(ranks: tuple[int, ...], spec: Spec | FlatSpec, ndim: int) -> torch.Tensor:
    return _index_in(ranks, spec.mesh)[holders_of(spec, ndim)]


@remembered(maxsize=64)
def _all_ranks(meshes: tuple[ProcessMesh, ...]) -> tuple[int, ...]:
    return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))


@remembered(maxsize=256)
def _index_in(ranks: tuple[int, ...], mesh: ProcessMesh) -> torch.Tensor:
    index = {rank: position for position, rank in enumerate(ranks)}
    return torch.tensor([index[rank] for rank in mesh.ranks], dtype=torch.int64)


@remembered(maxsize=1024)
def _described(spec: Spec | FlatSpec) -> str:
    if isinstance(spec, FlatSpec):
        return f"flat({_described(spec.spec)},{spec.axes},{spec.sizes})"
    return f"{spec.mesh.axis_names}{spec.mesh.shape}{spec.mesh.ranks}{spec.placements}" + (
        f"{spec.order}{spec.sizes}"
    )


def _checksum(numbers: torch.Tensor) -> int:
    """A number that changes with each of `numbers` and with their order."""
    flat = numbers.flatten()
    return int((flat * _weights(flat.numel())).sum())


@remembered(maxsize=64)
def _weights(count: int) -> torch.Tensor:
    return (torch.arange(1, count + 1) * 0x1E3779B97F4A7C15) | 1
