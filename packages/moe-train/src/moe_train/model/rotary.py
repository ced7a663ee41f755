"""Rotary position embeddings as the families use them (Su et al., arXiv 2104.09864).

A family turns all of a head's dims or the first part of them only, turns pairs that stand half a
width apart or side by side, and may stretch its slow frequencies for longer contexts (YaRN, Peng et
al., arXiv 2309.00071). The tables hold one angle per pair, twice: `[angles, angles]`.

    options = RotaryOptions(dim=64, theta=10000.0)
    cos_BSR, sin_BSR = rotary_tables(position_ids_BS, options, torch.float32)
    q_BHSD = rotate(q_BHSD, cos_BSR, sin_BSR, interleaved=False)

Shape legend: B sequences, S positions, H heads, D head dim, R rotated dims, P = R / 2 pairs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnOptions:
    """How YaRN stretches the frequencies; the names are those of `rope_parameters`.

    Attributes:
        factor: longest context over the original one.
        original_max_position_embeddings: positions of the original training.
        attention_factor: factor of the tables.
        beta_fast, beta_slow: turns over the original context above which a frequency is kept, and
            below which it is divided by `factor`; in between it is blended.
        truncate: round the borders of that range outwards to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryOptions:
    """Which dims of a head are rotated, and how fast.

    Attributes:
        dim: how many dims are rotated, from the first on; even.
        theta: base of the frequencies.
        yarn: None: frequencies are not stretched.
        is_fp32: rotate in fp32 also when the activations are in less (ERNIE-4.5).

    Raises:
        ValueError: `dim` is not a positive even number, or `theta` not above 0.
    """

    dim: int
    theta: float
    yarn: YarnOptions | None = None
    is_fp32: bool = False

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise TrainValueError(
                f"{self.dim} dims of a head are to be rotated; rotary needs a positive even number"
            )
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise TrainValueError(f"rope_theta={self.theta} must be a positive finite number")


def mscale(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's correction of the softmax' temperature for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def inverse_frequencies(options: RotaryOptions, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair, fp32 [P]."""
    exponents_P = torch.arange(0, options.dim, 2, dtype=torch.float32, device=device) / options.dim
    fast_P = 1.0 / options.theta**exponents_P
    yarn = options.yarn
    if yarn is None:
        return fast_P
    low, high = _blended_range(options, yarn)
    pairs_P = torch.arange(options.dim // 2, dtype=torch.float32, device=device)
    slow_share_P = ((pairs_P - low) / (high - low)).clamp(0, 1)
    slow_P = 1.0 / (yarn.factor * options.theta**exponents_P)
    return slow_P * slow_share_P + fast_P * (1 - slow_share_P)


def rotary_tables(
    position_ids_BS: Tensor, options: RotaryOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, R], computed in fp32; in `dtype`, or fp32 under `is_fp32`.

    Padding (position -1) is turned as position 0.
    """
    angles = position_ids_BS.clamp(min=0)[..., None].float() * inverse_frequencies(
        options, position_ids_BS.device
    )
    table_BSR = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if options.yarn is None else options.yarn.attention_factor
    if options.is_fp32:
        dtype = torch.promote_types(dtype, torch.float32)
    return (table_BSR.cos() * factor).to(dtype), (table_BSR.sin() * factor).to(dtype)


def rotate(x_BHSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the first R dims of every head; the others pass. Same shape and dtype as `x_BHSD`.

    Args:
        interleaved: a pair is (2i, 2i + 1); otherwise (i, i + R/2).
    """
    width, half = cos_BSR.shape[-1], cos_BSR.shape[-1] // 2
    cos, sin = cos_BSR[:, None, :, :half], sin_BSR[:, None, :, :half]
    turned = x_BHSD[..., :width]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    out = out.to(x_BHSD.dtype)
    return out if width == x_BHSD.shape[-1] else torch.cat((out, x_BHSD[..., width:]), dim=-1)


def _blended_range(options: RotaryOptions, yarn: YarnOptions) -> tuple[float, float]:
    """The pairs between which fast and slow frequencies are blended."""

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        ratio = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return options.dim * math.log(ratio) / (2 * math.log(options.theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, options.dim - 1)
    return low, high + 0.001 if low == high else high
