"""Let torch DCP read checkpoints of this package, and plain transformers directories.

DCP asks for boxes of whole stored tensors, which are read straight into its destinations, under any
layout. What DCP wants pickled is pickled in memory from JSON; nothing on disk is unpickled.

    dcp.load(state_dict, storage_reader=UnifiedStorageReader("run/checkpoint-10"))
"""

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    ReplacedCheckpointError,
    as_path,
)
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.loading import (
    DCP_NAME,
    DcpRecord,
    PartIndex,
    Prefixes,
    fill_state,
    read_dcp_record,
    read_values,
)
from unified_ckpt.options import LoadOptions
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint
from unified_ckpt.state import restore_value


class UnifiedStorageReader(StorageReader):
    """A DCP storage reader.

    Args:
        checkpoint_id: a checkpoint or transformers directory; None if `dcp.load` is given it.
        prefixes: prefix of DCP's flat names -> part, for directories that DCP has not written;
            `{"": "model"}` gives the model's tensors their own names.
        verify: compare the pieces that are read whole with their checksums; with `touched` also
            those that are read in part, which are then read once more, whole.
        cast: convert where the stored dtype differs from the destination's.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        prefixes: Mapping[str, str] | None = None,
        verify: bool | Literal["touched"] = True,
        cast: bool = False,
    ) -> None:
        self._folder = None if checkpoint_id is None else as_path("checkpoint_id", checkpoint_id)
        self._prefixes = Prefixes() if prefixes is None else Prefixes(prefixes)
        self._verify = verify
        self._cast = cast
        self._identity = ""  # of the checkpoint whose metadata was read
        self._record: DcpRecord | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        if checkpoint_id is not None:
            self._folder = as_path("checkpoint_id", checkpoint_id)
        self._record = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the directory holds, every tensor as one chunk.

        Raises:
            LoadError: there is no such directory.
            CorruptCheckpointError: an index, a header or `dcp.json` is damaged.
        """
        return read_checkpoint(self._checked_folder(), self._describe)

    def _describe(self, checkpoint: Checkpoint) -> Metadata:
        self._identity = checkpoint.identity
        record = self._read_record(checkpoint)
        indexes = {
            part: PartIndex(checkpoint, part) for part, _ in dict.fromkeys(record.names.values())
        }
        keys: dict[str, list[str]] = {}
        for part, key in record.names.values():
            keys.setdefault(part, []).append(key)
        stored = {part: index.resolve(keys[part]) for part, index in indexes.items()}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, (part, key) in record.names.items():
            if key not in stored[part]:
                raise CorruptCheckpointError(
                    f"{checkpoint.folder}: {DCP_NAME} names {key!r} of part {part!r}, which is not "
                    "stored"
                )
            compressed = bool(indexes[part].scales(key))
            described[name] = _metadata_of(stored[part][key], compressed=compressed)
            self._shapes[name] = tuple(stored[part][key].shape or ())
        described |= {name: BytesStorageMetadata() for name in record.objects}
        return Metadata(
            state_dict_metadata=described,
            planner_data={name: tuple(path) for name, path in record.paths.items()},
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_metadata` runs on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the identity of the checkpoint that it was made of."""
        return replace(plan, storage_data=self._identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are.

        Raises:
            ReplacedCheckpointError: they were made of different checkpoints.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise ReplacedCheckpointError(
                f"{self._folder} was replaced while the ranks opened it; load it again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner names; a completed future.

        Raises:
            LoadError: a tensor has another dtype than its destination.
            ReplacedCheckpointError: it is not the checkpoint any more whose metadata was read.
            CorruptCheckpointError: bytes are missing or differ from their checksum.
        """
        with Checkpoint(self._checked_folder()) as checkpoint:
            if self._identity not in ("", checkpoint.identity):
                raise checkpoint.replaced()
            self._read_items(plan, planner, checkpoint)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner, checkpoint: Checkpoint) -> None:
        record = self._record or self._read_record(checkpoint)
        parts: dict[str, list[Shard]] = {}
        filled = []
        templates = getattr(planner, "state_dict", {})  # DCP's own planners have it, flat
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                pickled = io.BytesIO()
                value = restore_value(record.objects[name], templates.get(name), typed=record.typed)
                torch.save(value, pickled)
                pickled.seek(0)
                planner.load_bytes(item, pickled)
                continue
            part, key = record.names[name]
            target = planner.resolve_tensor(item)
            shape, offset = self._shapes[name], item.storage_offsets
            shard = Shard.of(key, target.detach(), global_shape=shape, offset=offset)
            parts.setdefault(part, []).append(shard)
            filled.append((item, target))
        fill_state(
            parts,
            checkpoint=checkpoint,
            verify=self._verify,
            cast=self._cast,
            options=LoadOptions(),
        )
        for item, target in filled:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a directory of a mounted file system."""
        return "://" not in str(checkpoint_id)

    def _checked_folder(self) -> Path:
        if self._folder is None:
            raise CheckpointValueError("no checkpoint_id; give it to the reader or to dcp.load")
        return self._folder

    def _read_record(self, checkpoint: Checkpoint) -> DcpRecord:
        """Read `dcp.json`, or make a record of a directory that DCP has not written."""
        if checkpoint.holds(DCP_NAME):
            self._record = read_dcp_record(checkpoint)
            return self._record
        names: dict[str, tuple[str, str]] = {}
        parts = checkpoint.parts()
        for prefix, part in self._prefixes.part_of.items():
            if part in parts:
                keys = PartIndex(checkpoint, part).tensor_keys()
                for key in sorted(keys):
                    name = f"{prefix}{key}"
                    if names.setdefault(name, (part, key)) != (part, key):
                        raise CheckpointValueError(
                            f"{checkpoint.folder}: {name!r} is a tensor of part {part!r} and of "
                            f"{names[name][0]!r}; give other prefixes"
                        )
        values = read_values(checkpoint)
        objects = values.leaves()
        if both := sorted(names.keys() & objects.keys()):
            raise CheckpointValueError(
                f"{checkpoint.folder}: {both[0]!r} is a tensor and a value; give another prefix to "
                f"part {names[both[0]][0]!r}"
            )
        paths: dict[str, list[str | int]] = {name: [name] for name in (*names, *objects)}
        self._record = DcpRecord(names, objects, paths, values.typed)
        return self._record


def _metadata_of(stored: StoredTensor | SplitTensor, *, compressed: bool) -> TensorStorageMetadata:
    shape = torch.Size(stored.shape or ())
    dtype = torch.float32 if compressed else dtype_of(stored.dtype).torch_dtype
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype or torch.uint8),
        size=shape,
        chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)],
    )
