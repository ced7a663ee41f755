"""Random numbers that belong to a token and a column, not to a rank or a moment.

A generator with a state gives a token other numbers on another rank, in another order or in a
recompute. Here each number is a hash of (key, token id, column), so that any split of tokens over
ranks and microbatches, any device and any recompute gives the same bits, and nothing is saved for
backward.

    key = counter_key(seed, layer, step)
    noise_TD = counter_uniform(key, token_ids_T, 256)

**The hash.** Counters through a finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, OOPSLA 2014): token and column are each mixed in full, with the key,
into 64 bits; their sum passes two more rounds, as the sum alone would be the same all along a
diagonal. A round is an exclusive or with the shifted number and a product modulo 2^64. torch's
shifts copy the sign, and masking it away would cost a third more time: left in, it makes a round
two to one, which 64 bits of state can afford. The last step adds instead, so that no bit is fixed.
One 64-bit lane gives two columns, which makes this as fast as `torch.rand` on a CPU. Not for
cryptography.

Dims: T tokens (or rows of a parameter), W columns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pipeline._torch_private import not_compiled
from moe_pipeline.errors import MoETypeError, MoEValueError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 32
_COLUMNS = 0xD1B54A32D192ED03  # tells the columns' hash from the tokens'
_CPU_LANES_PER_THREAD = 1 << 15  # two buffers of 256 KiB stay in a core's cache
_CUDA_LANES = 1 << 25


@not_compiled  # of ints of 64 bits, for which dynamo makes guards that it cannot read
def counter_key(*parts: int) -> int:
    """One key of 64 bits from any integers, say (seed, layer, step, purpose); order matters.

    Raises:
        TypeError: a part that is no int.
    """
    key = len(parts)
    for part in parts:
        _check_int("parts of a key", part)
        key = _mix_int(key * _GOLDEN + _mix_int((part + _GOLDEN) & _MASK))
    return key


@not_compiled
def counter_uniform(
    key: int,
    token_ids_T: Tensor,
    width: int,
    *,
    first_column: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Numbers [T, width], uniform in [0, 1): the same for a token wherever it is. Not collective.

    Args:
        key: which stream; modulo 2^64. See `counter_key`.
        token_ids_T: [T] integers, such as positions in the global batch; their device is that of
            the result. Equal ids get equal numbers.
        width: columns.
        first_column: the global index of the first column, where columns are split over ranks.
        dtype: fp32 (multiples of 2^-24) or fp64 (multiples of 2^-53, the first 24 bits of which are
            the fp32 number). Narrower ones would round up to 1.

    Raises:
        TypeError: `key` or `token_ids_T` are not integers, or another dtype.
        ValueError: `token_ids_T` is not 1-d, or negative columns.
    """
    if dtype not in (torch.float32, torch.float64):
        raise MoETypeError(
            f"counter_uniform gives torch.float32 or torch.float64, not {dtype}; convert the result"
        )
    blocks = counter_blocks(key, token_ids_T, width, first_column=first_column)
    out_TW = torch.empty(token_ids_T.shape[0], width, dtype=dtype, device=token_ids_T.device)
    # A tensor: integers times a Python float are numbers of the default dtype, maybe a narrow one.
    step = torch.full((), 2.0**-24, dtype=dtype, device=out_TW.device)
    for rows, bits in blocks:
        torch.mul(bits.bitwise_and_(0xFFFFFF), step, out=out_TW[rows])
    if dtype == torch.float64:
        more = counter_blocks(counter_key(key), token_ids_T, width, first_column=first_column)
        for rows, bits in more:
            out_TW[rows].add_(bits.bitwise_and_(0x1FFFFFFF).to(dtype), alpha=2.0**-53)
    return out_TW


def counter_normal(
    key: int,
    token_ids_T: Tensor,
    width: int,
    *,
    first_column: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Numbers [T, width] of the standard normal distribution, for initial weights.

    The inverse of the distribution function at `counter_uniform`, in fp64 throughout, then rounded.
    So fp32 numbers of a CPU and of a GPU, whose logarithms differ in the last bit of fp64, differ
    at most in the last bit of fp32, and in few of them. On one device, all layouts agree exactly.

    Args:
        key, token_ids_T, width, first_column: those of `counter_uniform`; of a parameter, ids are
            the indices of its rows.
        dtype: any floating point dtype.

    Raises:
        TypeError, ValueError: those of `counter_uniform`.
    """
    if not dtype.is_floating_point:
        raise MoETypeError(f"counter_normal gives a floating point dtype, not {dtype}")
    _check_counters(key, token_ids_T, width, first_column)
    num_rows = token_ids_T.shape[0]
    out_TW = torch.empty(num_rows, width, dtype=dtype, device=token_ids_T.device)
    step = _block_rows(token_ids_T.device, width)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        uniform = counter_uniform(
            key, token_ids_T[rows], width, first_column=first_column, dtype=torch.float64
        )
        # 0 has no finite image; numbers just below 1 have.
        out_TW[rows] = torch.special.ndtri(uniform.clamp_(min=2.0**-54))
    return out_TW


@not_compiled
def counter_blocks(
    key: int, token_ids_T: Tensor, width: int, *, first_column: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Uniform int32 numbers [rows, width], in blocks of rows that fit a cache.

    Each block is a buffer that the next one overwrites; the caller may overwrite it as well.
    Arguments and Raises are those of `counter_uniform`, raised at the call.
    """
    _check_counters(key, token_ids_T, width, first_column)
    return _blocks(key, token_ids_T.to(torch.int64), width, first_column)


def _blocks(
    key: int, ids_T: Tensor, width: int, first_column: int
) -> Iterator[tuple[slice, Tensor]]:
    device, num_rows = ids_T.device, ids_T.shape[0]
    if num_rows == 0 or width == 0:
        return
    lanes = torch.arange(first_column // 2, (first_column + width + 1) // 2, device=device)
    tokens_T1 = _mixed(ids_T, counter_key(key, 0)).unsqueeze(1)
    columns_L = _mixed(lanes, counter_key(key, _COLUMNS))
    step = min(_block_rows(device, width), num_rows)
    state = torch.empty(step, lanes.shape[0], dtype=torch.int64, device=device)
    scratch = torch.empty_like(state)
    skipped = first_column % 2
    for start in range(0, num_rows, step):
        tokens = tokens_T1[start : start + step]
        rows = tokens.shape[0]
        z = torch.add(tokens, columns_L, out=state[:rows])
        bits = _finish(z, scratch[:rows]).view(torch.int32)
        yield slice(start, start + rows), bits[:, skipped : skipped + width]


def _mixed(counters: Tensor, key: int) -> Tensor:
    z = counters * _signed(_GOLDEN) + _signed(key)
    return _finish(z, torch.empty_like(z))


def _finish(z: Tensor, scratch: Tensor) -> Tensor:
    """The rounds, in place."""
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(z, shift, out=scratch)
        z.bitwise_xor_(scratch).mul_(_signed(factor))
    torch.bitwise_right_shift(z, _LAST_SHIFT, out=scratch)
    return z.add_(scratch)


def _mix_int(z: int) -> int:
    """`_finish` for one Python int; 0 .. 2^64 - 1."""
    for shift, factor in _ROUNDS:
        z = ((z ^ (_signed(z) >> shift)) & _MASK) * factor & _MASK
    return (z + (_signed(z) >> _LAST_SHIFT)) & _MASK


def _signed(value: int) -> int:
    """The int64 that has the low 64 bits of `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _block_rows(device: torch.device, width: int) -> int:
    on_cpu = device.type == "cpu"
    lanes = torch.get_num_threads() * _CPU_LANES_PER_THREAD if on_cpu else _CUDA_LANES
    return max(1, 2 * lanes // max(1, width))


def _check_counters(key: int, token_ids_T: Tensor, width: int, first_column: int) -> None:
    _check_int("key", key)
    if token_ids_T.dim() != 1:
        raise MoEValueError(
            f"token ids must be 1-d, one for each row, got shape {tuple(token_ids_T.shape)}; "
            "flatten them"
        )
    dtype = token_ids_T.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise MoETypeError(f"token ids must be integers, got {dtype}; give positions in int64")
    if width < 0 or first_column < 0:
        raise MoEValueError(
            f"width={width} and first_column={first_column} must not be negative; columns count "
            "from 0"
        )


def _check_int(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MoETypeError(f"{name} must be an int, got {value!r}")
