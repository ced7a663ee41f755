"""Adam's moments in one byte an element, with a bound of the error: an option of `save`.

Blocks of 64 row-major elements of a rank's box share one fp32 scale s.

- `KEY/moment1` (or `KEY/exp_avg`): signed, symmetric: code = round(x / s), s = max|x| / 127 of the
  block. So |x - x'| <= max|x| / 254 of the block, plus fp32 rounding.
- `KEY/moment2` (or `KEY/exp_avg_sq`): of the square root, unsigned: code = round(sqrt(x) / s), s =
  max sqrt(x) / 255, and at least 1 where x > 0, so that no denominator of Adam becomes zero. So
  |sqrt(x) - sqrt(x')| <= max sqrt(x) / 255 of the block, and half of that where the code is over 1.

Codes are stored under the tensor's own key (I8 or U8), scales as `KEY/scale@BOX` beside them; every
layout can read both. Block-wise scales are from 8-bit Optimizers (Dettmers et al., 2022), which use
another code.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import Box, Shape, Shard

BLOCK = 64
Moment = Literal["moment1", "moment2"]
_SCALE_KEY = re.compile(r"(.+)/scale@(\d+:\d+(?:,\d+:\d+)*)\Z", re.DOTALL)
_MOMENT_OF: dict[str, Moment] = {
    "moment1": "moment1",
    "moment2": "moment2",
    "exp_avg": "moment1",  # where a caller stores shards under torch's names
    "exp_avg_sq": "moment2",
}
_CODE_DTYPE = {"moment1": torch.int8, "moment2": torch.uint8}
_MAX_CODE = {"moment1": 127.0, "moment2": 255.0}


def moment_of(key: str) -> Moment | None:
    """Return which moment a stored key is of, None if of none."""
    name = key.rpartition("/")[2]
    return _MOMENT_OF.get(name) if "/" in key else None


def compress_moments(shards: Sequence[Shard]) -> list[Shard]:
    """Replace floating moments by codes and scales (new memory), and keep all other shards."""
    compressed: list[Shard] = []
    for shard in shards:
        moment = moment_of(shard.key)
        blockless = not shard.tensor.dim() or 0 in shard.box.global_shape
        if moment is None or blockless or not shard.tensor.dtype.is_floating_point:
            compressed.append(shard)
            continue
        codes, scales = quantize(shard.tensor, moment, key=shard.key)
        box = shard.box
        compressed.append(Shard(key=shard.key, tensor=codes, box=box))
        if codes.numel():
            key = scale_key(shard.key, box.offset, box.local_shape)
            scale_box = replace(Box.whole(scales.shape), replica_id=box.replica_id)
            compressed.append(Shard(key=key, tensor=scales, box=scale_box))
    return compressed


def scale_key(key: str, offset: Shape, shape: Shape) -> str:
    """Return the stored key of the scales of a box of a compressed moment."""
    return f"{key}/scale@" + ",".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))


def parse_scale_key(stored_key: str) -> tuple[str, Shape, Shape] | None:
    """Undo `scale_key`: (key, offset, shape), None for any other key."""
    match = _SCALE_KEY.match(stored_key)
    if match is None:
        return None
    ends = [(int(a), int(b)) for a, b in (part.split(":") for part in match[2].split(","))]
    return match[1], tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


def quantize(
    tensor: torch.Tensor, moment: Moment, *, key: str = "moment"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of the tensor's shape and one fp32 scale per block of its row-major elements."""
    values = tensor.detach().to(torch.float32).reshape(-1)
    if not bool(torch.isfinite(values).all()) or (moment == "moment2" and bool((values < 0).any())):
        raise CheckpointValueError(
            f"{key!r}: moment_compression='int8' needs finite values, and second moments that are "
            "not negative; save without it, or find where training diverged"
        )
    roots = values.sqrt() if moment == "moment2" else values
    blocks = torch.nn.functional.pad(roots, (0, -len(roots) % BLOCK)).view(-1, BLOCK)
    top = _MAX_CODE[moment]
    scales = blocks.abs().amax(dim=1) / top if len(blocks) else blocks.new_zeros(0)
    # A block of subnormal values has a scale that rounds to zero, or a quotient beyond the codes.
    divisor = scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    codes = (blocks / divisor).round().clamp(-top, top)
    scales = divisor.squeeze(1).where(scales > 0, scales)
    if moment == "moment2":
        codes = codes.where((blocks == 0) | (codes > 0), torch.ones_like(codes))
    codes = codes.view(-1)[: len(values)].to(_CODE_DTYPE[moment])
    return codes.view(tensor.shape), scales


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, moment: Moment, *, offset: Shape, box_shape: Shape
) -> torch.Tensor:
    """Return the fp32 values of a part of a box.

    Args:
        codes: the part's codes.
        scales: of all blocks of the box.
        offset: where the part begins in the box.
        box_shape: shape of the box.
    """
    block_of = torch.zeros((), dtype=torch.int64)
    for dim, (begin, length) in enumerate(zip(offset, codes.shape, strict=True)):
        step = math.prod(box_shape[dim + 1 :])
        at = torch.arange(begin, begin + length) * step
        block_of = block_of.unsqueeze(-1) + at
    values = codes.to(torch.float32) * scales[block_of.div(BLOCK, rounding_mode="floor")]
    return values.square() if moment == "moment2" else values
