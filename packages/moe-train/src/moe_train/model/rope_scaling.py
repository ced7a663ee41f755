"""How rotary frequencies are stretched for contexts longer than those of the original training.

A form is a dataclass whose fields are keys of `rope_parameters` and whose `frequencies` gives the
radians per position of each pair from theta's powers, in fp32 as in transformers; another form is
another such class and a reader of it in `model.rope_config`.

`dynamic` and `longrope` depend on the length of the context. Here that is the length of the
document that a place belongs to, as far as the row holds it, so that a conversation is turned alike
alone, padded and packed; transformers takes the longest of the batch. With a cache it is the length
so far, and cached keys keep the turn that they have, as in transformers.

    scaling = LinearScaling(factor=4.0)
    scaling.frequencies(powers_P, theta=10000.0, lengths_BS=None)       # [P]

Shape legend: B rows, S positions, P rotated pairs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies are divided by `factor` (kaiokendev, 2023)."""

    factor: float
    attention_factor: float = 1.0

    def frequencies(self, powers_P: Tensor, theta: float, lengths_BS: Tensor | None) -> Tensor:
        """[P]"""
        return 1.0 / powers_P / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK-aware: theta grows with the document beyond `max_position_embeddings` (bloc97, 2023)."""

    factor: float
    max_position_embeddings: int
    attention_factor: float = 1.0

    def frequencies(self, powers_P: Tensor, theta: float, lengths_BS: Tensor | None) -> Tensor:
        """[B, S, P]; [P] without lengths."""
        dim = 2 * powers_P.shape[0]
        if dim == 2:
            raise TrainValueError("rope_type 'dynamic' needs more than the 2 dims that are rotated")
        if lengths_BS is None:
            return 1.0 / powers_P
        lengths_BS1 = lengths_BS.clamp(min=self.max_position_embeddings)[..., None].float()
        growth = self.factor * lengths_BS1 / self.max_position_embeddings - (self.factor - 1)
        theta_BS1 = theta * growth ** (dim / (dim - 2))
        shares_P = torch.arange(0, dim, 2, device=powers_P.device).float() / dim
        return 1.0 / theta_BS1**shares_P


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Wave lengths above the original context / `low_freq_factor` are stretched, those below it /
    `high_freq_factor` kept, and blended in between (Llama 3.1).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise TrainValueError(
                f"config.json: low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def frequencies(self, powers_P: Tensor, theta: float, lengths_BS: Tensor | None) -> Tensor:
        """[P]"""
        fast_P = 1.0 / powers_P
        turns_P = self.original_max_position_embeddings / (2 * math.pi / fast_P)
        span = self.high_freq_factor - self.low_freq_factor
        fast_share_P = ((turns_P - self.low_freq_factor) / span).clamp(0, 1)
        return (1 - fast_share_P) * fast_P / self.factor + fast_share_P * fast_P


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """A factor for each pair, one set for documents up to the original context and one for longer
    ones (Ding et al., arXiv 2402.13753).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def frequencies(self, powers_P: Tensor, theta: float, lengths_BS: Tensor | None) -> Tensor:
        """[B, S, P]; [P] without lengths."""
        short_P, long_P = (
            1.0 / (torch.tensor(factors, dtype=torch.float32, device=powers_P.device) * powers_P)
            for factors in (self.short_factor, self.long_factor)
        )
        if lengths_BS is None:
            return short_P
        is_long_BS1 = (lengths_BS > self.original_max_position_embeddings)[..., None]
        return torch.where(is_long_BS1, long_P, short_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071): above `beta_fast` turns over the original context a
    frequency is kept, below `beta_slow` divided by `factor`, and blended in between; `truncate`
    rounds the borders of that range outwards to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, powers_P: Tensor, theta: float, lengths_BS: Tensor | None) -> Tensor:
        """[P]"""
        low, high = self._blended_range(2 * powers_P.shape[0], theta)
        pairs_P = torch.arange(powers_P.shape[0], dtype=torch.float32, device=powers_P.device)
        slow_share_P = ((pairs_P - low) / (high - low)).clamp(0, 1)
        slow_P = 1.0 / (self.factor * powers_P)
        return slow_P * slow_share_P + 1.0 / powers_P * (1 - slow_share_P)

    def _blended_range(self, dim: int, theta: float) -> tuple[float, float]:
        """The pairs between which fast and slow frequencies are blended."""

        def pair_of(turns: float) -> float:
            ratio = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return dim * math.log(ratio) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if low == high else high


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | LongRopeScaling | YarnScaling
BY_LENGTH = (DynamicScaling, LongRopeScaling)
"""Forms that depend on the length of a document."""


def mscale(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's correction of the softmax' temperature for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
