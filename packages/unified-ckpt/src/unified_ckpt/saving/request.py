"""What one rank asks a save for, what all ranks must know of it, and the plan that follows.

A request is described as JSON types, without contents; every rank gets every description and makes
the same plan of them, or finds the same mistake in them, before anything is written.

    request = make_request({"model": model}, checkpoint_id="run/checkpoint-10")
    plan = plan_request([request.describe()])
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.geometry import BoxMeta, Shard
from unified_ckpt.options import MASTER_WEIGHTS, MODEL, OPTIMIZER, SaveOptions, base_key
from unified_ckpt.plans import SavePlan, plan_save
from unified_ckpt.state import (
    FlatState,
    StateDict,
    Structures,
    encode_value,
    flatten_state,
)
from unified_ckpt.state.compression import compress_moments
from unified_ckpt.state.optimizer import merge_groups

STATE_NAME = "unified_ckpt.json"
_EMPTY: tuple[Any, ...] = (
    [],
    {},
    encode_value((), ""),
)  # what a rank without a part's tensors has in its place
STATE_VERSION = 3  # since then values say their types, and structures are stored
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

    def describe(self) -> dict[str, Any]:
        """Check the request as far as one rank can, and return it without contents."""
        return {
            "target": str(self.target),
            "one_writer": isinstance(self.target, Location),
            "options": self.options.to_json(),
            "parts": _describe_parts(self.parts),
            "files": _describe_blobs(self.files) + _describe_blobs(self.rank_files),
            "values": self.values,
            "structure": self.structure,
            "stateless": self.stateless,
            "flat_keys": {part: sorted(keys) for part, keys in self.flat_keys.items()},
            "aliases": {part: sorted(keys) for part, keys in self.aliases.items()},
        }


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


def _describe_parts(parts: Mapping[str, Sequence[Shard]]) -> dict[str, list[list[Any]]]:
    """Check the names of this rank's parts and return their boxes as JSON types."""
    for part in parts:
        if not _PART.match(part):
            raise CheckpointValueError(f"part {part!r} must be of lower-case letters, digits and _")
    return {part: [shard.meta.to_json() for shard in shards] for part, shards in parts.items()}


def _describe_blobs(blobs: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """Check the names and types of this rank's whole files and return their sizes."""
    for name, blob in blobs.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
            raise CheckpointValueError(f"file name {name!r} must be a plain relative path")
        check_type(f"file {name!r}", blob, bytes)
    return [(name, len(blob)) for name, blob in blobs.items()]


def plan_request(described: Sequence[Mapping[str, Any]]) -> SavePlan:
    """Plan from every rank's description; the same on every rank."""
    for name in ("target", "options"):
        values = [rank[name] for rank in described]
        if any(value != values[0] for value in values):
            raise CheckpointValueError(
                f"ranks disagree about {name}: {values}; pass the same on all"
            )
    options = described[0]["options"]
    held = [
        {part: [BoxMeta.from_json(box) for box in boxes] for part, boxes in rank["parts"].items()}
        for rank in described
    ]
    plan = plan_save(
        held,
        max_shard_bytes=options["max_shard_bytes"],
        kept_sharded=_kept_sharded(described, held, options),
        excluded=_excluded(held) if options["skip_save_model_weight"] else None,
    )
    _check_aliases(described, held, options["tied"])
    state_file = {STATE_NAME} if state_file_bytes(described) else set()
    names = [MANIFEST_NAME, *state_file, *(file.name for file in plan.files), *plan.index_names]
    names += [name for rank in described for name, _ in rank["files"]]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise CheckpointValueError(f"several would write {twice}; use different names")
    return plan


Held = Sequence[Mapping[str, Sequence[BoxMeta]]]


def _kept_sharded(
    described: Sequence[Mapping[str, Any]], held: Held, options: Mapping[str, Any]
) -> dict[str, set[str]]:
    """Return the tensors, by part, whose boxes become stored tensors of their own."""
    kept_sharded: dict[str, set[str]] = {}
    one_writer = described[0]["one_writer"]
    parts = sorted({part for rank in held for part in rank})
    for part in parts if one_writer else (OPTIMIZER, MASTER_WEIGHTS):
        keys: set[str] = set()
        if one_writer or options["ignore_merge_optimizer"]:
            keys = {meta.key for rank in held for meta in rank.get(part, ())}
        elif not options["gather_split_param"]:
            keys = {key for rank in described for key in rank["flat_keys"].get(part, ())}
        kept_sharded[part] = keys
    return kept_sharded


def _excluded(held: Held) -> dict[str, set[str]]:
    """Return the model's tensors that the master weights hold too."""
    boxes = [(meta.key, meta.box) for rank in held for meta in rank.get(MASTER_WEIGHTS, ())]
    shapes = {key: box.global_shape for key, box in boxes}
    excluded = set()
    for meta in (meta for rank in held for meta in rank.get(MODEL, ())):
        if meta.key in shapes:
            shape = meta.box.global_shape
            if shapes[meta.key] != shape:
                raise CheckpointValueError(
                    f"skip_save_model_weight: {meta.key!r} is {shape} in 'model', "
                    f"but {shapes[meta.key]} in 'master_weights'"
                )
            excluded.add(meta.key)
    return {MODEL: excluded}


def _check_aliases(
    described: Sequence[Mapping[str, Any]], held: Held, tied: Mapping[str, str]
) -> None:
    for part in {part for rank in described for part in rank["aliases"]}:
        keys = {meta.key for rank in held for meta in rank.get(part, ())}
        stored = keys | {key.partition("@")[0] for key in keys}  # boxes apart, too
        for alias in {key for rank in described for key in rank["aliases"].get(part, ())}:
            parameter, slash, state = alias.partition("/")
            if f"{tied[parameter]}{slash}{state}" not in stored:
                raise CheckpointValueError(
                    f"{part} {alias!r} is tied to {tied[parameter]!r}, which no rank holds; name "
                    "the key that is stored"
                )


def state_file_bytes(described: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the contents of `unified_ckpt.json`, empty if there is nothing to say."""
    held, merged = merge_groups([description["values"] for description in described])
    rank_of: dict[str, int] = {}
    for rank, values in enumerate(held):
        for path, value in values.items():
            if path in merged and not _same(merged[path], value):
                raise CheckpointValueError(
                    f"{path!r} is {merged[path]!r} on rank {rank_of[path]}, {value!r} on rank "
                    f"{rank}; values must be equal, or go into rank_files"
                )
            merged.setdefault(path, value)
            rank_of.setdefault(path, rank)
    parts = {part for rank in described for part, boxes in rank["parts"].items() if boxes}
    stateless = {
        part: sorted({key for rank in described for key in rank["stateless"].get(part, ())})
        for part in sorted(parts)
    }
    options = described[0]["options"]
    content: dict[str, Any] = {
        "values": {
            path: value
            for path, value in sorted(merged.items())
            if path not in parts or value not in _EMPTY
        },
        "structure": Structures.merge([rank["structure"] for rank in described]),
        "stateless": {part: keys for part, keys in stateless.items() if keys},
        "tied": options["tied"] if any(rank["aliases"] for rank in described) else {},
        "skip_save_model_weight": options["skip_save_model_weight"],
    }
    content = {name: value for name, value in content.items() if value}
    if not content:
        return b""
    table = {"version": STATE_VERSION, **content}
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def _same(a: object, b: object) -> bool:
    """Whether two values have the same JSON, so that NaN equals itself and 1 differs from 1.0."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def blob_bytes(described: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of all whole files of all ranks."""
    given: int = sum(num_bytes for rank in described for _, num_bytes in rank["files"])
    return given + len(state_file_bytes(described))
