import pytest
import torch

from weight_convert.compute import elementwise, mx
from weight_convert.errors import WeightConvertError
from weight_convert.operations import FromMx, ToMx

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def reference(blocks, scales):
    """Element by element, as the description of the format says."""
    experts, rows, groups, _ = blocks.shape
    out = torch.empty(experts, rows, groups * 32, dtype=torch.float64)
    for e, r, g in torch.cartesian_prod(
        *(torch.arange(n) for n in (experts, rows, groups))
    ).tolist():
        for i in range(32):
            byte = int(blocks[e, r, g, i // 2])
            code = byte & 15 if i % 2 == 0 else byte >> 4
            out[e, r, g * 32 + i] = VALUES[code] * 2.0 ** (int(scales[e, r, g]) - 127)
    return out.transpose(1, 2)


def random_mx(experts=2, rows=3, groups=2, low=60, high=180):
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, (experts, rows, groups), dtype=torch.uint8)


@pytest.mark.parametrize("band_bytes", [1, 700, 24 << 20])
def test_blocks_decode_to_the_transposed_weight_and_back(compute, monkeypatch, band_bytes) -> None:
    monkeypatch.setattr(elementwise, "_BAND_BYTES", band_bytes)
    blocks, scales = random_mx()
    weight = compute(FromMx(), [blocks, scales], torch.bfloat16, (2, 64, 3))
    assert torch.equal(weight.double(), reference(blocks, scales))
    again = compute(ToMx(part="codes"), [weight, scales], torch.uint8, blocks.shape)
    assert torch.equal(again, blocks)


def test_former_blocks_stand_where_their_scale_loses_them(compute) -> None:
    blocks, scales = random_mx(low=0, high=256)
    scales[0, 0, 0], scales[0, 0, 1] = 0, 255
    weight = compute(FromMx(), [blocks, scales], torch.bfloat16, (2, 64, 3))
    again = compute(ToMx(part="codes"), [weight, scales, blocks], torch.uint8, blocks.shape)
    assert torch.equal(again, blocks)


def test_fresh_scales_and_codes_are_the_nearest(compute, monkeypatch) -> None:
    monkeypatch.setattr(mx, "CHUNK_ELEMENTS", 100)
    weight = torch.randn(2, 64, 3)
    weight[0, :32, 0] = 0
    scales = compute(ToMx(part="scales"), [weight], torch.uint8, (2, 3, 2))
    blocks = compute(ToMx(part="codes"), [weight], torch.uint8, (2, 3, 2, 16))
    rows = weight.transpose(1, 2).reshape(2, 3, 2, 32)
    largest = rows.abs().amax(-1)
    expected = torch.where(largest > 0, torch.floor(torch.log2(largest)) - 2 + 127, 0)
    assert torch.equal(scales.float(), expected)
    found = compute(FromMx(), [blocks, scales], torch.float32, weight.shape)
    step = torch.tensor(VALUES[:8])
    scaled = rows / 2.0 ** (scales.float()[..., None] - 127)
    near = (scaled[..., None].abs() - step).abs().amin(-1)
    mine = (
        found.transpose(1, 2).reshape(rows.shape) / 2.0 ** (scales.float()[..., None] - 127)
    ).abs()
    assert torch.allclose((mine - scaled.abs()).abs()[0, 1:], near[0, 1:])
    assert (found[0, :32, 0] == 0).all()


def test_ties_go_to_the_even_code_and_large_values_to_the_largest() -> None:
    values = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9] * 4])
    codes = mx.encoded(values, torch.tensor([127], dtype=torch.uint8))
    found = mx.decoded(codes, torch.tensor([127], dtype=torch.uint8))[0, :8]
    assert found.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_numbers_that_mxfp4_has_not_are_named(compute) -> None:
    weight = torch.zeros(1, 32, 2)
    weight[0, 3, 1] = float("inf")
    with pytest.raises(WeightConvertError, match="mxfp4 has not"):
        compute(ToMx(part="codes"), [weight], torch.uint8, (1, 2, 1, 16))
