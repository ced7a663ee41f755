"""What the trainer asks of the saver process about one snapshot, as bytes beside the tensors.

The request stands in the staging buffer after the tensors, so that the message through the socket
is short whatever the number of tensors and files. It is JSON and the files' bytes.

    snapshot = SnapshotRequest.of({"model": model}, checkpoint_id="run/checkpoint-10")
    encoded = encode_request(snapshot, layout_json, base=layout.num_bytes)
    snapshot, layout_json = decode_request(memory, encoded.head)
    snapshot.save_request(layout.shards(memory))  # what `save_request` of `saving` takes
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unified_ckpt.errors import check_type
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.geometry import Shard
from unified_ckpt.options import OPTIMIZER, SaveOptions
from unified_ckpt.saving import Request, make_request
from unified_ckpt.state import StateDict
from unified_ckpt.state.compression import compress_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """What to do with a snapshot.

    Attributes:
        checkpoint_id: the checkpoint to write, None to write none.
        fields: JSON types: options, and what the state holds beside tensors.
        files: as in `save`.
        rank_files: as in `save`.
        loss: of the step, the same on all ranks; for the moving average.
    """

    checkpoint_id: str | None
    fields: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    rank_files: Mapping[str, bytes] = field(default_factory=dict)
    loss: float | None = None

    @classmethod
    def of(
        cls,
        state_dict: StateDict,
        *,
        checkpoint_id: Path | str | Location | None,
        files: Mapping[str, bytes] | None = None,
        rank_files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
        loss: float | None = None,
    ) -> "tuple[SnapshotRequest, Mapping[str, Sequence[Shard]]]":
        """Take a state dict apart as `save` does; return the request and the shards to be staged.

        Moments are compressed by the saver process, if at all.
        """
        if loss is not None:
            check_type("loss", loss, float, int)
        options = options or SaveOptions()
        request = make_request(
            state_dict,
            checkpoint_id="unused" if checkpoint_id is None else checkpoint_id,
            options=replace(options, moment_compression="none"),
            files=files,
            rank_files=rank_files,
        )
        for name, blob in [*request.files.items(), *request.rank_files.items()]:
            check_type("the name of a file", name, str)
            check_type(f"file {name!r}", blob, bytes)
        if isinstance(request.target, Location):
            as_target("checkpoint_id, which a saver process opens anew,", str(request.target))
        fields = {
            "options": options.to_json(),
            "values": request.values,
            "structure": request.structure,
            "stateless": request.stateless,
            "flat_keys": {part: sorted(keys) for part, keys in request.flat_keys.items()},
            "aliases": {part: sorted(keys) for part, keys in request.aliases.items()},
        }
        snapshot = cls(
            checkpoint_id=None if checkpoint_id is None else str(request.target),
            fields=fields,
            files=request.files,
            rank_files=request.rank_files,
            loss=loss,
        )
        return snapshot, request.parts

    def save_request(self, parts: Mapping[str, Sequence[Shard]]) -> Request:
        """Return what to save, with the staged shards in place of the trainer's."""
        options = SaveOptions(**self.fields["options"])
        parts = dict(parts)
        if options.moment_compression == "int8" and OPTIMIZER in parts:
            parts[OPTIMIZER] = compress_moments(parts[OPTIMIZER])
        return Request(
            target=as_target("checkpoint_id", str(self.checkpoint_id)),
            options=options,
            parts=parts,
            values=self.fields["values"],
            structure=self.fields["structure"],
            stateless=self.fields["stateless"],
            flat_keys={part: set(keys) for part, keys in self.fields["flat_keys"].items()},
            aliases={part: set(keys) for part, keys in self.fields["aliases"].items()},
            files=self.files,
            rank_files=self.rank_files,
        )


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """Bytes to be written from byte `base`; `head` is (begin, length) of the part to read first."""

    base: int
    pieces: tuple[bytes, ...]
    head: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Where the request ends: the size that a buffer must have."""
        return self.head[0] + self.head[1]

    def write(self, memory: memoryview) -> None:
        """Write the request to a buffer of at least that size."""
        at = self.base
        for piece in self.pieces:
            memory[at : at + len(piece)] = piece
            at += len(piece)


def encode_request(request: SnapshotRequest, layout_json: bytes, *, base: int) -> EncodedRequest:
    """Turn a request into bytes that stand at `base` and after."""
    table, pieces, at = [], [layout_json], base + len(layout_json)
    for kind, blobs in (("files", request.files), ("rank_files", request.rank_files)):
        for name, blob in blobs.items():
            table.append((kind, name, at, len(blob)))
            pieces.append(blob)
            at += len(blob)
    head = json.dumps(
        {
            "layout": (base, len(layout_json)),
            "blobs": table,
            "checkpoint_id": request.checkpoint_id,
            "fields": request.fields,
            "loss": request.loss,
        }
    ).encode()
    return EncodedRequest(base, (*pieces, head), (at, len(head)))


def decode_request(memory: memoryview, head: tuple[int, int]) -> tuple[SnapshotRequest, bytes]:
    """Return the request and the layout's JSON that `encode_request` wrote to a buffer."""
    stored = json.loads(_cut(memory, *head))
    blobs: dict[str, dict[str, bytes]] = {"files": {}, "rank_files": {}}
    for kind, name, begin, length in stored["blobs"]:
        blobs[kind][name] = _cut(memory, begin, length)
    request = SnapshotRequest(
        checkpoint_id=stored["checkpoint_id"],
        fields=stored["fields"],
        files=blobs["files"],
        rank_files=blobs["rank_files"],
        loss=stored["loss"],
    )
    return request, _cut(memory, *stored["layout"])


def _cut(memory: memoryview, begin: int, length: int) -> bytes:
    return bytes(memory[begin : begin + length])
