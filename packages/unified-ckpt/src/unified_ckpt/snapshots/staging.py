"""Staging: where a snapshot waits for the saver process, in memory that both processes map.

A layout says where every shard's bytes stand in a buffer; it is pure data and the same in both
processes. The pool has a fixed number of buffers, so memory is bounded: who finds none free waits.

    layout = StagingLayout.of({"model": shards})
    buffer = pool.acquire(layout.num_bytes, timeout_s=60)
    for view, shard in zip(layout.views(buffer.tensor), shards): view.copy_(shard.tensor)
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.devices import ALIGNMENT_BYTES
from unified_ckpt.errors import CheckpointValueError, SaveError, check_type
from unified_ckpt.geometry import BoxMeta, Shard, round_up
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.snapshots.shared_memory import SharedMemory, check_memory


@dataclass(frozen=True, slots=True)
class StagedShard:
    """One shard's place: its part, its box and `num_bytes` from byte `begin` of the buffer.

    `shape` is the shape of its tensor.
    """

    part: str
    meta: BoxMeta
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the shard's memory in a buffer (uint8), in the shard's dtype and shape."""
        torch_dtype = dtype_of(self.meta.dtype).torch_dtype
        raw = memory[self.begin : self.begin + self.num_bytes]
        if torch_dtype is None or self.num_bytes == 0:
            return torch.empty(self.shape, dtype=torch_dtype)
        return raw.view(torch_dtype).view(self.shape)

    def shard(self, tensor: torch.Tensor) -> Shard:
        """Return the shard with other memory of the same box."""
        return Shard(key=self.meta.key, tensor=tensor, box=self.meta.box)


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Where the shards of all parts stand in a buffer of `num_bytes`."""

    part_names: tuple[str, ...]
    entries: tuple[StagedShard, ...]
    num_bytes: int

    @classmethod
    def of(cls, parts: Mapping[str, Sequence[Shard]]) -> "StagingLayout":
        """Lay out shards one after the other."""
        boxes = [
            (part, shard.meta, tuple(shard.tensor.shape))
            for part, shards in parts.items()
            for shard in check_shards(part, shards)
        ]
        return cls.of_boxes(tuple(parts), boxes)

    @classmethod
    def of_boxes(
        cls, part_names: Sequence[str], boxes: Sequence[tuple[str, BoxMeta, tuple[int, ...]]]
    ) -> "StagingLayout":
        """Lay out boxes, each with its part and the shape of its tensor."""
        entries, begin = [], 0
        for part, meta, shape in boxes:
            num_bytes = math.prod(shape) * dtype_of(meta.dtype).itemsize_bytes
            entries.append(StagedShard(part, meta, shape, begin, num_bytes))
            begin += round_up(num_bytes, ALIGNMENT_BYTES)
        return cls(tuple(part_names), tuple(entries), begin)

    def matches(self, parts: Mapping[str, Sequence[Shard]]) -> bool:
        """Whether the shards are those of this layout, so that it can be used again."""
        shards = [shard for part, held in parts.items() for shard in check_shards(part, held)]
        return (
            tuple(parts) == self.part_names
            and [e.part for e in self.entries] == [p for p, held in parts.items() for _ in held]
            and [e.meta for e in self.entries] == [shard.meta for shard in shards]
            and [e.shape for e in self.entries] == [shard.tensor.shape for shard in shards]
        )

    def boxes(self) -> list[tuple[str, BoxMeta, tuple[int, ...]]]:
        """Return every shard's part, box and tensor shape."""
        return [(entry.part, entry.meta, entry.shape) for entry in self.entries]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return every shard's memory in a buffer (uint8), in order."""
        return [entry.view(memory) for entry in self.entries]

    def shards(self, memory: torch.Tensor) -> dict[str, list[Shard]]:
        """Return the staged shards by part, as `save` takes them; nothing is copied."""
        parts: dict[str, list[Shard]] = {name: [] for name in self.part_names}
        for entry in self.entries:
            parts[entry.part].append(entry.shard(entry.view(memory)))
        return parts

    def to_json(self) -> list[Any]:
        """Return the layout as JSON types."""
        entries = [[entry.part, entry.meta.to_json(), entry.shape] for entry in self.entries]
        return [self.part_names, entries]

    @classmethod
    def from_json(cls, value: list[Any]) -> "StagingLayout":
        """Undo `to_json`."""
        names, entries = value
        boxes = [(part, BoxMeta.from_json(meta), tuple(shape)) for part, meta, shape in entries]
        return cls.of_boxes(names, boxes)


def tensors_of(parts: Mapping[str, Sequence[Shard]]) -> list[torch.Tensor]:
    """Return the tensors of all shards, in a layout's order."""
    return [shard.tensor for shards in parts.values() for shard in shards]


def check_shards(part: str, shards: Sequence[Shard]) -> Sequence[Shard]:
    """Return the shards of a part."""
    for shard in shards:
        check_type(f"part {part!r}: a shard", shard, Shard)
    return shards


class StagingBuffer:
    """One buffer of a pool; it remembers the views of the layout that was last used in it."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._layout: StagingLayout | None = None
        self._views: list[torch.Tensor] = []

    @property
    def tensor(self) -> torch.Tensor:
        """The whole buffer as uint8."""
        return self.memory.tensor

    def views(self, layout: StagingLayout) -> list[torch.Tensor]:
        """Return every shard's memory, in the layout's order."""
        if layout is not self._layout:
            self._layout, self._views = layout, layout.views(self.tensor)
        return self._views


class StagingPool:
    """A fixed number of buffers, all of one size, allocated before they are needed.

    Args:
        num_buffers: how many snapshots can wait or be written at a time.
        room_bytes: of every buffer beside what was asked for, since what stands there may grow
            from one snapshot to the next, and new memory costs more than the copy.
    """

    def __init__(self, num_buffers: int, *, room_bytes: int = 0) -> None:
        if num_buffers < 1:
            raise CheckpointValueError(f"num_buffers={num_buffers}; a pool needs at least 1")
        self._num_buffers = num_buffers
        self._room_bytes = room_bytes
        self._free: list[StagingBuffer] = []
        self._num_used = 0
        self._pins = False
        self._closed = False
        self._changed = threading.Condition()

    def pin(self) -> None:
        """Pin all buffers, those to come as well, so that CUDA copies to them without a stop."""
        with self._changed:
            self._pins = True
            for buffer in self._free:
                buffer.memory.pin()

    def prepare(self, num_bytes: int, layout: StagingLayout | None = None) -> None:
        """Make every free buffer at least that large, with the views of that layout if any."""
        with self._changed:
            fitting = [b for b in self._free if b.memory.num_bytes >= num_bytes]
            for buffer in self._free:
                if buffer.memory.num_bytes < num_bytes:
                    buffer.memory.close()
            self._free = fitting
            missing = self._num_buffers - self._num_used - len(fitting)
            size = num_bytes + self._room_bytes
            if missing > 0:
                check_memory(missing * size, purpose=f"staging in {missing} buffers")
            for _ in range(missing):
                memory = SharedMemory.allocate(size, purpose="staging")
                if self._pins:
                    memory.pin()
                self._free.append(StagingBuffer(memory))
            if layout is not None:
                for buffer in self._free:
                    buffer.views(layout)

    def acquire(self, num_bytes: int, *, timeout_s: float) -> StagingBuffer:
        """Return a free buffer of at least that size; waits while all are in use."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._free and self._num_used >= self._num_buffers:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise SaveError(
                        f"all {self._num_buffers} staging buffers still wait for the saver process "
                        f"after {timeout_s:g} s; save less often, or raise backpressure_timeout_s "
                        "or num_buffers"
                    )
            if not self._free or self._free[-1].memory.num_bytes < num_bytes:
                self.prepare(num_bytes)
            self._num_used += 1
            return self._free.pop()

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back."""
        with self._changed:
            if self._closed:
                self.discard(buffer)
                return
            self._num_used -= 1
            self._free.append(buffer)
            self._changed.notify_all()

    def discard(self, buffer: StagingBuffer) -> None:
        """Give a buffer back that is not to be used again; another one will be allocated."""
        with self._changed:
            self._num_used -= 1
            buffer.memory.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Close the descriptors of the buffers; of one in use when it is released."""
        with self._changed:
            self._closed = True
            for buffer in self._free:
                buffer.memory.close()
            self._free = []
