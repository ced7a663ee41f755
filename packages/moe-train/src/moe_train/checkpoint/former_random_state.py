"""Random states as checkpoints had them before unified-ckpt's `random_state_files`.

restore_former_random_state(Path("runs/job/checkpoint-100"), rank=0)
"""

from pathlib import Path

import safetensors.torch
import torch

from unified_ckpt import load_files
from unified_ckpt.files.storage import Location


def restore_former_random_state(source: Path | Location, rank: int) -> None:
    """Set torch's generators from the file that checkpoints had before `random_state_files`."""
    former = source / f"rng-rank-{rank:05d}.safetensors"
    if isinstance(former, Path) and former.exists():
        states = safetensors.torch.load(load_files(source, former.name))
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
