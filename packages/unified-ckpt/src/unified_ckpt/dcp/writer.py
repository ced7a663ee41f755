"""Let torch DCP write checkpoints of this package: complete or absent, safetensors, no pickle.

DCP plans what each rank writes and carries plans and results between ranks; this writer turns the
plans into files, and publishes them with one rename after all ranks have written. Python objects of
the state dict become JSON in `dcp.json`.

    dcp.save(state_dict, storage_writer=UnifiedStorageWriter("run/checkpoint-10"))
"""

import gc
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError, as_path, check_type
from unified_ckpt.files import sync_tree
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.files.format.tables import encode_records
from unified_ckpt.geometry import Box, BoxMeta, Shard
from unified_ckpt.geometry.tensors import (
    bits_of,
    byte_view,
    contiguous_on_cpu,
    narrow_box,
    stored_dtype,
)
from unified_ckpt.loading import DCP_NAME, DcpRecord, Prefixes
from unified_ckpt.plans import DEFAULT_MAX_SHARD_BYTES, FilePlan, Piece, plan_save
from unified_ckpt.plans import SavePlan as FilesPlan
from unified_ckpt.saving import publish_written, write_rank
from unified_ckpt.saving.commit import Staging, clean_leftovers, write_pieces
from unified_ckpt.state import encode_value


@dataclass(frozen=True, slots=True)
class _Orders:
    """What the coordinator tells a rank: which bytes of which files are its own."""

    files: FilesPlan
    folder: Path
    rank: int


class UnifiedStorageWriter(StorageWriter):
    """A DCP storage writer; the coordinator makes the hidden directory and publishes it.

    Args:
        checkpoint_id: the directory, on a file system that all ranks share; None if `dcp.save` is
            given it.
        prefixes: prefix of DCP's flat names -> part; default `model.`, `optimizer.` and others.
        max_shard_bytes: most bytes of tensors in one file, unless one tensor is larger.
        overwrite: whether a checkpoint of that name may be replaced; the default of torch's writer.
        one_at_a_time: ask the planner for each tensor when it is written, and forget it then: for
            planners that make or read tensors when they are asked.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        prefixes: Mapping[str, str] | None = None,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        overwrite: bool = True,
        one_at_a_time: bool = False,
    ) -> None:
        self._target = None if checkpoint_id is None else _real_path(checkpoint_id)
        self._prefixes = Prefixes() if prefixes is None else Prefixes(prefixes)
        self._max_shard_bytes = max_shard_bytes
        self._staging: Staging | None = None
        self._close: Callable[[], object] = _nothing  # removes what the hidden directory holds
        self._overwrite = overwrite
        self._one_at_a_time = one_at_a_time
        self._files: FilesPlan | None = None
        self._names: dict[str, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id is not None:
            self._target = _real_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remove what a failed save left, and check what DCP was asked for."""
        self._discard()  # DCP does not call reset() when it is given no checkpoint_id
        if not kwargs.get("use_collectives", True):
            raise CheckpointValueError(
                "UnifiedStorageWriter needs use_collectives=True: one rank publishes what all wrote"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the files and make the hidden directory; on the coordinator."""
        if self._target is None:
            raise CheckpointValueError("no checkpoint_id; give it to the writer or to dcp.save")
        if not all(plan.usable for plan in plans):
            raise CheckpointValueError("UnifiedStorageWriter: enable_plan_caching is not supported")
        if not self._overwrite and (self._target / MANIFEST_NAME).exists():
            raise CheckpointValueError(
                f"Checkpoint already exists: {self._target}; name another one, or allow "
                "overwrite=True"
            )
        self._names = {
            item.index.fqn: self._prefixes.split(item.index.fqn)
            for plan in plans
            for item in plan.items
            if item.tensor_data is not None
        }
        self._check_names()
        held = [self._held(plan.items) for plan in plans]
        self._files = plan_save(held, max_shard_bytes=self._max_shard_bytes)
        if _OPEN:  # writers of failed saves, which their exceptions keep alive in cycles
            gc.collect()
        clean_leftovers(self._target.parent)
        self._staging = Staging.make(self._target)
        # DCP tells a writer nothing when a rank fails, and most writers serve one save only.
        self._close = weakref.finalize(self, _close_own, self._staging, os.getpid())
        _OPEN.add(self)
        folder = self._staging.folder
        return [
            replace(plan, storage_data=_Orders(self._files, folder, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and fsync this rank's share; a completed future of one result."""
        orders = plan.storage_data
        check_type("storage_data of the plan", orders, _Orders)
        tensors: dict[str, list[WriteItem]] = {}  # as `_held` counts them
        objects: dict[str, Any] = {}
        for item in plan.items:
            if item.tensor_data is not None:
                tensors.setdefault(self._prefixes.split(item.index.fqn)[0], []).append(item)
            else:
                objects[item.index.fqn] = _object_json(item, planner)
        if self._one_at_a_time:
            one = _OneAtATime(tensors, planner)
            written = write_pieces(
                orders.files, one.bytes_of, rank=orders.rank, folder=orders.folder
            )
            if orders.rank:  # the first one does it when it publishes
                sync_tree(orders.folder)
        else:
            parts = {
                part: [_shard_of(item, self._prefixes, planner) for item in items]
                for part, items in tensors.items()
            }
            written = write_rank(orders.files, parts, {}, rank=orders.rank, folder=orders.folder)
        future: Future[list[WriteResult]] = Future()
        result = WriteResult(
            index=MetadataIndex(f"rank {orders.rank}"),
            size_in_bytes=orders.files.rank_bytes[orders.rank],
            storage_data={"written": encode_records(written), "objects": objects},
        )
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and publish; on the coordinator, after all ranks have written."""
        if self._staging is None or self._files is None:
            raise CheckpointValueError("finish() was called without prepare_global_plan()")
        reports = [result.storage_data for rank in results for result in rank]
        record = DcpRecord(
            names=self._names,
            objects={
                name: value for report in reports for name, value in report["objects"].items()
            },
            paths={name: list(path) for name, path in (metadata.planner_data or {}).items()},
        )
        blobs = {**self._files.indexes, DCP_NAME: record.to_bytes()}
        written = [report["written"] for report in reports]
        try:
            publish_written(self._staging, self._files, written, blobs)
        finally:
            self._discard()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a directory of a mounted file system."""
        return "://" not in str(checkpoint_id)

    def _check_names(self) -> None:
        """Refuse two names that become one key."""
        first: dict[tuple[str, str], str] = {}
        for name, (part, key) in self._names.items():
            other = first.setdefault((part, key), name)
            if other != name:
                raise CheckpointValueError(
                    f"prefixes {dict(self._prefixes.part_of)} give two of the names one key: "
                    f"{other!r} and {name!r} are {key!r} of part {part!r}; give other prefixes"
                )

    def _held(self, items: Sequence[WriteItem]) -> dict[str, list[BoxMeta]]:
        held: dict[str, list[BoxMeta]] = {}
        for item in items:
            if item.tensor_data is not None:
                part, _ = self._prefixes.split(item.index.fqn)
                held.setdefault(part, []).append(_meta_of(item, self._prefixes))
        return held

    def _discard(self) -> None:
        self._close()
        self._staging = None
        _OPEN.discard(self)


_OPEN: weakref.WeakSet[UnifiedStorageWriter] = weakref.WeakSet()


def _nothing() -> None:
    """Stand for a hidden directory that is not there yet; a writer can be sent to a process."""


def _real_path(checkpoint_id: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(as_path("checkpoint_id", checkpoint_id)))


def _close_own(staging: Staging, process: int) -> None:
    """Close a staging in the process that made it, not in one that was forked from it."""
    if os.getpid() == process:
        staging.close()


class _OneAtATime:
    """Makes the bytes of pieces from tensors that a planner gives one after the other."""

    def __init__(self, items: Mapping[str, Sequence[WriteItem]], planner: SavePlanner) -> None:
        self._items = items
        self._planner = planner
        self._of: tuple[str, int] | None = None
        self._tensor: torch.Tensor | None = None

    def bytes_of(self, file: FilePlan, piece: Piece) -> memoryview:
        """Return the row-major bytes of a piece; those of one tensor follow each other."""
        if self._tensor is None or self._of != (file.part, piece.shard_index):
            self._tensor = None  # before the next takes memory
            self._of = (file.part, piece.shard_index)
            self._tensor = _tensor_of(self._items[file.part][piece.shard_index], self._planner)
        box = narrow_box(self._tensor, piece.offset, piece.shape)
        return byte_view(bits_of(contiguous_on_cpu(box)))


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data: Any = planner.resolve_data(item)
    check_type(item.index.fqn, data, torch.Tensor)
    tensor: torch.Tensor = data.detach()
    return tensor


def _shard_of(item: WriteItem, prefixes: Prefixes, planner: SavePlanner) -> Shard:
    meta = _meta_of(item, prefixes)
    return Shard(key=meta.key, tensor=_tensor_of(item, planner), box=meta.box)


def _meta_of(item: WriteItem, prefixes: Prefixes) -> BoxMeta:
    """Return the box of a tensor item, under its key in its part."""
    data = item.tensor_data
    if data is None:
        raise CheckpointTypeError(f"{item.index.fqn!r} is no tensor")
    try:
        dtype = stored_dtype(data.properties.dtype)
    except CheckpointTypeError as error:
        raise CheckpointTypeError(f"{item.index.fqn!r}: {error}") from error
    return BoxMeta(
        prefixes.split(item.index.fqn)[1],
        dtype.name,
        Box(data.size, data.chunk.offsets, data.chunk.sizes),
    )


def _object_json(item: WriteItem, planner: SavePlanner) -> Any:
    """Return a Python object, which DCP's planner serialised in this process, as JSON types."""
    data: Any = planner.resolve_data(item)
    data.seek(0)
    return encode_value(torch.load(data, weights_only=False), item.index.fqn)
