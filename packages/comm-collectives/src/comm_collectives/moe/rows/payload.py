"""Rows as they travel: how a row of floats becomes bytes and a row of floats again.

Half the bytes are half the time on a slow link, and a row that goes to an expert bears fewer bits
than one that is trained. `BlockScaledCodec` writes one byte an element and one fp32 scale for each
128 elements (sizes: `wire_format.RowFormat`):

    row = [code code code ... | padding up to 4 bytes | scale of block 0, scale of block 1, ...]

Invariant: the bytes of a row depend on that row alone, never on how many rows go together or on
the device, and nothing bad is hidden: a block that holds an infinity or NaN has the scale NaN and
decodes to NaN throughout (its codes mean nothing). A block of zeros decodes to zeros. -0.0 stays
-0.0 in float8 and becomes 0.0 in int8.

    codec = row_codec("float8_e4m3", torch.bfloat16)
    rows_NB = codec.encode(x_ND)                                # [N, codec.row_bytes(D)] uint8
    x_ND = codec.decode(rows_NB, hidden=7168, dtype=torch.bfloat16)

Errors: float8_e4m3 keeps 4 significant bits, so an element is off by at most 1/16 of itself, and by
at most scale / 1024 where it is below scale / 64; int8 is off by at most scale / 2.

Legend: N rows, D hidden size, B bytes of a row, G blocks of a row, L elements of a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch

from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.planning.wire import BLOCK_ELEMENTS, SCALE_BYTES, RowFormat
from comm_collectives.units import round_up

Payload = Literal["full", "float8_e4m3", "int8"]
# A smaller scale would be subnormal: too few bits, and its inverse is no fp32 number.
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK_ELEMENTS = 1 << 19  # 2 MiB of fp32: what is worked on at a time stays in a core's cache


class RowCodec(ABC):
    """One way to write rows. Both sides of a transfer must use the same: compare `word`."""

    payload: Payload
    word: int

    @abstractmethod
    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row of `hidden` elements."""

    @abstractmethod
    def encode(self, x_ND: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Write rows as bytes.

        Args:
            x_ND: [N, D] float16, bfloat16, float32 or float64, any strides; not modified.
            out: [N, row_bytes(D) or more] uint8 to write into; dense inside a row, and rows start
                at addresses that the elements and scales can have. Bytes beyond are left alone.

        Returns:
            `out`, or a new [N, row_bytes(D)] uint8.

        Raises:
            ValueError, TypeError: `x_ND` or `out` is not of that form.
        """

    @abstractmethod
    def decode(
        self,
        rows_NB: torch.Tensor,
        *,
        hidden: int,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read rows that `encode` wrote; never a view of them.

        Args:
            rows_NB: as `out` of `encode`.
            hidden: D, as encoded.
            dtype: floating dtype of the result, usually the one that was encoded.
            out: [N, D] of `dtype` to write into, any strides.

        Returns:
            `out`, or a new [N, D] of `dtype`.

        Raises:
            ValueError, TypeError: `rows_NB` or `out` is not of that form.
        """


@final
class PlainCodec(RowCodec):
    """The elements as they are, bit for bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.payload = "full"
        self.word = 0

    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row: the hidden size times the element's."""
        return hidden * self._dtype.itemsize

    def encode(self, x_ND: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `RowCodec.encode`; `x_ND` must have the codec's dtype, so that no bit changes."""
        rows_NB = _rows_for(x_ND, self.row_bytes(x_ND.shape[-1]), self._dtype.itemsize, out)
        if x_ND.dtype != self._dtype:
            raise CommTypeError(f"x is {x_ND.dtype}; this codec was made for {self._dtype}")
        self._elements(rows_NB, x_ND.shape[1]).copy_(x_ND.detach())
        return rows_NB

    def decode(
        self,
        rows_NB: torch.Tensor,
        *,
        hidden: int,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `RowCodec.decode`."""
        _check_rows(rows_NB, rows_NB.shape[0], self.row_bytes(hidden), self._dtype.itemsize)
        return _floats_for(rows_NB, hidden, dtype, out).copy_(self._elements(rows_NB, hidden))

    def _elements(self, rows_NB: torch.Tensor, hidden: int) -> torch.Tensor:
        return rows_NB[:, : self.row_bytes(hidden)].view(self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """How one element is written: the dtype of its byte and the largest magnitude in it."""

    word: int
    dtype: torch.dtype
    limit: float


_CODES: dict[Payload, _Code] = {
    "float8_e4m3": _Code(word=1, dtype=torch.float8_e4m3fn, limit=448.0),
    "int8": _Code(word=2, dtype=torch.int8, limit=127.0),
}


@final
class BlockScaledCodec(RowCodec):
    """One byte an element, and one fp32 scale (largest magnitude / limit) for each 128 of them.

    Blocks run along the row; the last may be short. A scale is never below 2**-126, so blocks whose
    elements are all smaller than about 1e-35 lose precision instead of becoming infinite; the scale
    of a block of zeros is 1. float64 is worked on in float64, everything else in float32.
    """

    def __init__(self, payload: Literal["float8_e4m3", "int8"]) -> None:
        if payload not in _CODES:
            raise CommValueError(f"payload={payload!r} is not block-scaled; choose of {[*_CODES]}")
        self._code = _CODES[payload]
        self.payload = payload
        self.word = self._code.word

    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row: the scales and one byte an element, rounded up to whole scales."""
        size = RowFormat(hidden_size=hidden, itemsize=1, weight_itemsize=1, block_scaled=True)
        return size.bare_row_bytes

    def encode(self, x_ND: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `RowCodec.encode`."""
        rows_NB = _rows_for(x_ND, self.row_bytes(x_ND.shape[-1]), SCALE_BYTES, out)
        hidden = x_ND.shape[1]
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

    def decode(
        self,
        rows_NB: torch.Tensor,
        *,
        hidden: int,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `RowCodec.decode`."""
        _check_rows(rows_NB, rows_NB.shape[0], self.row_bytes(hidden), SCALE_BYTES)
        x_ND = _floats_for(rows_NB, hidden, dtype, out)
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
        scale = (amax_NG / amax_NG.new_full((), self._code.limit)).clamp_(min=_LEAST_SCALE)
        scale = torch.where(amax_NG == 0, 1.0, scale).to(torch.float32)
        scale_NG.copy_(scale.masked_fill_(~scale.isfinite(), torch.nan))
        # The quotient exceeds the limit by rounding alone, which rounding to the code takes back.
        work_NGL.div_(scale_NG.unsqueeze(-1))
        if self._code.dtype == torch.int8:
            work_NGL.round_()
        code_NGL.copy_(work_NGL)

    def _views(self, rows_NB: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and codes of rows, as views of them."""
        scales = rows_NB[:, round_up(hidden, SCALE_BYTES) : self.row_bytes(hidden)]
        return scales.view(torch.float32), rows_NB[:, :hidden].view(self._code.dtype)


def row_codec(payload: Payload, dtype: torch.dtype) -> RowCodec:
    """Return the codec of a payload for rows of `dtype`.

    Raises:
        ValueError: the payload is unknown.
    """
    if payload == "full":
        return PlainCodec(dtype)
    if payload not in _CODES:
        raise CommValueError(f"payload={payload!r} is unknown; choose of {['full', *_CODES]}")
    return BlockScaledCodec(payload)


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


def _rows_for(
    x_ND: torch.Tensor, row_bytes: int, alignment: int, out: torch.Tensor | None
) -> torch.Tensor:
    if x_ND.dim() != 2 or not x_ND.is_floating_point() or x_ND.element_size() < 2:
        raise CommTypeError(
            f"x is {x_ND.dtype} of shape {tuple(x_ND.shape)}; give [rows, hidden size] of float16, "
            "bfloat16, float32 or float64"
        )
    if out is None:
        return torch.empty((x_ND.shape[0], row_bytes), dtype=torch.uint8, device=x_ND.device)
    _check_rows(out, x_ND.shape[0], row_bytes, alignment)
    return out


def _check_rows(rows: torch.Tensor, num_rows: int, row_bytes: int, alignment: int) -> None:
    if rows.dtype != torch.uint8:
        raise CommTypeError(f"rows of bytes are {rows.dtype}; give torch.uint8")
    if rows.dim() != 2 or rows.shape[0] != num_rows or rows.shape[1] < row_bytes:
        raise CommValueError(
            f"rows of bytes have shape {tuple(rows.shape)}; give [{num_rows}, {row_bytes} or more]"
        )
    strides, offset = rows.stride(), rows.storage_offset()
    if strides[1] != 1 or strides[0] % alignment or offset % alignment:
        raise CommValueError(
            f"rows of bytes have strides {strides} and begin at byte {offset} of their storage; "
            f"make each row dense and let it begin at a multiple of {alignment} bytes"
        )


def _floats_for(
    rows_NB: torch.Tensor, hidden: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    shape = (rows_NB.shape[0], hidden)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise CommTypeError(f"dtype={dtype}; rows decode to float16, bfloat16, float32 or float64")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=rows_NB.device)
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise CommValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}; give {dtype} of shape {shape}"
        )
    return out
