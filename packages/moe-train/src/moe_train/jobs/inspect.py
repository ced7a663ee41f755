"""What a checkpoint holds, in words: `moe-train inspect DIR`."""

import math
from collections import defaultdict
from pathlib import Path

from moe_train.checkpoint import has_part, read_state, small_files
from moe_train.jobs.samples import checkpoint_folder
from moe_train.layout import read_decoder
from moe_train.model import DecoderConfig
from unified_ckpt import read_index
from unified_ckpt.files.storage import Location
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint

_PARTS = ("model", "optimizer", "master_weights")


def describe_checkpoint(path: Path | str) -> str:
    """A summary of a checkpoint, or of the newest one of a run: a folder, or a URL of a store.

    Raises:
        ValueError: there is no checkpoint.
    """
    folder = checkpoint_folder(path)
    with small_files(folder, ("config.json",)) as local:
        lines = [str(folder), *_describe_model(read_decoder(local, folder))]
    names = read_checkpoint(folder, _names_at_top)
    if "trainer_state.json" in names:
        state = read_state(folder)
        lines.append(
            f"training    step {state.step}, {state.consumed_samples} samples of "
            f"{state.sequence_length} tokens, seed {state.seed}, data {state.data_fingerprint[:12]}"
        )
    for part in _PARTS:
        if has_part(folder, part):
            lines.extend(_describe_part(folder, part))
    others = [name for name in names if not name.endswith(".safetensors")]
    lines.append(f"files       {', '.join(others)}")
    return "\n".join(lines)


def _names_at_top(checkpoint: Checkpoint) -> list[str]:
    return sorted(checkpoint.opened.listed())


def _describe_model(config: DecoderConfig) -> list[str]:
    sparse = sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    return [
        f"model       {config.model_type}: {config.num_hidden_layers} layers ({sparse} with "
        f"experts), hidden {config.hidden_size}, vocabulary {config.vocab_size}",
        f"experts     {config.num_experts} of width {config.moe.moe_intermediate_size}, "
        f"{config.moe.num_experts_per_tok} per token",
    ]


def _describe_part(folder: Path | Location, part: str) -> list[str]:
    index = read_index(folder, part)
    sizes: dict[str, int] = defaultdict(int)
    for entry in index.values():
        sizes[str(entry.dtype)] += math.prod(entry.shape or ())
    elements = sum(sizes.values())
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(sizes.items()))
    files = len({entry.file for entry in index.values()})
    return [f"{part:<11} {len(index)} tensors, {elements:,} elements ({dtypes}), {files} file(s)"]
