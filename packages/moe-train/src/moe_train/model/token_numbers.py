"""Random numbers that belong to a token of the run, so that every layout drops the same.

Dropout and jitter draw by (seed, layer, use) and the number of a token (`moe_pipeline.ops`), so
that no mask is kept. The number follows from the step, the sample in the step and the place;
nothing has to travel for it: a stage sees the microbatches of a step in order.

    numbers = TokenNumbers(seed=0, sample_rank=1, num_sample_ranks=2)
    numbers.begin_step(7)
    noise = numbers.next_microbatch(position_ids_BS)

Shape legend: B rows of this rank, S places.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

_TOKENS_OF_A_STEP = 1 << 40  # more than any step has
ATTENTION, ROUTER = 1, 2
"""Uses of random numbers within a layer; parts of a key."""


@dataclass(frozen=True, slots=True)
class TokenNoise:
    """What random numbers of a microbatch follow from: the run's seed and the tokens' numbers."""

    seed: int
    token_ids_BS: Tensor


@final
class TokenNumbers:
    """Counts the microbatches of a step that a rank has seen.

    Args:
        seed: of the run.
        sample_rank, num_sample_ranks: which of the equal parts of a microbatch this rank has.
    """

    def __init__(self, *, seed: int, sample_rank: int, num_sample_ranks: int) -> None:
        self._seed = seed
        self._sample_rank, self._num_sample_ranks = sample_rank, num_sample_ranks
        self._step = self._microbatch = 0

    def begin_step(self, step: int) -> None:
        """Start with the first microbatch of step number `step`."""
        self._step, self._microbatch = step, 0

    def next_microbatch(self, position_ids_BS: Tensor) -> TokenNoise:
        """Numbers of the next microbatch's places, each once in a run."""
        rows, length = position_ids_BS.shape
        first_row = (self._microbatch * self._num_sample_ranks + self._sample_rank) * rows
        self._microbatch += 1
        first = self._step * _TOKENS_OF_A_STEP + first_row * length
        ids = torch.arange(first, first + rows * length, device=position_ids_BS.device)
        return TokenNoise(self._seed, ids.view(rows, length))
