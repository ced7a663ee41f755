"""Rotary position embeddings as the families use them (Su et al., arXiv 2104.09864).

A family turns all of a head's dims or the first part of them only, turns pairs that stand half a
width apart or side by side, and may stretch its frequencies for longer contexts
(`model.rope_scaling`). The tables hold one angle per pair, twice: `[angles, angles]`.

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
from moe_train.model.documents import document_lengths
from moe_train.model.rope_scaling import BY_LENGTH, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryOptions:
    """Which dims of a head are rotated, and how fast.

    Attributes:
        dim: how many dims are rotated, from the first on; even.
        theta: base of the frequencies.
        scaling: how frequencies are stretched; None: not.
        is_fp32: rotate in fp32 also when the activations are in less (ERNIE-4.5).

    Raises:
        ValueError: `dim` is not a positive even number, or `theta` not above 0.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    is_fp32: bool = False

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise TrainValueError(
                f"{self.dim} dims of a head are to be rotated; rotary needs a positive even number"
            )
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise TrainValueError(f"rope_theta={self.theta} must be a positive finite number")


def inverse_frequencies(
    options: RotaryOptions, lengths_BS: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians per position of each pair, fp32 [P]; [B, S, P] where they depend on `lengths_BS`.

    Args:
        lengths_BS: of the document of each place; None: no longer than the original context.
    """
    exponents_P = torch.arange(0, options.dim, 2, dtype=torch.float32, device=device) / options.dim
    powers_P = options.theta**exponents_P
    if options.scaling is None:
        return 1.0 / powers_P
    return options.scaling.frequencies(powers_P, options.theta, lengths_BS)


def rotary_tables(
    position_ids_BS: Tensor, options: RotaryOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, R], computed in fp32; in `dtype`, or fp32 under `is_fp32`.

    Padding (position -1) is turned as position 0.
    """
    lengths_BS = None
    if isinstance(options.scaling, BY_LENGTH):
        lengths_BS = document_lengths(position_ids_BS)
    frequencies = inverse_frequencies(options, lengths_BS, position_ids_BS.device)
    angles = position_ids_BS.clamp(min=0)[..., None].float() * frequencies
    table_BSR = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if options.scaling is None else options.scaling.attention_factor
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
