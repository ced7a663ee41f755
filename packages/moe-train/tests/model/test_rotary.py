import math

import pytest
import torch

from moe_train.model.rope_scaling import YarnScaling, mscale
from moe_train.model.rotary import RotaryOptions, inverse_frequencies, rotary_tables, rotate


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 6])
def test_rotation_is_complex_multiplication_of_pairs(interleaved: bool, dim: int) -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]])
    options = RotaryOptions(dim=dim, theta=100.0)
    tables = rotary_tables(positions, options, torch.float64)
    out = rotate(x, *tables, interleaved=interleaved)
    half = dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    expected = x.clone()
    for i, (a, b) in enumerate(pairs):
        angle = positions[:, None].double() * 100.0 ** (-i / half)
        turned = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * angle)
        expected[..., a], expected[..., b] = turned.real, turned.imag
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[..., dim:], x[..., dim:])


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    plain = RotaryOptions(dim=32, theta=1000.0)
    yarn = YarnScaling(
        factor=8.0, original_max_position_embeddings=256, attention_factor=1.5, truncate=False
    )
    options = RotaryOptions(dim=32, theta=1000.0, scaling=yarn)
    fast, blended = inverse_frequencies(plain), inverse_frequencies(options)
    turns = fast * 256 / (2 * math.pi)
    assert torch.equal(blended[turns > 32], fast[turns > 32])
    torch.testing.assert_close(blended[turns < 1], fast[turns < 1] / 8)
    between = (turns < 31) & (turns > 1.1)
    assert int(between.sum()) >= 3
    assert bool((blended < fast)[between].all() and (blended > fast / 8)[between].all())
    cos, sin = rotary_tables(torch.arange(4)[None], options, torch.float32)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.5**2))


def test_tables_are_in_the_activations_dtype_unless_they_are_to_be_fp32() -> None:
    positions = torch.arange(3)[None]
    for is_fp32, expected in ((False, torch.bfloat16), (True, torch.float32)):
        options = RotaryOptions(dim=4, theta=10.0, is_fp32=is_fp32)
        tables = rotary_tables(positions, options, torch.bfloat16)
        assert {table.dtype for table in tables} == {expected}
        x = torch.randn(1, 2, 3, 6, dtype=torch.bfloat16)
        assert rotate(x, *tables, interleaved=True).dtype == torch.bfloat16


def test_mscale_is_one_within_the_original_context() -> None:
    assert mscale(1.0) == mscale(0.5, 2.0) == 1.0
    assert mscale(math.e**10) == pytest.approx(2.0)


@pytest.mark.parametrize("values", [{"dim": 7}, {"dim": 0}, {"theta": 0.0}])
def test_what_cannot_be_rotated_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"rotary|rope_theta"):
        RotaryOptions(**{"dim": 8, "theta": 10.0, **values})  # type: ignore[arg-type]
