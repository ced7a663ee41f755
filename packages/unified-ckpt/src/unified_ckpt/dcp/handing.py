"""What a writer of DCP writes comes from a reader of DCP, in batches that memory has room for.

planner = HandingPlanner(reader, batches)
hand_over(planner, writer, planner_data=metadata.planner_data)
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from unified_ckpt.dcp.pickles import BROKEN, as_corrupt
from unified_ckpt.geometry import Shape


@dataclass(frozen=True, slots=True)
class Handed:
    """A box of a tensor, or an object: what is written, and what is read for it."""

    write: WriteItem
    read: ReadItem

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's box."""
        data = self.write.tensor_data
        return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def handed_object(name: str) -> Handed:
    """Return what hands over an object."""
    index, empty = MetadataIndex(name), torch.Size([])
    return Handed(
        WriteItem(index=index, type=WriteItemType.BYTE_IO),
        ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty),
    )


def handed_box(
    name: str, stored: TensorStorageMetadata, offset: Shape, shape: Shape, *, chunked: bool
) -> Handed:
    """Return what hands over a box of a tensor.

    Args:
        chunked: whether the box is a chunk that the reader has; else the reader has all as one.
    """
    at, sizes, zeros = torch.Size(offset), torch.Size(shape), torch.Size([0] * len(offset))
    index = MetadataIndex(name, at)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=at, sizes=sizes),
        properties=TensorProperties(dtype=stored.properties.dtype),
        size=stored.size,
    )
    kind = WriteItemType.TENSOR if sizes == stored.size else WriteItemType.SHARD
    source, inside = (index, zeros) if chunked else (MetadataIndex(name, zeros), at)
    return Handed(
        WriteItem(index=index, type=kind, tensor_data=data),
        ReadItem(LoadItemType.TENSOR, index, zeros, source, inside, sizes),
    )


class _Taker(DefaultLoadPlanner):
    """Keeps what a reader reads."""

    def __init__(self) -> None:
        super().__init__()
        self.state_dict: dict[str, Any] = {}  # no templates of objects
        self.taken: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self.taken[read_item.dest_index]
        return tensor  # type: ignore[return-value]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.taken[read_item.dest_index] = value


class HandingPlanner(DefaultSavePlanner):
    """Gives a writer what a reader reads; of the batches only one is in memory.

    Args:
        reader: set up for the checkpoint.
        batches: what is read at once.
        check_object: returns an object's pickle, or raises what is wrong with it.
        where: the checkpoint, for messages.
    """

    def __init__(
        self,
        reader: StorageReader,
        batches: Sequence[Sequence[Handed]],
        *,
        check_object: Callable[[str, io.BytesIO], io.BytesIO] = lambda name, raw: raw,
        where: object,
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self.batches = batches
        self._reader = reader
        self._check_object = check_object
        self._where = where
        self._batch_of = {
            each.write.index: number for number, batch in enumerate(batches) for each in batch
        }
        self._held: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self._number = -1

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a box, or an object's pickle; reads its batch if that is not the one in memory."""
        number = self._batch_of[write_item.index]
        if number != self._number:
            self.forget()
            self._held, self._number = self._read(self.batches[number]), number
        return self._held[write_item.index]

    def forget(self) -> None:
        """Let go of what is in memory."""
        self._held, self._number = {}, -1

    def _read(self, batch: Sequence[Handed]) -> dict[MetadataIndex, torch.Tensor | io.BytesIO]:
        taker = _Taker()
        for each in batch:
            data = each.write.tensor_data
            if data is not None:
                taker.taken[each.write.index] = torch.empty(
                    data.chunk.sizes, dtype=data.properties.dtype
                )
        wanted = [each.read for each in batch if each.num_bytes or each.write.tensor_data is None]
        try:
            self._reader.read_data(LoadPlan(wanted), taker).wait()
        except (*BROKEN, FileNotFoundError) as error:
            names = ", ".join(
                repr(name) for name in dict.fromkeys(i.dest_index.fqn for i in wanted)
            )
            raise as_corrupt(f"{self._where}: {names}", error) from error
        for index, value in taker.taken.items():
            if isinstance(value, io.BytesIO):
                taker.taken[index] = self._check_object(index.fqn, value)
        return taker.taken


def hand_over(
    planner: HandingPlanner,
    writer: StorageWriter,
    plans: Sequence[Sequence[Handed]],
    planner_data: Mapping[str, Any] | None,
) -> None:
    """Write all, each plan as if one rank wrote it; the last step publishes."""
    writer.set_up_storage_writer(True)
    local = [writer.prepare_local_plan(SavePlan([each.write for each in plan])) for plan in plans]
    described_plans, described = planner.create_global_plan(local)
    orders = writer.prepare_global_plan(described_plans)
    results = []
    for order in orders:
        results.append(writer.write_data(planner.finish_plan(order), planner).wait())
        planner.forget()
    writer.finish(replace(described, planner_data=planner_data), results)
