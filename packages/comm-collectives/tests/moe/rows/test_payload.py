"""Rows as bytes: against a slow reference in plain Python, and what the formats promise."""

import math
import struct

import pytest
import torch
from torch import Tensor

from comm_collectives.moe.rows.payload import Payload, RowCodec
from ranktest import run_ranks

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCALED: tuple[Payload, ...] = ("float8_e4m3", "int8")
_LIMITS = {"float8_e4m3": 448.0, "int8": 127.0}
_TINY = 2.0**-126


def _f32(value: float) -> float:
    """Round a double to fp32 (a double quotient of two fp32 numbers rounds to the fp32 one)."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _e4m3_values() -> list[float]:
    """The numbers of codes 0 to 126, by the format's definition: bias 7, three bits of fraction."""
    return [
        (c & 7) * 2.0**-9 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7)
        for c in range(127)
    ]


_E4M3 = _e4m3_values()


def _e4m3_code(value: float) -> int:
    """Nearest code, ties to the even one, never beyond 448."""
    size = min(abs(value), 448.0)
    code = min(range(127), key=lambda c: (abs(_E4M3[c] - size), c & 1))
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def _reference(row: list[float], payload: Payload, is_double: bool) -> bytes:
    """The bytes of one row, element by element, without torch."""
    codes, scales = bytearray(), b""
    for first in range(0, len(row), 128):
        block = row[first : first + 128]
        amax = max(abs(v) for v in block)
        scale = max(_f32(amax / _LIMITS[payload]), _TINY) if amax else 1.0
        for value in block:
            quotient = value / scale if is_double else _f32(value / scale)
            code = round(quotient) & 0xFF if payload == "int8" else _e4m3_code(_f32(quotient))
            codes.append(code)
        scales += struct.pack("f", scale)
    return bytes(codes) + bytes(-len(row) % 4) + scales


def _rows(num_rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of very different magnitudes, with zeros, whole zero blocks and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, hidden, generator=generator, dtype=torch.float64)
    exponent = torch.randint(-12, 5, (num_rows, 1), generator=generator).double()
    x = x * torch.exp2(exponent)
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0.0
    x[0, :128] = 0.0
    if num_rows > 1:
        x[1] = x[1].sign() * torch.finfo(dtype).smallest_normal / 4
    return x.to(dtype)


@pytest.mark.parametrize("payload", _SCALED)
@pytest.mark.parametrize("dtype", _FLOATS)
def test_encode_equals_a_slow_reference_bit_for_bit(payload: Payload, dtype: torch.dtype) -> None:
    for hidden in (1, 3, 128, 130, 384, 517):
        x = _rows(4, hidden, dtype, seed=hidden)
        got = RowCodec(payload).encode(x)
        for row, want in zip(got, x.double().tolist(), strict=True):
            assert bytes(row.tolist()) == _reference(want, payload, dtype == torch.float64)


def test_every_float8_code_decodes_as_torch_converts_it() -> None:
    codec = RowCodec("float8_e4m3")
    codes = torch.arange(256, dtype=torch.uint8)[None]
    rows = torch.cat([codes, torch.tensor([[0.75, 3e38 / 448]]).view(torch.uint8)], dim=1)
    for dtype in (torch.float32, torch.float64):
        got = codec.decode(rows, hidden=256, dtype=dtype)
        scale = torch.tensor([0.75, 3e38 / 448]).to(dtype).repeat_interleave(128)
        want = codes[0].view(torch.float8_e4m3fn).to(dtype) * scale
        is_number = ~want.isnan()
        assert int(is_number.sum()) == 254
        assert torch.equal(got[0, is_number], want[is_number])
        assert torch.equal(got[0, is_number].signbit(), want[is_number].signbit())


def _scales(rows: Tensor, hidden: int) -> Tensor:
    """The scale of each element [N, D], read where the format says."""
    count = -(-hidden // 128)
    scales = rows[:, -4 * count :].clone().view(torch.float32)
    return scales.repeat_interleave(128, dim=1)[:, :hidden].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float8_is_within_a_sixteenth_of_every_normal_value(dtype: torch.dtype) -> None:
    x, codec = _rows(64, 1000, dtype), RowCodec("float8_e4m3")
    rows = codec.encode(x)
    error = (codec.decode(rows, hidden=1000, dtype=dtype) - x).double().abs()
    scale = _scales(rows, 1000)
    is_normal = x.double().abs() >= scale / 64
    assert 0.5 < is_normal.double().mean() < 1.0  # both kinds are there
    assert bool((error <= x.double().abs() / 16)[is_normal].all())
    assert bool((error <= scale / 1024)[~is_normal].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_within_half_a_scale(dtype: torch.dtype) -> None:
    x, codec = _rows(64, 1000, dtype), RowCodec("int8")
    rows = codec.encode(x)
    error = (codec.decode(rows, hidden=1000, dtype=dtype) - x).double().abs()
    # Quotient and product are rounded to fp32: 127 steps of at most 2**-24 each.
    assert bool((error <= _scales(rows, 1000) * (0.5 + 127 * 2.0**-23)).all())


@pytest.mark.parametrize(
    ("payload", "dtype"),
    [("float8_e4m3", d) for d in _FLOATS] + [("int8", torch.float32), ("int8", torch.float64)],
)
def test_encoding_what_was_decoded_gives_the_same_codes(
    payload: Payload, dtype: torch.dtype
) -> None:
    # int8 in bfloat16 is not among them: its 8 bits of fraction cannot hold 127 steps and a scale.
    x, codec = _rows(64, 300, dtype)[2:], RowCodec(payload)
    rows = codec.encode(x)
    again = codec.encode(codec.decode(rows, hidden=300, dtype=dtype))
    assert torch.equal(again[:, :300], rows[:, :300])
    spread = (_scales(again, 300) / _scales(rows, 300) - 1).abs().max()
    assert spread <= max(torch.finfo(dtype).eps, 2.0**-23)


@pytest.mark.parametrize("payload", _SCALED)
def test_rows_of_7168_take_at_most_52_percent_of_bfloat16(payload: Payload) -> None:
    codec = RowCodec(payload)
    assert codec.encode(torch.ones(1, 7168)).nbytes == codec.row_bytes(7168) == 7168 + 4 * 56
    assert codec.row_bytes(7168) <= 0.52 * 2 * 7168


def test_row_bytes_are_whole_scales() -> None:
    for hidden in range(1, 600):
        want = hidden + -hidden % 4 + 4 * -(-hidden // 128)
        assert {RowCodec(p).row_bytes(hidden) for p in _SCALED} == {want}


@pytest.mark.parametrize("payload", _SCALED)
@pytest.mark.parametrize("dtype", _FLOATS)
def test_strides_change_nothing(payload: Payload, dtype: torch.dtype) -> None:
    codec, hidden = RowCodec(payload), 130
    x = _rows(6, hidden, dtype)
    want, size = codec.encode(x), codec.row_bytes(hidden)
    strided = x.t().contiguous().t()[::2].requires_grad_()
    before = strided.detach().clone()
    assert torch.equal(codec.encode(strided), want[::2])
    assert torch.equal(strided, before)
    wide = torch.full((3, size + 24), 77, dtype=torch.uint8)
    wide[:, 8 : 8 + size] = want[::2]
    got = codec.decode(wide[:, 8:-16], hidden=hidden, dtype=dtype)
    assert torch.equal(got, codec.decode(want[::2], hidden=hidden, dtype=dtype))
    assert not got.requires_grad


@pytest.mark.parametrize("payload", _SCALED)
def test_a_row_has_the_same_bytes_in_any_company(payload: Payload) -> None:
    codec = RowCodec(payload)
    x = _rows(90, 7168, torch.bfloat16)  # more than is worked on at a time
    together = codec.encode(x)
    decoded = codec.decode(together, hidden=7168, dtype=torch.bfloat16)
    for row in (0, 1, 72, 73, 74, 89):
        alone = codec.encode(x[row : row + 1])
        assert torch.equal(alone[0], together[row])
        one = codec.decode(alone, hidden=7168, dtype=torch.bfloat16)
        assert torch.equal(one[0], decoded[row])


@pytest.mark.parametrize("payload", _SCALED)
def test_no_rows_are_no_bytes(payload: Payload) -> None:
    codec = RowCodec(payload)
    rows = codec.encode(torch.empty(0, 300, dtype=torch.bfloat16))
    assert rows.shape == (0, codec.row_bytes(300))
    assert codec.decode(rows, hidden=300, dtype=torch.bfloat16).shape == (0, 300)


@pytest.mark.parametrize("payload", _SCALED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_bad_value_decodes_to_nan_and_no_other_does(
    payload: Payload, bad: float
) -> None:
    codec = RowCodec(payload)
    x = _rows(4, 400, torch.float32)
    want = codec.decode(codec.encode(x), hidden=400, dtype=torch.float32)
    broken = x.clone()
    broken[2, 130] = bad
    broken[3, 399] = bad
    want[2, 128:256] = torch.nan
    want[3, 384:] = torch.nan
    got = codec.decode(codec.encode(broken), hidden=400, dtype=torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("payload", _SCALED)
def test_numbers_that_a_scale_cannot_hold_are_neither_infinite_nor_quietly_wrong(
    payload: Payload,
) -> None:
    codec = RowCodec(payload)
    tiny = torch.tensor([[5e-324, 1e-300, 1e-45, 1e-38, 3e-36, 0.0]], dtype=torch.float64)
    got = codec.decode(codec.encode(tiny), hidden=6, dtype=torch.float64)
    scale = max(3e-36 / _LIMITS[payload], _TINY)
    assert bool((got - tiny).abs().max() <= scale * (0.501 if payload == "int8" else 16.0))
    assert bool(got.isfinite().all())
    huge = torch.tensor([[1e300, 1.0]], dtype=torch.float64)
    assert bool(codec.decode(codec.encode(huge), hidden=2, dtype=torch.float64).isnan().all())
    largest = torch.tensor([[3.4e38, -1.0]])
    got32 = codec.decode(codec.encode(largest), hidden=2, dtype=torch.float32)
    torch.testing.assert_close(got32[0, 0], largest[0, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("payload", _SCALED)
def test_zeros_stay_exact(payload: Payload) -> None:
    codec = RowCodec(payload)
    rows = codec.encode(torch.zeros(2, 200, dtype=torch.bfloat16))
    assert bool((_scales(rows, 200) == 1.0).all())
    assert bool((codec.decode(rows, hidden=200, dtype=torch.bfloat16) == 0).all())


@pytest.mark.gpu
def test_cuda_gives_the_bytes_and_numbers_of_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        for payload in _SCALED:
            for dtype in _FLOATS:
                codec, x = RowCodec(payload), _rows(90, 517, dtype)
                want = codec.encode(x)
                got = codec.encode(x.cuda())
                assert got.is_cuda
                assert torch.equal(got.cpu(), want)
                back = codec.decode(got, hidden=517, dtype=dtype).cpu()
                assert torch.equal(back, codec.decode(want, hidden=517, dtype=dtype))

    run_ranks(fn, 1, init=False)
