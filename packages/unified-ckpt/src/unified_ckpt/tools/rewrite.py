"""Write a checkpoint again with its tensors divided into other files, in bounded memory.

One process writes what all ranks of a planned save would, file by file, and reads each piece (at
most 16 MiB) when it is written; files that hold no tensors are copied whole, one at a time. The
result is committed like any save, and verified while it is read.

    reshard("run/checkpoint-10", "run/resharded", degrees)  # see `reshard`
    export_model("run/checkpoint-10", "model")  # what transformers reads
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from unified_ckpt.errors import CheckpointValueError, LoadError
from unified_ckpt.files.format.tables import join_records
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.geometry import Box, BoxMeta, Shape, chunk_range
from unified_ckpt.geometry.layouts import ParallelDegrees, ParameterRule, rank_box
from unified_ckpt.geometry.tensors import byte_view
from unified_ckpt.options import MASTER_WEIGHTS
from unified_ckpt.plans import FilePlan, Piece, SavePlan, plan_save
from unified_ckpt.plans.checkpoint import Checkpoint
from unified_ckpt.saving import STATE_NAME
from unified_ckpt.saving.commit import (
    Draft,
    Staging,
    clean_leftovers,
    write_blobs,
    write_pieces,
)
from unified_ckpt.tools.box_reader import BoxReader
from unified_ckpt.tools.diff import other_files

RuleOf = Callable[[str, Shape], ParameterRule]
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.")
_COLUMNS = re.compile(r"\b(q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens|lm_head)\b")
_ROWS = re.compile(r"\b(o_proj|down_proj)\.weight\b")
_FUSED = re.compile(r"\bexperts\.\w+\Z")
# What transformers looks for beside the weights.
_MODEL_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


def rule_by_name(key: str, shape: Shape) -> ParameterRule:
    """Say how a tensor is divided, from the names that transformers gives to layers.

    Query, key, value, gate and up projections, embeddings and the output layer are cut along dim 0
    by tp; output and down projections along dim 1; `experts.N.` and fused `experts.NAME` belong to
    ep, the former are cut by etp like dense layers; all else is replicated. An optimizer's
    `KEY/moment1` is divided like `KEY`.
    """
    name = key.partition("/")[0]
    expert = _EXPERT.match(name) is not None
    tp_dim = None
    if _FUSED.search(name) and len(shape) == 3:
        return ParameterRule(expert=True)
    if _COLUMNS.search(name):
        tp_dim = 0
    elif _ROWS.search(name):
        tp_dim = 1
    return ParameterRule(
        expert=expert, tp_dim=tp_dim if tp_dim is None or tp_dim < len(shape) else None
    )


def reshard(
    source: Path | str | Location,
    target: Path | str | Location,
    degrees: ParallelDegrees,
    rule_of: RuleOf = rule_by_name,
) -> Path | Location:
    """Write a checkpoint so that every box that a rank of a layout reads is one range of a file.

    A tensor that the layout gives to one rank stands in a file of that rank. One that is cut along
    dim 0 stays whole, and each rank's rows are one range of it. One that is cut along another dim
    is stored as one tensor per box, `KEY@BOX@SHAPE`, which `load` puts together again under any
    layout but transformers does not; resharding to tp=1 or `export_model` makes it whole. Other
    files are copied. Not collective; one process.

    Args:
        source: a checkpoint, or a transformers directory; here or in a store.
        target: the directory to write, or a checkpoint in a store, as for `save`; an older one
            there is replaced at the end.
        degrees: the layout; only tp, ep and etp decide which ranges are read.
        rule_of: how a tensor is divided, from its key and shape.

    Raises:
        LoadError: the source cannot be read, or is damaged.
        CheckpointValueError: the target exists and is no checkpoint.
    """
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(source))
        parts = checkpoint.parts()
        if not parts:
            raise LoadError(f"{checkpoint.folder} holds no safetensors part")
        readers = {part: stack.enter_context(BoxReader(checkpoint, part)) for part in parts}
        held: list[dict[str, list[BoxMeta]]] = [{} for _ in range(degrees.world_size)]
        kept_sharded: dict[str, set[str]] = {}
        for part, reader in readers.items():
            kept_sharded[part] = _hold(part, reader, degrees, rule_of, held)
        plan = plan_save(held, kept_sharded=kept_sharded)
        others = other_files(checkpoint)
        if _are_one_place(source, target):  # files of others stay by themselves
            others &= checkpoint.names()
        return _write(plan, held, lambda part, _: readers[part], target, checkpoint, others)


def export_model(
    source: Path | str | Location, target: Path | str | Location, *, part: str = "model"
) -> Path | Location:
    """Write the weights alone, whole tensors, with the files that transformers reads.

    Source and target as for `reshard`. Not collective; one process.

    Args:
        part: whose tensors become the weights: `model`, or its moving average `ema`, or
            `master_weights`. What that part lacks (frozen weights, buffers) comes from `model`, and
            what that lacks by `skip_save_model_weight` from `master_weights`, in their dtype.

    Raises:
        LoadError: the source cannot be read, is damaged, or has no such part.
        CheckpointValueError: the target is the source, or exists and is no checkpoint; or the part
            has tensors that `model` lacks, as the moments of an optimizer are.
    """
    _check_apart(source, target)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(source))
        about = json.loads(checkpoint.read_file(STATE_NAME)) if checkpoint.holds(STATE_NAME) else {}
        first = [MASTER_WEIGHTS] if about.get("skip_save_model_weight") else []
        parts = [*first, "model", *({part} - {"model"})]
        readers = [stack.enter_context(BoxReader(checkpoint, name)) for name in parts]
        known = {key for reader in readers[: parts.index("model") + 1] for key in reader.tensors}
        if strange := sorted(readers[-1].tensors.keys() - known):
            raise CheckpointValueError(
                f"part {part!r} of {checkpoint.folder} holds no weights: {strange[0]!r} is no "
                "tensor of the model; export model, ema or master_weights"
            )
        # Of parts that hold a tensor the last one gives it.
        sources = {key: reader for reader in readers for key in reader.tensors}
        metas = [_whole(key, sources[key]) for key in sorted(sources)]
        held = [{"model": metas}]
        names = other_files(checkpoint) & _MODEL_FILES
        plan = plan_save(held)
        return _write(plan, held, lambda _, key: sources[key], target, checkpoint, names)


def _check_apart(source: Path | str | Location, target: Path | str | Location) -> None:
    """Refuse to put the weights alone in the place of the checkpoint that they come from."""
    if _are_one_place(source, target):
        raise CheckpointValueError(
            f"target={str(target)!r} is the source, whose optimizer and other parts would be gone; "
            "choose another directory for the weights"
        )


def _are_one_place(source: Path | str | Location, target: Path | str | Location) -> bool:
    places = []
    for name, given in (("source", source), ("target", target)):
        place = as_target(name, given)
        on_disk = place.on_disk if isinstance(place, Location) else place
        places.append(str(place) if on_disk is None else os.path.realpath(on_disk))
    return places[0] == places[1]


def _hold(
    part: str,
    reader: BoxReader,
    degrees: ParallelDegrees,
    rule_of: RuleOf,
    held: Sequence[dict[str, list[BoxMeta]]],
) -> set[str]:
    """Give every rank its boxes of a part; return the keys that are kept sharded."""
    experts = _expert_counts(reader.tensors)
    kept_sharded = set()
    for rank_held in held:
        rank_held[part] = []
    for key in sorted(reader.tensors):
        shape = reader.shape(key)
        rule = ParameterRule() if "@" in key else rule_of(key, shape)
        if rule.tp_dim not in (None, 0):
            kept_sharded.add(key)
        for rank, rank_held in enumerate(held):
            box = _box_of(key, rule, shape, rank, degrees, experts)
            if box is not None:
                rank_held[part].append(_meta(key, reader, box))
    return kept_sharded


def _box_of(
    key: str,
    rule: ParameterRule,
    shape: Shape,
    rank: int,
    degrees: ParallelDegrees,
    experts: Mapping[str, int],
) -> Box | None:
    match = _EXPERT.match(key)
    if not rule.expert or match is None:
        return rank_box(rule, shape, rank=rank, degrees=degrees)
    place = degrees.coordinates(rank, expert=True)
    begin, length = chunk_range(experts[match[1]], num=degrees.ep, index=place["ep"])
    if not begin <= int(match[2]) < begin + length:
        return None
    box = Box.whole(shape)
    if rule.tp_dim is None:
        return box
    return box.chunk(rule.tp_dim, num=degrees.etp, index=place["etp"])


def _expert_counts(keys: Collection[str]) -> dict[str, int]:
    """Count the experts of every layer: by the text before the number, the highest number + 1."""
    counts: dict[str, int] = defaultdict(int)
    for key in keys:
        match = _EXPERT.match(key)
        if match is not None:
            counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
    return counts


def _whole(key: str, reader: BoxReader) -> BoxMeta:
    return _meta(key, reader, Box.whole(reader.shape(key)))


def _meta(key: str, reader: BoxReader, box: Box) -> BoxMeta:
    return BoxMeta(key, reader.tensors[key].dtype, box)


def _write(
    plan: SavePlan,
    held: Sequence[Mapping[str, Sequence[BoxMeta]]],
    reader_of: Callable[[str, str], BoxReader],  # of a part and key
    target: Path | str | Location,
    source: Checkpoint,
    names: Collection[str],
) -> Path | Location:
    def bytes_of(file: FilePlan, piece: Piece) -> memoryview:
        meta = held[piece.rank][file.part][piece.shard_index]
        offset = tuple(a + b for a, b in zip(meta.box.offset, piece.offset, strict=True))
        reader = reader_of(file.part, meta.key)
        return byte_view(reader.read(meta.key, offset, piece.shape))

    target = as_target("target", target)
    staging: Staging | Draft
    if isinstance(target, Location):
        staging = Draft.make(target)
    else:
        place = Path(os.path.realpath(target))  # what a link names is replaced, not the link
        clean_leftovers(place.parent)
        staging = Staging.make(place)
    try:
        records = [write_pieces(plan, bytes_of, rank=None, folder=staging.folder)]
        records.append(write_blobs(plan.indexes, staging.folder))
        for name in sorted(names):
            records.append(write_blobs({name: source.read_file(name)}, staging.folder))
        staging.commit(join_records(records), plan.weight_maps)
    finally:
        staging.close()
    return target
