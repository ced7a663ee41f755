"""What one rank asks a save for, and what all ranks must know of it.

A request is described without contents, in three parts: a summary, which every rank gets of every
other; the layout, from which the plan follows; and the state beside tensors. Of those two the ranks
tell each other the digests first, since most of them are equal or known (see `described`).

    request = make_request({"model": model}, checkpoint_id="run/checkpoint-10")
    description = request.describe()
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.geometry import Shard
from unified_ckpt.node import node_name
from unified_ckpt.options import MASTER_WEIGHTS, OPTIMIZER, SaveOptions, base_key
from unified_ckpt.plans.columns import encode_boxes
from unified_ckpt.state import FlatState, StateDict, encode_value, flatten_state
from unified_ckpt.state.compression import compress_moments

STATE_NAME = "unified_ckpt.json"
STATE_VERSION = 3  # since then values say their types, and structures are stored
_BOX = r"@\d+:\d+(?:,\d+:\d+)*"
_OF_A_BOX = re.compile(rf"(?:/scale{_BOX}|{_BOX}@\d+(?:,\d+)*)\Z")  # see `PartIndex`
_PART = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one rank asks for: shards in boxes, values and structures by path, whole files.

    `stateless` are the keys of parameters, by part, of which an optimizer has no state.
    """

    target: Path | Location
    options: SaveOptions
    parts: Mapping[str, Sequence[Shard]]
    values: Mapping[str, Any]
    structure: Mapping[str, Any]
    stateless: Mapping[str, Sequence[str]]
    flat_keys: Mapping[str, set[str]]
    aliases: Mapping[str, set[str]]
    files: Mapping[str, bytes]
    rank_files: Mapping[str, bytes]

    def describe(self) -> "Description":
        """Check the request as far as one rank can, and return it without contents."""
        for part in self.parts:
            if not _PART.match(part):
                raise CheckpointValueError(
                    f"part {part!r} must be of lower-case letters, digits and _"
                )
        head = {
            "options": self.options.to_json(),
            "one_writer": isinstance(self.target, Location),
            "flat_keys": {part: sorted(keys) for part, keys in self.flat_keys.items()},
            "aliases": {part: sorted(keys) for part, keys in self.aliases.items()},
        }
        boxes = encode_boxes({part: [s.meta for s in held] for part, held in self.parts.items()})
        state = {
            "values": self.values,
            "structure": self.structure,
            "stateless": self.stateless,
            "parts": [part for part, held in self.parts.items() if held],
        }
        return Description(
            target=str(self.target),
            node=node_name(),
            files=_describe_blobs(self.files) + _describe_blobs(self.rank_files),
            layout=_json(head) + b"\n" + boxes,
            state=_json(state),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A request without contents.

    Attributes:
        target: the checkpoint.
        node: the machine of this rank.
        files: names and bytes of whole files.
        layout: a line of JSON, then the boxes (`encode_boxes`).
        state: JSON.
    """

    target: str
    node: str
    files: Sequence[tuple[str, int]]
    layout: bytes
    state: bytes

    def summary(self, known: Sequence[str]) -> dict[str, Any]:
        """Return what every rank is told, as JSON types; `known` are plans of this one."""
        return {
            "target": self.target,
            "node": self.node,
            "files": self.files,
            "layout": hashlib.sha256(self.layout).hexdigest(),
            "state": hashlib.sha256(self.state).hexdigest(),
            "known": list(known),
        }


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def make_request(
    state_dict: StateDict,
    *,
    checkpoint_id: Path | str | Location,
    options: SaveOptions | None = None,
    files: Mapping[str, bytes] | None = None,
    rank_files: Mapping[str, bytes] | None = None,
) -> Request:
    """Take a state dict apart and apply the options that one rank can apply alone.

    Raises:
        CheckpointTypeError: no load could make a leaf again.
        CheckpointValueError: a tensor does not fit its box, or cannot be compressed.
    """
    options = options or SaveOptions()
    flat = flatten_state(state_dict, layout=options.layout, ignored_keys=options.ignored_keys)
    for key in (shard.key for shards in flat.parts.values() for shard in shards):
        if "@" in key and _OF_A_BOX.search(key):
            raise CheckpointValueError(
                f"key {key!r} has the form in which boxes of a tensor are stored; name it otherwise"
            )
    parts, aliases = _without_aliases(flat, options.tied)
    if options.remove_master_weight:
        parts.pop(MASTER_WEIGHTS, None)
    if options.moment_compression == "int8" and OPTIMIZER in parts:
        parts[OPTIMIZER] = compress_moments(parts[OPTIMIZER])
    return Request(
        target=_target(checkpoint_id),
        options=options,
        parts=parts,
        values={
            path: encode_value(slot.get(), path)
            for path, slot in {**flat.empty, **flat.values}.items()
        },
        structure=flat.structure,
        stateless={
            part: [key for key, has_state in keys.items() if not has_state]
            for part, keys in flat.optimized.items()
        },
        flat_keys=flat.flat_keys,
        aliases=aliases,
        files=files or {},
        rank_files=rank_files or {},
    )


def _target(checkpoint_id: Path | str | Location) -> Path | Location:
    target = as_target("checkpoint_id", checkpoint_id)
    if isinstance(target, Location):
        return target
    target = Path(os.path.realpath(target))
    if not target.name:
        raise CheckpointValueError(f"checkpoint_id={str(checkpoint_id)!r} has no last name to give")
    return target


def _without_aliases(
    flat: FlatState, tied: Mapping[str, str]
) -> tuple[dict[str, Sequence[Shard]], dict[str, set[str]]]:
    """Exclude tensors that are stored under another key; return those keys by part."""
    if not tied:
        return dict(flat.parts), {}
    parts: dict[str, Sequence[Shard]] = {}
    aliases: dict[str, set[str]] = {}
    for part, shards in flat.parts.items():
        parts[part] = [shard for shard in shards if base_key(shard.key) not in tied]
        excluded = {shard.key for shard in shards if base_key(shard.key) in tied}
        if excluded:
            aliases[part] = excluded
    return parts, aliases


def _describe_blobs(blobs: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """Check the names and types of this rank's whole files and return their sizes."""
    for name, blob in blobs.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
            raise CheckpointValueError(f"file name {name!r} must be a plain relative path")
        check_type(f"file {name!r}", blob, bytes)
    return [(name, len(blob)) for name, blob in blobs.items()]
