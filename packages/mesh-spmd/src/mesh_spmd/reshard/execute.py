"""Plans carried out on running ranks: pack, exchange, unpack, reduce.

Invariant: every rank of the group makes the same exchanges, also one that holds nothing. What is
sent is read from the local tensors once and written into the results once; nothing is gathered.

    local = execute(plan, local, group)                          # torch's all_to_all_single
    local = execute(plan, local, group, exchange=all_to_all_single)   # comm-collectives': names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshStateError, MeshTypeError, MeshValueError
from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard.messages import Piece
from mesh_spmd.reshard.plan import Plan
from mesh_spmd.reshard.reductions import identity_of, reduced
from mesh_spmd.reshard.regions import region_views
from mesh_spmd.reshard.steps import Step
from mesh_spmd.reshard.turns import (
    AddendBox,
    Turn,
    addend_box,
    addend_boxes,
    addend_bytes,
    buffer_bytes_of,
    buffers_of,
    is_addend,
    rests,
    schedule_of,
)

Exchange = Callable[..., Any]
"""Called as torch's all_to_all_single: output, input, both lists of splits, and the group."""

Locals = Sequence[torch.Tensor | None]
Between = Callable[[torch.Tensor, torch.Tensor, Sequence[Sequence[int]]], None]
"""An exchange among the ranks of a place: output, input, and both lists of splits in bytes."""


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
            None on a rank outside the source's mesh, or an empty tensor, which says where the
            others' tensors lie: a group with a backend for each device needs that. For a plan of
            lists: a list of these.
        group: holds every rank of the plan; the default group if None. Others of its ranks take
            part without data.
        exchange: carries bytes between the ranks; called as torch's all_to_all_single, which it is
            by default, with uint8 tensors and splits in bytes.

    Returns:
        A new tensor, of the target's local shape; None outside the target's mesh; for a plan of
        lists, a list of these. Gradients are not recorded; see `reshard_tensor`.

    Raises:
        MeshTypeError: a local tensor is missing, superfluous, of another dtype or a DTensor.
        MeshValueError: a local tensor has another shape, or lies on another device than the others.
        MeshStateError: the group lacks a rank of the plan, or there is no process group.
    """
    check_kind(plan, Plan, "execute needs a Plan")
    check_running()
    check_kind(
        local, torch.Tensor | Iterable | None, "execute needs a local tensor, None or a list"
    )
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

    device = device_of(given, group)
    with torch.no_grad():
        held = run_steps(plan, held, Place(rank=rank, peers=tuple(peers), device=device), between)
    return held[0] if plan.single else list(held)


def check_running() -> None:
    """Raise MeshStateError unless this process is a rank."""
    if not dist.is_initialized():
        raise MeshStateError("resharding needs a process group; call init_process_group first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step runs: the global rank, the ranks of the group in its order, and the device."""

    rank: int
    peers: tuple[int, ...]
    device: torch.device


def run_steps(plan: Plan, held: Locals, place: Place, between: Between) -> Locals:
    """Carry out a plan by any exchange; return this rank's target tensors."""
    # One buffer for all exchanges: a new one would stand beside the last, which the threads of a
    # backend may hold for a while.
    num_bytes = buffer_bytes_of(plan.steps, place.rank)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
    for number, step in enumerate(plan.steps):
        held = _run_step(step, held, place, (between, buffer), later=number > 0)
    return held


def _run_step(
    step: Step, held: Locals, place: Place, wire: tuple[Between, torch.Tensor], *, later: bool
) -> Locals:
    """Carry out one step by a `wire`: an exchange, and the buffer for it.

    What lies as before is handed on in a `later` step, and copied in the first one.
    """
    between, buffer = wire
    rank = place.rank
    schedule, sizes = schedule_of(step, rank), buffers_of(step, rank)
    addends, packed, output = buffer[: sum(sizes)].split(list(sizes))
    kept = [later and rests(step, number) for number in range(len(step.targets))]
    results = [
        held[number] if kept[number] else _fresh(step, number, place)
        for number in range(len(step.targets))
    ]
    for piece in schedule.copies:
        if not kept[step.moves[piece.move].link.target]:
            _copy(step, piece, (held, results), rank)
    for number, turn in enumerate(schedule.turns):
        values = _addends(step, schedule.turns, number, addends)
        for piece in turn.copies:
            _move(_place_of(step, piece, values, number), _read(step, piece, held, rank))
        outgoing, incoming = (
            [side.get(peer, []) for peer in place.peers] for side in (turn.outgoing, turn.incoming)
        )
        splits = [[_num_bytes(step, pieces) for pieces in side] for side in (incoming, outgoing)]
        arriving, leaving = output[: sum(splits[0])], packed[: sum(splits[1])]
        for here, piece in _on_the_wire(step, leaving, outgoing):
            _move(here, _read(step, piece, held, rank))
        if any(step.sent):  # known to every rank
            between(arriving, leaving, splits)
        for here, piece in _on_the_wire(step, arriving, incoming):
            if is_addend(step, piece):
                _place_of(step, piece, values, number).copy_(here)
            else:
                _move(here, _write(step, piece, results, rank), into_views=True)
        _reduce_all(step, values, results, rank)
    return results


def _copy(step: Step, piece: Piece, ends: tuple[Locals, Locals], rank: int) -> None:
    """Copy what a rank holds already, from its sources to its results."""
    sources, targets = _read(step, piece, ends[0], rank), _write(step, piece, ends[1], rank)
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


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
    _check_plain(given, rank)
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


def _check_plain(given: Locals, rank: int) -> None:
    """Raise unless these are a rank's own tensors on one device, on which its results will lie."""
    device: torch.device | None = None
    for number, local in enumerate(given):
        name = f"rank {rank}: local tensor {number}"
        check_kind(local, torch.Tensor | None, f"{name} must be a tensor, or None outside its mesh")
        if local is None:
            continue
        if isinstance(local, DTensor):
            raise MeshTypeError(
                f"{name} is a DTensor; give its part and layout, which "
                "mesh_spmd.interop.from_dtensor returns, or use mesh_spmd.interop.redistribute"
            )
        device = device or local.device
        if local.device != device:
            raise MeshValueError(
                f"{name} lies on {local.device}, and one before it on {device}; an exchange is on "
                "one device: move it there, or make a plan for the tensors of each device"
            )


def _fresh(step: Step, number: int, place: Place) -> torch.Tensor | None:
    """Room for a target; filled where nothing arrives."""
    target = step.targets[number]
    if target.mesh.position(place.rank) is None:
        return None
    shape = target.local_shape(place.rank)
    value = _filler(step, number, place.rank)
    if value is not None:
        return torch.full(shape, value, dtype=target.dtype, device=place.device)
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
    return region_views(result, step.targets[number], rank, piece, move.target.shift)


def _num_bytes(step: Step, pieces: list[Piece]) -> int:
    return sum((p.end - p.begin) * step.moves[p.move].dtype.itemsize for p in pieces)


def _on_the_wire(
    step: Step, buffer: torch.Tensor, by_peer: Sequence[list[Piece]]
) -> Iterator[tuple[torch.Tensor, Piece]]:
    """Each piece with its bytes in a buffer, peer after peer."""
    begin = 0
    for pieces in by_peer:
        for piece in pieces:
            end = begin + _num_bytes(step, [piece])
            yield buffer[begin:end], piece
            begin = end


def _move(wire: torch.Tensor, views: list[torch.Tensor], *, into_views: bool = False) -> None:
    """Copy the elements of views, one after the other, to bytes, or the other way."""
    begin = 0
    for view in views:
        size = view.dtype.itemsize
        here = wire[begin : begin + view.numel() * size]
        begin += here.numel()
        if here.storage_offset() % size == 0:
            here = here.view(view.dtype).view(view.shape)
        else:
            # An odd number of bytes before it: its dtype cannot stand here, its bytes can. A view
            # that is conjugated or negated when it is read has no bytes yet.
            view = view.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)
            here = here.view(view.shape)
        if into_views:
            view.copy_(here)
        else:
            here.copy_(view)


def _addends(
    step: Step, turns: Sequence[Turn], number: int, buffer: torch.Tensor
) -> dict[AddendBox, torch.Tensor]:
    """Room for the addends of a turn: bytes of each box, one addend after the other."""
    found, begin = {}, 0
    for box in addend_boxes(step, turns, number):
        end = begin + addend_bytes(step, box)
        found[box] = buffer[begin:end]
        begin = end
    return found


def _place_of(
    step: Step, piece: Piece, values: dict[AddendBox, torch.Tensor], turn: int
) -> torch.Tensor:
    """Where the bytes of a piece of an addend belong."""
    box, move = addend_box(step, piece, turn), step.moves[piece.move]
    first = move.addend * (box.end - box.begin) + piece.begin - box.begin
    size = move.dtype.itemsize
    return values[box][first * size : (first + piece.end - piece.begin) * size]


def _reduce_all(
    step: Step, values: dict[AddendBox, torch.Tensor], results: Locals, rank: int
) -> None:
    """Write the value of all addends of each box into its target."""
    for box, stacked in values.items():
        target, result = step.targets[box.target], results[box.target]
        if result is None:
            raise MeshStateError(f"rank {rank} has no room for target {box.target}")
        reduction = step.reductions[box.target]
        value = reduced(stacked.view(target.dtype).view(reduction.num_addends, -1), reduction)
        begin = 0
        for view in region_views(result, target, rank, box, box.shift):
            view.copy_(value[begin : begin + view.numel()].view(view.shape))
            begin += view.numel()


def device_of(given: Locals, group: ProcessGroup | None) -> torch.device:
    """Where a rank has its buffers: with its tensors, empty ones too, else by the backend."""
    for local in given:
        if local is not None:
            return local.device
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
