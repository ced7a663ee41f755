import random

import pytest
import torch

from weight_convert.compute import elementwise, fp8
from weight_convert.errors import WeightConvertError
from weight_convert.operations import FromBlocks, ToBlocks

E4M3 = torch.float8_e4m3fn
SHAPES = [(5, 7), (4, 6), (2, 3, 5), (1, 9), (9, 1)]


def every_block(shape, block, scales):
    """A scale for each element, by counting."""
    out = torch.empty(shape)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)):
        *outer, row, column = index.tolist()
        out[(*outer, row, column)] = scales[(*outer, row // block[0], column // block[1])]
    return out


def grid(shape, block):
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_is_code_times_the_scale_of_its_block(compute, monkeypatch, chunk, shape, dtype):
    monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", chunk)
    block = (random.randint(1, 4), random.randint(1, 4))
    codes, scales = torch.randn(shape).to(E4M3), torch.rand(grid(shape, block)) + 0.1
    found = compute(FromBlocks(block=block), [codes, scales], dtype, shape)
    expected = (codes.float() * every_block(shape, block, scales)).to(dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_every_code_comes_back_by_its_kept_scale(compute, dtype, scale_dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).repeat(6, 1)
    scales = torch.tensor([2.0**-117, 1e-20, 0.3, 1.0, 7.7e4, 2.0**117])[:, None].to(scale_dtype)
    block = (1, 256)
    weight = compute(FromBlocks(block=block), [codes, scales], dtype, codes.shape)
    again = compute(ToBlocks(block=block, part="codes"), [weight, scales], E4M3, codes.shape)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


def test_former_codes_stand_where_scales_lose_them_and_only_there(compute) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).repeat(5, 1)
    scales = torch.tensor([0.0, float("nan"), float("inf"), 3e38, 1e-45])[:, None]
    block = (1, 256)
    weight = compute(FromBlocks(block=block), [codes, scales], torch.bfloat16, codes.shape)
    operation = ToBlocks(block=block, part="codes")
    again = compute(operation, [weight, scales, codes], E4M3, codes.shape)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    weight[3, 5] = 3e38  # a weight that was changed is encoded anew: 3e38 is one scale
    again = compute(operation, [weight, scales, codes], E4M3, codes.shape)
    assert again[3, 5].item() == 1.0
    weight[3, 6] = float("inf")
    with pytest.raises(WeightConvertError, match="infinite or undefined"):
        compute(operation, [weight, scales, codes], E4M3, codes.shape)


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_scales_put_the_largest_weight_of_a_block_at_the_largest_code(
    compute, monkeypatch, chunk, shape
) -> None:
    monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(elementwise, "CHUNK_ELEMENTS", chunk)
    block = (2, 3)
    weight = torch.randn(shape).to(torch.bfloat16)
    scales = compute(
        ToBlocks(block=block, part="scales"), [weight], torch.float32, grid(shape, block)
    )
    codes = compute(ToBlocks(block=block, part="codes"), [weight], E4M3, shape)
    every = every_block(shape, block, scales)
    expected = (weight.float() / every).clamp(-448, 448).to(E4M3)
    wrong = (
        codes.float() - expected.float()
    ).abs() > expected.float().abs() / 8  # one step at a tie
    assert not wrong.any() and (codes.float().abs() <= 448).all()
    largest = every_block(shape, block, torch.ones(grid(shape, block)))
    assert largest.numel() == codes.numel() and codes.float().abs().max() == 448


def test_blocks_of_zeros_have_the_scale_one_and_infinite_weights_are_named(compute) -> None:
    operation = ToBlocks(block=(2, 2), part="scales")
    scales = compute(operation, [torch.zeros(2, 2)], torch.float32, (1, 1))
    assert scales.item() == 1.0
    with pytest.raises(WeightConvertError, match="000 holds infinite or undefined numbers"):
        compute(operation, [torch.full((2, 2), float("nan"))], torch.float32, (1, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_beside_numbers_too_small_for_a_factor_stay_zeros(compute, dtype) -> None:
    weight = torch.tensor([[1e-38, 0.0, -0.0, -5e-39], [1e-37, 0.0, 0.0, 0.0]]).to(dtype)
    block = (1, 4)
    scales = compute(ToBlocks(block=block, part="scales"), [weight], torch.float32, (2, 1))
    codes = compute(ToBlocks(block=block, part="codes"), [weight], E4M3, weight.shape)
    again = compute(FromBlocks(block=block), [codes, scales], torch.float32, weight.shape)
    assert torch.allclose(again, weight.float(), rtol=0.07, atol=0)
    given = compute(ToBlocks(block=block, part="codes"), [weight, 0 * scales], E4M3, weight.shape)
    assert not given.float()[weight == 0].any()
