"""One exchange between all ranks: the moves of all tensors, who sends how much, and its totals.

step = make_step(sources, targets, links)
step.sent[3], step.received[3]     # bytes of the fourth rank of step.ranks
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mesh_spmd.layout import FlatSpec, Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard.caches import remembered
from mesh_spmd.reshard.cells import cells_of, holders_of
from mesh_spmd.reshard.few_ranks import MOST_RANKS, totals_of
from mesh_spmd.reshard.moves import Link, Move, Reduction, Shares, Side, moves_of
from mesh_spmd.reshard.senders import deal_out

BUFFER_BYTES = 2**25
"""What a rank's buffers hold at most unless a plan is told otherwise; bandwidth needs no more."""
SMALL_BYTES = 2**20
"""What they may hold beside smaller blocks: so little memory is worth no second exchange."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """One exchange. Plain data, equal on every rank.

    Attributes:
        sources, targets: the tensors before and after.
        moves: what moves, in the order in which messages are packed.
        shares: for each move [cells, replicas] elements that each holder sends, as rows of
            integers where a mesh has few ranks.
        reductions: for each target how its addends are reduced.
        ranks: every rank that holds something, ascending.
        sent, received: bytes by position in `ranks`.
        rounds: how many exchanges the step is cut into, so that its buffers stay small.
    """

    sources: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...]
    moves: tuple[Move, ...]
    shares: tuple[Shares, ...]
    reductions: tuple[Reduction, ...]
    ranks: tuple[int, ...]
    sent: Sequence[int]
    received: Sequence[int]
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
    sources: Sequence[TensorSpec],
    targets: Sequence[TensorSpec],
    links: Iterable[Link],
    buffer_bytes: int = BUFFER_BYTES,
) -> Step:
    """Return the direct exchange of all links, senders balanced over replicas.

    It has so many rounds that no rank's buffers hold more than `buffer_bytes`, nor more than its
    source and target blocks or, where these are smaller, SMALL_BYTES.
    """
    links = list(links)
    if len(links) == 1 and _is_small(sources[0], targets[0], links[0]):
        return _small_step(sources[0], targets[0], links[0], buffer_bytes)
    moves: list[Move] = []
    reductions = [Reduction()] * len(targets)
    for link in links:
        found, reduction = moves_of(link, sources[link.source], targets[link.target])
        moves += found
        reductions[link.target] = reduction
    # Wide elements first: then each message begins at a multiple of its element's size.
    moves.sort(key=lambda move: -move.dtype.itemsize)
    ranks = _all_ranks(tuple(dict.fromkeys(t.mesh for t in (*sources, *targets))))
    received, blocks, addends = torch.zeros(3, len(ranks), dtype=torch.int64)
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
        if reductions[move.link.target].kinds:
            wanted = move.target.cells.numel
            addends.index_add_(0, index, wanted * move.dtype.itemsize)
        amounts.append(due)
    holders = [_holders_in(ranks, move) for move in moves]
    sent, shares = deal_out(holders, amounts, [m.dtype.itemsize for m in moves], len(ranks))
    return Step(
        sources=tuple(sources),
        targets=tuple(targets),
        moves=tuple(moves),
        shares=tuple(shares),
        reductions=tuple(reductions),
        ranks=ranks,
        sent=sent.tolist(),
        received=received.tolist(),
        rounds=_num_rounds(sent + received + addends, blocks, buffer_bytes),
    )


def _is_small(source: TensorSpec, target: TensorSpec, link: Link) -> bool:
    """Whether one tensor's boxes move within one mesh of few ranks, and nothing is partial."""
    before, after = source.spec, target.spec
    if not (isinstance(before, Spec) and isinstance(after, Spec)) or link.shift is not None:
        return False
    mesh = before.mesh
    return (
        (mesh is after.mesh or mesh == after.mesh)
        and mesh.size <= MOST_RANKS
        and not source.partials
        and not target.partials
        and all(low < high for low, high in pairwise(mesh.ranks))
    )


def _small_step(source: TensorSpec, target: TensorSpec, link: Link, buffer_bytes: int) -> Step:
    """As make_step, in plain numbers: an even cut of what is due is the least for all senders."""
    zeros = (0,) * len(source.shape)
    move = Move(
        link=link,
        source=Side(shape=source.shape, spec=source.spec, shift=zeros),
        target=Side(shape=target.shape, spec=target.spec, shift=zeros),
        addend=0,
        dtype=source.dtype,
    )
    found = totals_of(move.source.tiling, move.target.tiling)
    size, replicas = source.dtype.itemsize, len(found.holders[0])
    sent = [0] * len(found.held)
    shares = []
    for due, holders in zip(found.due, found.holders, strict=True):
        each, rest = divmod(due, replicas)
        row = [each + 1] * rest + [each] * (replicas - rest)
        shares.append(row)
        for position, share in zip(holders, row, strict=True):
            sent[position] = share * size
    received = [missing * size for missing in found.missing]
    # As in _num_rounds.
    blocks = [(held + wanted) * size for held, wanted in zip(found.held, found.wanted, strict=True)]
    rounds = max(
        -(-(out + into) // min(max(block, SMALL_BYTES), buffer_bytes))
        for out, into, block in zip(sent, received, blocks, strict=True)
    )
    return Step(
        sources=(source,),
        targets=(target,),
        moves=(move,),
        shares=(shares,),
        reductions=(Reduction(),),
        ranks=source.mesh.ranks,
        sent=sent,
        received=received,
        rounds=max(1, rounds),
    )


def _num_rounds(moved: torch.Tensor, blocks: torch.Tensor, buffer_bytes: int) -> int:
    """How many exchanges keep buffers within `buffer_bytes`, and the source and target `blocks`."""
    room = blocks.clamp(min=SMALL_BYTES).clamp(max=buffer_bytes)
    rounds: list[int] = (-(-moved // room)).tolist()
    return max([1, *rounds])


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


def _checksum(numbers: Shares | Sequence[int]) -> int:
    """A number that changes with each of `numbers` and with their order."""
    flat = torch.as_tensor(numbers).flatten()
    return int((flat * _weights(flat.numel())).sum())


@remembered(maxsize=64)
def _weights(count: int) -> torch.Tensor:
    return (torch.arange(1, count + 1) * 0x1E3779B97F4A7C15) | 1
