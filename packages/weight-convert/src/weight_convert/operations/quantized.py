"""Operations between weights and their quantised forms.

Blocks of fp8: codes of e4m3 [..., rows, columns] and a scale for each block of rows x columns; the
last block of a dim may be smaller. A weight is code x scale.

mxfp4, as GPT-OSS has it: two codes of e2m1 in a byte, blocks of 32 along a row, each with an
exponent in a byte: blocks [..., rows, groups, 16] and scales [..., rows, groups] are a weight
[..., 32 x groups, rows], transposed.

    FromBlocks(block=(128, 128))
"""

from dataclasses import dataclass
from typing import Literal

from weight_convert.operations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class FromBlocks(Operation):
    """Codes and scales of fp8 to weights in the dtype of the result."""

    block: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToBlocks(Operation):
    """A weight to one part of its blocks: to scales, or to codes by those scales.

    For codes, a second input holds scales to take instead, and a third former codes, which stand
    wherever they decode to the very weight that is there.
    """

    block: tuple[int, int]
    part: Literal["codes", "scales"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromMx(Operation):
    """Blocks and scales of mxfp4 to a weight in the dtype of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToMx(Operation):
    """A weight to one part of its mxfp4; further inputs are as in `ToBlocks`."""

    part: Literal["codes", "scales"]
