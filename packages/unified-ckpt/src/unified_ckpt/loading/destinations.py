"""The memory that a load fills: every element of it is to get one stored value.

Tensors may lie between each other (columns of one buffer), but share no element; else the last one
read would win, or a checksum fail though no file is damaged. Whole tensors that are the same memory
(tied weights) are told apart in `jobs`: what is stored of them must be equal.

    check_destinations({"model": shards})
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import Shard


class _Memory(NamedTuple):
    """Bytes of a tensor, in the order of addresses; of one that is dense there are no `dims`.

    It has `run` bytes in one piece, and copies of that at (count, stride in bytes) of each dim.
    """

    device: str
    begin: int
    end: int
    key: str
    run: int
    dims: tuple[tuple[int, int], ...]


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have alike if and only if they are the same elements."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def check_destinations(parts: Mapping[str, Sequence[Shard]]) -> None:
    """Refuse tensors that share elements with others, or between their own.

    Raises:
        CheckpointValueError: names them; nothing was changed.
    """
    known: dict[int, list[torch.Tensor]] = {}
    memories = []
    for shards in parts.values():
        for shard in shards:
            tensor = shard.tensor
            if tensor.numel() and _is_new(known, tensor):
                memories.append(_memory(shard.key, tensor))
    memories.sort()
    begin = 0
    while begin < len(memories):
        device, _, reached = memories[begin][:3]
        end = begin + 1
        while end < len(memories) and memories[end][0] == device and memories[end][1] < reached:
            reached = max(reached, memories[end][2])
            end += 1
        if end - begin > 1 or memories[begin].dims:
            _check_apart(memories[begin:end], reached)
        begin = end


def _is_new(known: dict[int, list[torch.Tensor]], tensor: torch.Tensor) -> bool:
    """Whether no tensor before was the same memory."""
    others = known.setdefault(tensor.data_ptr(), [])
    if others and memory_of(tensor) in map(memory_of, others):
        return False
    others.append(tensor)
    return True


def _memory(key: str, tensor: torch.Tensor) -> _Memory:
    device = "" if tensor.is_cpu else str(tensor.device)
    begin, run = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return _Memory(device, begin, begin + tensor.nbytes, key, tensor.nbytes, ())
    dims = sorted(
        (stride * run, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    )
    if dims[0][0] == 0:
        raise CheckpointValueError(
            f"{key!r}: the destination {tuple(tensor.shape)} with strides {tensor.stride()} shares "
            "memory between elements; pass a tensor that does not"
        )
    end = begin + run + sum(stride * (size - 1) for stride, size in dims)
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    return _Memory(device, begin, end, key, run, tuple((size, stride) for stride, size in dims))


def _check_apart(memories: Sequence[_Memory], end: int) -> None:
    """Mark what each tensor has in the bytes of all of them, in the largest steps that fit."""
    first = memories[0].begin
    step = math.gcd(*_distances(memories, first))
    marks = torch.zeros((end - first) // step, dtype=torch.bool)
    for number, (_, begin, stop, key, run, dims) in enumerate(memories):
        held = marks[(begin - first) // step : (stop - first) // step]
        marked = int(held.sum())
        sizes = [count for count, _ in dims] + [run // step]
        held.as_strided(sizes, [stride // step for _, stride in dims] + [1]).fill_(True)
        if int(held.sum()) - marked != math.prod(sizes):
            others = [other.key for other in memories[:number] if other.end > begin]
            whose = " or ".join(map(repr, others)) or "itself"
            raise CheckpointValueError(
                f"{key!r}: the destination shares a part of its memory with {whose}, so one value "
                "would take another's place; pass tensors that do not, or ignored_keys"
            )


def _distances(memories: Iterable[_Memory], first: int) -> Iterable[int]:
    for memory in memories:
        yield memory.begin - first
        yield memory.run
        yield from (stride for _, stride in memory.dims)
