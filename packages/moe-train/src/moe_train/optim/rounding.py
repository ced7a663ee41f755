"""Stochastic rounding of updated weights to bfloat16, the same on every rank that holds them.

An update is often smaller than half the distance to the next bfloat16 number and would be lost at
each step; rounded up with a probability equal to the share of that distance, it is kept on average,
without an fp32 copy of the weights (arXiv 2010.06192).

Invariant: what a weight is rounded to depends on its exact value, the seed, the number of the
update and its place in the global parameter, never on the layout; exact numbers stay.

    rounding = StochasticRounding(seed=0, first={"experts.down_proj": (8, 0)})
    rounding.write("experts.down_proj", exact_fp32, weight_bf16, update=17)
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pipeline.ops import counter_key, counter_uniform

_DROPPED_BITS = 16  # of an fp32 number, to make it a bfloat16 one
_ROUNDING = 0x5D1  # tells these random numbers from those of others with the same seed


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticRounding:
    """Rounds weights by random numbers of their place.

    Args:
        seed: of the job.
        first: of parameters of which this rank holds a part: where it begins, the global numbers of
            its first index of dim 0, and of its first column; zeros for others.
    """

    seed: int
    first: Mapping[str, tuple[int, int]]

    def write(self, name: str, exact: Tensor, to: Tensor, *, update: int, row: int = 0) -> None:
        """Store `exact` (fp32) in `to` (bfloat16, the same shape), rounded; not collective.

        Args:
            row: where in this rank's part of the parameter they begin, in rows of dim 0.
        """
        rows = (exact.reshape(-1, 1) if exact.dim() < 2 else exact.flatten(1)).contiguous()
        key = counter_key(self.seed, _ROUNDING, update, zlib.crc32(name.encode()))
        first, column = self.first.get(name, (0, 0))
        first += row
        ids = torch.arange(first, first + rows.shape[0], device=rows.device)
        noise = counter_uniform(key, ids, rows.shape[1], first_column=column)
        noise = noise.mul_(1 << _DROPPED_BITS).to(torch.int32)
        # Sign and magnitude: what is added to the dropped bits carries into the magnitude.
        bits = rows.view(torch.int32).add(noise).bitwise_and_(-1 << _DROPPED_BITS)
        rounded = torch.where(rows.isfinite(), bits.view(torch.float32), rows)
        to.copy_(rounded.view(exact.shape))
