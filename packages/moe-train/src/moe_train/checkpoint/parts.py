"""The parts of a checkpoint as a rank reads them: which there are, their keys, and their tensors.

if has_part(source, "master_weights"):
    read_part(source, "master_weights", [stored], cast=True)
"""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from moe_train.layout import StoredTensors
from unified_ckpt import LoadOptions, load
from unified_ckpt.files.storage import Location
from unified_ckpt.loading import PartIndex
from unified_ckpt.plans.checkpoint import read_checkpoint

# Copies of embedding and head for multi-token prediction, and tables that are computed.
_NEVER_READ = (
    r"layers\.\d+\.(embed_tokens|shared_head\.head)\.weight\Z",
    r"rotary_emb\.inv_freq\Z",
)


def read_part(
    source: Path | Location, part: str, stored: Sequence[StoredTensors], *, cast: bool = False
) -> None:
    """Fill this rank's tensors from one part of a checkpoint.

    Args:
        cast: convert what is stored in another dtype instead of refusing it.

    Raises:
        ValueError: a key, shape or dtype differs; the message names it.
    """
    shards = [shard for tensors in stored for shard in tensors.shards]
    load(shards, checkpoint_id=source, part=part, cast=cast)
    for tensors in stored:
        tensors.write_back()


def read_model(source: Path, stored: StoredTensors, others: Sequence[str]) -> tuple[str, ...]:
    """As `read_part` of the model, cast; return the keys of tensors that no rank has. Collective.

    Args:
        others: regular expressions of keys that are no tensors of `stored`, and known.
    """
    together = dist.is_initialized() and dist.get_world_size() > 1
    options = LoadOptions(
        group=dist.group.WORLD if together else None, ignored_keys=(*_NEVER_READ, *others)
    )
    parts = {"model": list(stored.shards)}
    report = load(parts, checkpoint_id=source, cast=True, options=options)
    stored.write_back()
    return report.unused


def has_part(source: Path | Location, part: str) -> bool:
    """Whether the checkpoint holds tensors of `part`.

    Raises:
        CheckpointError: it does, and they are damaged; that is not the same as having none.
    """
    return read_checkpoint(source, lambda it: part in it.parts() and bool(it.tensors(part)))


def tensor_keys(source: Path | Location, part: str) -> set[str]:
    """The keys of all tensors of a part, those that are stored in boxes included."""
    return read_checkpoint(source, lambda it: PartIndex(it, part).tensor_keys())
