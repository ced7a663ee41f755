"""How a row of floats becomes bytes and a row of floats again: a byte an element, and fp32 scales.

    row = [code code code ... | padding up to 4 bytes | scale of block 0, scale of block 1, ...]

Invariant: the bytes of a row depend on that row alone, never on how many rows go together or on
the device, and nothing bad is hidden: a block that holds an infinity or NaN has the scale NaN and
decodes to NaN throughout. A block of zeros decodes to zeros.

Errors: float8_e4m3 keeps 4 significant bits, so an element is off by at most 1/16 of itself, and by
at most scale / 1024 where it is below scale / 64; int8 is off by at most scale / 2.

Legend: N rows, D hidden size, B bytes of a row, G blocks of a row, L elements of a block.
"""

from collections.abc import Iterator
from typing import Literal, final

import torch

from comm_collectives.planning.wire import BLOCK_ELEMENTS, SCALE_BYTES, RowFormat
from comm_collectives.units import round_up

Payload = Literal["full", "float8_e4m3", "int8"]
# A smaller scale would be subnormal: too few bits, and its inverse is no fp32 number.
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK_ELEMENTS = 1 << 19  # 2 MiB of fp32: what is worked on at a time stays in a core's cache
_CODES: dict[Payload, tuple[torch.dtype, float]] = {  # of a byte, and the largest magnitude in it
    "float8_e4m3": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}


@final
class RowCodec:
    """One byte an element, and one fp32 scale (largest magnitude / limit) for each 128 of them.

    A scale is never below 2**-126, so blocks whose elements are all smaller than about 1e-35 lose
    precision instead of becoming infinite. float64 is worked on in float64, all else in float32.
    """

    def __init__(self, payload: Literal["float8_e4m3", "int8"]) -> None:
        self._dtype, self._limit = _CODES[payload]

    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row of `hidden` elements: one each and the scales, in whole scales."""
        size = RowFormat(hidden_size=hidden, itemsize=1, weight_itemsize=1, block_scaled=True)
        return size.bare_row_bytes

    def encode(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Write rows [N, D] of any floating dtype and strides as [N, row_bytes(D)] uint8."""
        num_rows, hidden = x_ND.shape
        size = (num_rows, self.row_bytes(hidden))
        rows_NB = torch.empty(size, dtype=torch.uint8, device=x_ND.device)
        work_dtype = torch.promote_types(x_ND.dtype, torch.float32)
        for piece in _chunks(x_ND, hidden):
            work_ND = x_ND[piece].detach().to(work_dtype, copy=True)
            scale_NG, code_ND = self._views(rows_NB[piece], hidden)
            rows_NB[piece, hidden : round_up(hidden, SCALE_BYTES)] = 0
            for elements, blocks in _equal_blocks(hidden):
                self._encode_blocks(
                    _by_block(work_ND[:, elements], blocks),
                    _by_block(code_ND[:, elements], blocks),
                    scale_NG[:, blocks],
                )
        return rows_NB

    def decode(self, rows_NB: torch.Tensor, *, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Read rows that `encode` wrote as new [N, hidden] of `dtype`; rows may have a stride."""
        x_ND = torch.empty((rows_NB.shape[0], hidden), dtype=dtype, device=rows_NB.device)
        work_dtype = torch.promote_types(dtype, torch.float32)
        for piece in _chunks(rows_NB, hidden):
            scale_NG, code_ND = self._views(rows_NB[piece], hidden)
            work_ND, factor = _to_floats(code_ND, work_dtype)
            for elements, blocks in _equal_blocks(hidden):
                work_NGL = _by_block(work_ND[:, elements], blocks)
                work_NGL.mul_(scale_NG[:, blocks, None].to(work_dtype) * factor)
            x_ND[piece].copy_(work_ND)
        return x_ND

    def _encode_blocks(
        self, work_NGL: torch.Tensor, code_NGL: torch.Tensor, scale_NG: torch.Tensor
    ) -> None:
        """Write the codes and scales of blocks of equal length; `work_NGL` is used up."""
        amax_NG = work_NGL.abs().amax(-1)
        # By a tensor: torch multiplies by the inverse of a Python number on accelerators, which
        # rounds differently.
        scale = (amax_NG / amax_NG.new_full((), self._limit)).clamp_(min=_LEAST_SCALE)
        scale = torch.where(amax_NG == 0, 1.0, scale).to(torch.float32)
        scale_NG.copy_(scale.masked_fill_(~scale.isfinite(), torch.nan))
        # The quotient exceeds the limit by rounding alone, which rounding to the code takes back.
        work_NGL.div_(scale_NG.unsqueeze(-1))
        if self._dtype == torch.int8:
            work_NGL.round_()
        code_NGL.copy_(work_NGL)

    def _views(self, rows_NB: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and codes of rows, as views of them."""
        scales = rows_NB[:, round_up(hidden, SCALE_BYTES) : self.row_bytes(hidden)]
        return scales.view(torch.float32), rows_NB[:, :hidden].view(self._dtype)


def _to_floats(code_ND: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Return the codes as numbers, and the factor that they still lack."""
    if code_ND.dtype == torch.int8 or code_ND.device.type != "cpu":
        return code_ND.to(dtype, copy=True), 1.0
    # torch converts float8 one by one on CPUs. The bits of e4m3 in a float16's place are the number
    # over 2**8, subnormal ones too. NaN is lost, but then the block's scale is NaN.
    bits = code_ND.view(torch.int8).to(torch.int16)
    half = bits.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)
    return half.to(dtype), 256.0


def _chunks(rows: torch.Tensor, hidden: int) -> Iterator[slice]:
    """Pieces of rows that fit into a CPU's cache; elsewhere all rows at once."""
    num_rows = rows.shape[0]
    step = num_rows
    if rows.device.type == "cpu":
        step = max(1, _CHUNK_ELEMENTS // max(1, hidden))
    for first in range(0, num_rows, max(1, step)):
        yield slice(first, first + step)


def _equal_blocks(hidden: int) -> Iterator[tuple[slice, slice]]:
    """The elements and the numbers of the blocks of 128, then of the short last block, if any."""
    whole = hidden // BLOCK_ELEMENTS
    if whole:
        yield slice(0, whole * BLOCK_ELEMENTS), slice(0, whole)
    if hidden % BLOCK_ELEMENTS:
        yield slice(whole * BLOCK_ELEMENTS, hidden), slice(whole, whole + 1)


def _by_block(x_ND: torch.Tensor, blocks: slice) -> torch.Tensor:
    num_blocks = blocks.stop - blocks.start
    length = x_ND.shape[1] // num_blocks
    blocked: torch.Tensor = x_ND.unflatten(1, (num_blocks, length))
    return blocked
