"""What the experts' matrix products cannot take is refused before ranks start; pure.

check_products(config, model)       # ValueError: names the key and the sizes
"""

import torch

from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig

_GROUPED_MM_BYTES = 16  # whose multiples its rows are


def check_products(config: Config, model: DecoderConfig) -> None:
    """Hold the widths of rows against `model.experts_implementation`.

    Raises:
        ValueError: grouped_mm, and rows that are no multiple of 16 bytes.
    """
    if config.model.experts_implementation != "grouped_mm":
        return
    row = {
        "hidden_size": model.moe.moe_latent_size or model.hidden_size,
        "moe_intermediate_size": model.moe.moe_intermediate_size // config.parallel.etp,
    }
    for name, size in row.items():
        num_bytes = size * getattr(torch, config.train.dtype).itemsize
        if num_bytes % _GROUPED_MM_BYTES:
            raise TrainValueError(
                'model.experts_implementation="grouped_mm" takes rows in multiples of '
                f"{_GROUPED_MM_BYTES} bytes, but {name}={size} in train.dtype="
                f'"{config.train.dtype}" has {num_bytes}; choose "auto", "fused" or "loop"'
            )
