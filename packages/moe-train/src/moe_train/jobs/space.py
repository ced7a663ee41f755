"""Whether the checkpoints of a run fit on the disk, asked before it begins.

check_space(config, model, Path("runs/a"))      # ValueError: names the folder and what is missing
"""

import logging
import math
import shutil
from pathlib import Path

import torch

from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.jobs.model_changes import whole_layouts
from moe_train.layout import chosen_names
from moe_train.model import DecoderConfig
from moe_train.training import rules_of_job
from unified_ckpt.files.storage import Location
from unified_ckpt.folders import numbered_checkpoints

_INT8_BYTES = 1 + 4 / 64  # a code, and the part of a scale
_OTHER_BYTES = 2**20  # tokenizer, configs, random states, headers

logger = logging.getLogger(__name__)


def checkpoint_bytes(config: Config, model: DecoderConfig) -> int:
    """About how large one checkpoint is: weights, their moments and, if asked, master weights and
    a moving average.
    """
    train = config.train
    weight_bytes, state_bytes = (
        torch.finfo(getattr(torch, dtype)).bits // 8 for dtype in (train.dtype, train.state_dtype)
    )
    layouts = whole_layouts(model)
    sizes = {name: math.prod(layout.global_shape) for name, layout in layouts.items()}
    rules = rules_of_job(config, model)
    trained = chosen_names("train.trainable", train.trainable, model) & rules.keys()
    adamw_bytes = 2 * (state_bytes if config.checkpoint.moments == "exact" else _INT8_BYTES)
    moment_bytes = {"adamw": adamw_bytes, "muon": state_bytes}
    masters = state_bytes if train.master_weights else 0
    updated = sum((moment_bytes[rules[n].algorithm] + masters) * sizes[n] for n in trained)
    averaged = trained if train.master_weights else sizes
    ema_bytes = 0 if config.checkpoint.ema_decay is None else 4 * sum(sizes[n] for n in averaged)
    weights = weight_bytes * sum(sizes.values())
    return math.ceil(weights + updated + ema_bytes) + _OTHER_BYTES


def check_space(config: Config, model: DecoderConfig, folder: Path | Location) -> None:
    """Refuse a disk without room for one checkpoint; warn where not all fit that are kept.

    Older checkpoints leave only when a new one is complete, so that one more has to fit. Of a store
    nobody knows what is free.

    Raises:
        ValueError: says what is needed, what is free, and what to change.
    """
    if isinstance(folder, Location):
        return
    needed = checkpoint_bytes(config, model)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise TrainValueError(
            f"train.output_dir={folder} has {free} bytes free, a checkpoint needs about {needed}, "
            f"so {needed - free} are missing; free space or choose another folder"
        )
    present = len(list(numbered_checkpoints(folder))) if folder.exists() else 0
    more = max(1, config.checkpoint.save_total_limit + 1 - present)
    if more * needed > free:
        logger.warning(
            "warning: %s has room for %d more checkpoints of about %d bytes, but up to %d are "
            "there at a time (checkpoint.save_total_limit=%d and the one being written)",
            folder,
            free // needed,
            needed,
            config.checkpoint.save_total_limit + 1,
            config.checkpoint.save_total_limit,
        )
