"""Plans carried out on running ranks: pack, exchange, unpack, reduce.

Invariant: every rank of the group makes the same exchanges, also one that holds nothing. What is
sent is read from the local tensors once and written into the results once; nothing is gathered.

    local = execute(plan, local, group)                          # torch's all_to_all_single
    local = execute(plan, local, group, exchange=all_to_all_single)   # comm-collectives': names
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshStateError, MeshTypeError, MeshValueError
from mesh_spmd.layout import FlatSpec, TensorSpec
from mesh_spmd.reshard.messages import Piece, copy_of, receives_of, sends_of
from mesh_spmd.reshard.plan import Plan
from mesh_spmd.reshard.reductions import identity_of, reduced
from mesh_spmd.reshard.regions import region_views
from mesh_spmd.reshard.steps import Step

Exchange = Callable[..., Any]
"""Called as torch's all_to_all_single: output, input, both lists of splits, and the group."""

Locals = Sequence[torch.Tensor | None]


def execute(
    plan: Plan,
    local: torch.Tensor | Locals | None,
    group: ProcessGroup | None = None,
    exchange: Exchange | None = None,
) -> Any:
    """Return this rank's part of the target tensors. Collective: every rank of `group` calls.

    Args:
        plan: equal on every rank.
        local: what this rank holds of the source, of `TensorSpec.local_shape(rank)`, any strides;
            None on a rank outside the source's mesh. For a plan of lists: a list of these.
        group: holds every rank of the plan; the default group if None. Others of its ranks take
            part without data.
        exchange: carries bytes between the ranks; called as torch's all_to_all_single, which it is
            by default, with uint8 tensors and splits in bytes.

    Returns:
        A new tensor, of the target's local shape; None outside the target's mesh; for a plan of
        lists, a list of these. Gradients are not recorded; see `reshard_tensor`.

    Raises:
        MeshTypeError: a local tensor is missing, superfluous or of another dtype.
        MeshValueError: a local tensor has another shape.
        MeshStateError: the group lacks a rank of the plan, or there is no process group.
    """
    check_kind(plan, Plan, "execute needs a Plan")
    if not dist.is_initialized():
        raise MeshStateError("execute needs a process group; call init_process_group first")
    peers = dist.get_process_group_ranks(group)
    missing = sorted(set(plan.ranks) - set(peers))
    if missing:
        raise MeshStateError(
            f"the plan moves data of ranks {missing[:8]}, which the group of {len(peers)} ranks "
            "lacks; give a group that holds every rank of both meshes"
        )
    given = [local] if isinstance(local, torch.Tensor) or local is None else list(local)
    rank = dist.get_rank()
    held = checked_locals(plan.sources, given, rank)

    def between(output: torch.Tensor, input: torch.Tensor, splits: Sequence[Sequence[int]]) -> None:
        (exchange or dist.all_to_all_single)(
            output,
            input,
            output_split_sizes=list(splits[0]),
            input_split_sizes=list(splits[1]),
            group=group,
        )

    device = next((t.device for t in held if t is not None), _device_of(group))
    with torch.no_grad():
        for step in plan.steps:
            held = run_step(
                step, held, _Place(rank=rank, peers=tuple(peers), device=device), between
            )
    return held[0] if plan.single else list(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a step runs: the global rank, the ranks of the group in its order, and the device."""

    rank: int
    peers: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Schedule:
    """One rank's pieces of a step: by peer what it sends and receives, and its local copies."""

    sends: dict[int, list[Piece]]
    receives: dict[int, list[Piece]]
    copies: list[Piece]


def run_step(
    step: Step,
    held: Locals,
    place: _Place,
    between: Callable[[torch.Tensor, torch.Tensor, Sequence[Sequence[int]]], None],
) -> Locals:
    """Carry out one exchange; return this rank's target tensors."""
    schedule = _schedule(step, place.rank)
    sources = [
        t.contiguous() if t is not None and isinstance(tensor.spec, FlatSpec) else t
        for t, tensor in zip(held, step.sources, strict=True)
    ]
    results = [_fresh(step, i, place) for i in range(len(step.targets))]
    for piece in schedule.copies:
        pairs = zip(
            _read(step, piece, sources, place.rank),
            _write(step, piece, results, place.rank),
            strict=True,
        )
        for source, target in pairs:
            target.copy_(source)
    for turn in range(step.rounds if any(step.sent) else 0):
        outgoing = [_cut(schedule.sends.get(peer, []), turn, step.rounds) for peer in place.peers]
        incoming = [
            _cut(schedule.receives.get(peer, []), turn, step.rounds) for peer in place.peers
        ]
        splits = [[_num_bytes(step, pieces) for pieces in side] for side in (incoming, outgoing)]
        output, packed = (
            torch.empty(sum(sizes), dtype=torch.uint8, device=place.device) for sizes in splits
        )
        _pack(step, [p for pieces in outgoing for p in pieces], sources, packed, place.rank)
        between(output, packed, splits)
        _unpack(step, [p for pieces in incoming for p in pieces], results, output, place.rank)
    return [
        found
        if found is None or not reduction.kinds or _filler(step, i, place.rank) is not None
        else reduced(found, reduction)
        for i, (found, reduction) in enumerate(zip(results, step.reductions, strict=True))
    ]


def checked_locals(tensors: Sequence[TensorSpec], given: Locals, rank: int) -> Locals:
    """Return the local tensors of `rank`, checked against what they are parts of.

    Raises:
        MeshTypeError: one is missing, superfluous or of another dtype.
        MeshValueError: there are more or fewer than tensors, or one has another shape.
    """
    if len(given) != len(tensors):
        raise MeshValueError(
            f"rank {rank}: {len(given)} local tensors were given, and the plan has {len(tensors)}"
        )
    for number, (tensor, local) in enumerate(zip(tensors, given, strict=True)):
        name = f"rank {rank}: local tensor {number}"
        if tensor.mesh.position(rank) is None:
            if local is not None and local.numel():
                raise MeshTypeError(f"{name} must be None, the rank is outside {tensor.mesh!r}")
            continue
        check_kind(local, torch.Tensor, f"{name} must be a tensor")
        if local is not None and local.dtype != tensor.dtype:
            raise MeshTypeError(f"{name} has dtype {local.dtype}, expected {tensor.dtype}")
        if local is not None and tuple(local.shape) != tensor.local_shape(rank):
            raise MeshValueError(
                f"{name} has shape {tuple(local.shape)}, expected {tensor.local_shape(rank)}: "
                f"{tensor.box(rank)} of {tensor.shape}"
            )
    return [
        None if tensor.mesh.position(rank) is None else local
        for tensor, local in zip(tensors, given, strict=True)
    ]


@lru_cache(maxsize=8)
def _schedule(step: Step, rank: int) -> _Schedule:
    sends: dict[int, list[Piece]] = {}
    receives: dict[int, list[Piece]] = {}
    copies: list[Piece] = []
    for number, (move, shares) in enumerate(zip(step.moves, step.shares, strict=True)):
        for piece in sends_of(move, number, shares, rank):
            sends.setdefault(piece.peer, []).append(piece)
        for piece in receives_of(move, number, shares, rank):
            receives.setdefault(piece.peer, []).append(piece)
        copies += copy_of(move, number, rank)
    # A pair may have several pieces of a move; both ends take them in the order of its elements.
    for pieces in (*sends.values(), *receives.values()):
        pieces.sort(key=lambda p: (p.move, p.offset, p.begin))
    return _Schedule(sends=sends, receives=receives, copies=copies)


def _fresh(step: Step, number: int, place: _Place) -> torch.Tensor | None:
    """Room for a target, and for each addend where it is reduced; filled where nothing arrives."""
    target, reduction = step.targets[number], step.reductions[number]
    if target.mesh.position(place.rank) is None:
        return None
    shape = target.local_shape(place.rank)
    value = _filler(step, number, place.rank)
    if value is not None:
        return torch.full(shape, value, dtype=target.dtype, device=place.device)
    shape = (reduction.num_addends, *shape) if reduction.kinds else shape
    return torch.empty(shape, dtype=target.dtype, device=place.device)


def _filler(step: Step, number: int, rank: int) -> int | None:
    """What `rank` holds of a target whose value stands on other ranks alone; else None."""
    return identity_of(step.targets[number], rank, kept=step.reductions[number].kept)


def _read(step: Step, piece: Piece, sources: Locals, rank: int) -> list[torch.Tensor]:
    move = step.moves[piece.move]
    local = sources[move.link.source]
    if local is None:
        raise MeshStateError(f"rank {rank} has nothing of source {move.link.source}")
    tensor = step.sources[move.link.source]
    return region_views(local, tensor, rank, piece, move.source.shift)


def _write(step: Step, piece: Piece, results: Locals, rank: int) -> list[torch.Tensor]:
    move = step.moves[piece.move]
    number = move.link.target
    result = results[number]
    if result is None:
        raise MeshStateError(f"rank {rank} has no room for target {number}")
    local = result if not step.reductions[number].kinds else result[move.addend]
    return region_views(local, step.targets[number], rank, piece, move.target.shift)


def _cut(pieces: list[Piece], turn: int, rounds: int) -> list[Piece]:
    """The parts of the pieces that travel in one of several rounds."""
    if rounds == 1:
        return pieces
    return [
        Piece(
            peer=p.peer,
            move=p.move,
            offset=p.offset,
            shape=p.shape,
            begin=p.begin + (p.end - p.begin) * turn // rounds,
            end=p.begin + (p.end - p.begin) * (turn + 1) // rounds,
        )
        for p in pieces
    ]


def _num_bytes(step: Step, pieces: list[Piece]) -> int:
    return sum((p.end - p.begin) * step.moves[p.move].dtype.itemsize for p in pieces)


def _pack(
    step: Step, pieces: list[Piece], sources: Locals, packed: torch.Tensor, rank: int
) -> None:
    begin = 0
    for piece in pieces:
        dtype = step.moves[piece.move].dtype
        count = piece.end - piece.begin
        here = packed[begin : begin + count * dtype.itemsize]
        begin += here.numel()
        # Bytes of an odd number before this message may leave it where its dtype cannot stand.
        straight = here.storage_offset() % dtype.itemsize == 0
        flat = here.view(dtype) if straight else torch.empty(count, dtype=dtype, device=here.device)
        at = 0
        for view in _read(step, piece, sources, rank):
            flat[at : at + view.numel()].view(view.shape).copy_(view)
            at += view.numel()
        if not straight:
            here.copy_(flat.view(torch.uint8))


def _unpack(
    step: Step, pieces: list[Piece], results: Locals, output: torch.Tensor, rank: int
) -> None:
    begin = 0
    for piece in pieces:
        dtype = step.moves[piece.move].dtype
        here = output[begin : begin + (piece.end - piece.begin) * dtype.itemsize]
        begin += here.numel()
        straight = here.storage_offset() % dtype.itemsize == 0
        flat = (here if straight else here.clone()).view(dtype)
        at = 0
        for view in _write(step, piece, results, rank):
            view.copy_(flat[at : at + view.numel()].view(view.shape))
            at += view.numel()


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where a rank without a source tensor has its buffers."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
