from functools import partial

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.experts.activations import Activation
from moe_pipeline.experts.compute import loop_experts
from moe_pipeline.experts.fp8 import (
    FP8_DTYPE,
    FP8_LARGEST,
    QuantizedRows,
    fp8_obstacle,
    fp8_product,
    quantize_rows,
    scaled_grouped_mm,
)
from moe_pipeline.experts.grouped import grouped_experts
from moe_pipeline.experts.weights import ExpertWeights
from moe_pipeline.layer.local_experts import Experts

COUNTS = (5, 0, 17, 1, 0, 9)
ROWS = sum(COUNTS)


def emulated(rows, weight, offsets):
    """The kernel's product, in fp64 on the dequantised operands; the oracle."""
    starts = [0, *offsets.tolist()]
    parts = [
        rows.dequantized()[start:end].double() @ w.double().t()
        for start, end, w in zip(starts, starts[1:], weight.dequantized(), strict=False)
    ]
    return torch.cat(parts).to(torch.bfloat16)


def representable():
    """All finite numbers of e4m3 that are not negative, by its definition."""
    numbers = [mantissa * 2.0**-9 for mantissa in range(8)]
    numbers += [(8 + m) / 8 * 2.0**e for e in range(-6, 9) for m in range(8)]
    return torch.tensor(numbers[:-1])  # the last code is NaN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 64), (3, 5, 48), (1, 16)])
def test_rows_are_rounded_to_the_nearest_number_of_e4m3(seed, shape, dtype):
    rows = (torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))).to(dtype)
    quantized = quantize_rows(rows)
    assert quantized.values.dtype == FP8_DTYPE
    assert quantized.scales.dtype == torch.float32
    assert quantized.values.shape == rows.shape
    largest = rows.float().abs().amax(-1)
    assert_close(quantized.scales, largest / FP8_LARGEST)
    assert torch.equal(quantized.values.float().abs().amax(-1), torch.full(shape[:-1], 448.0))
    wanted = rows.float() / quantized.scales.unsqueeze(-1)
    best = (wanted.abs().unsqueeze(-1) - representable()).abs().amin(-1)
    assert_close((quantized.values.float() - wanted).abs(), best, atol=1e-4, rtol=0)
    error = (quantized.dequantized() - rows.float()).abs()
    bound = torch.maximum(rows.float().abs() / 16, quantized.scales.unsqueeze(-1) * 2.0**-10)
    assert (error <= bound * 1.0001).all()


def test_rows_of_zeros_tiny_and_infinite_numbers():
    rows = torch.zeros(5, 16)
    rows[1, 3] = 1e-44
    rows[2] = 3e38
    rows[3, 5] = float("inf")
    rows[4, 7] = float("nan")
    quantized = quantize_rows(rows)
    back = quantized.dequantized()
    assert quantized.scales[:3].isfinite().all()
    assert (quantized.scales[:3] > 0).all()
    assert not back[0].any()
    assert back[1].abs().max() <= 1e-44
    assert_close(back[2], rows[2])
    assert back[3].isnan().any()
    assert back[4].isnan().any()
    small = torch.rand(3, 16) * 1e-30 + 1e-31  # still normal numbers, each of which stays
    assert_close(quantize_rows(small).dequantized(), small, rtol=1 / 16, atol=0.0)


def test_many_blocks_and_odd_strides_do_not_show(seed, monkeypatch):
    rows = torch.randn(32, 50).t()
    whole = quantize_rows(rows)
    monkeypatch.setattr("moe_pipeline.experts.fp8._BLOCK_ELEMENTS", 32 * 7)
    pieces = quantize_rows(rows)
    assert torch.equal(pieces.values.float(), whole.values.float())
    assert torch.equal(pieces.scales, whole.scales)
    assert quantize_rows(rows[:0]).values.shape == (0, 32)
    assert quantize_rows(rows[:, :0]).values.shape == (50, 0)


def weights_and_rows(device="cpu", hidden=32, intermediate=48, bias=False):
    def tensor(*shape):
        values = torch.randn(shape) * 0.3
        return values.to(device, torch.bfloat16).requires_grad_()

    experts = len(COUNTS)
    weights = ExpertWeights(
        gate_up_EGD=tensor(experts, 2 * intermediate, hidden),
        down_EDH=tensor(experts, hidden, intermediate),
        gate_up_bias_EG=tensor(experts, 2 * intermediate) if bias else None,
        down_bias_ED=tensor(experts, hidden) if bias else None,
    )
    return weights, tensor(ROWS, hidden), torch.rand(ROWS, device=device).requires_grad_()


def test_product_has_the_gradients_of_the_unrounded_product(seed):
    weights, x, _ = weights_and_rows()
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    y = fp8_product(x, weights.down_EDH.mT.contiguous(), offsets, emulated)
    assert y.dtype == torch.bfloat16
    w = weights.down_EDH.detach().mT.contiguous().requires_grad_()
    y = fp8_product(x, w, offsets, emulated)
    assert torch.equal(y, emulated(quantize_rows(x), quantize_rows(w), offsets))
    grad = torch.randn_like(y)
    grad_x, grad_w = torch.autograd.grad(y, [x, w], grad)
    parts = zip(x.split(COUNTS), grad.split(COUNTS), strict=True)
    want_w = torch.stack([g.double().t() @ r.double() for r, g in parts])
    experts = torch.repeat_interleave(torch.tensor(COUNTS))
    want_x = torch.einsum("rn,rnk->rk", grad.double(), w.double()[experts])
    assert_close(grad_x.double(), want_x, rtol=8e-3, atol=2e-2)
    assert_close(grad_w.double(), want_w, rtol=8e-3, atol=2e-2)
    assert not grad_w[1].any()


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_near_the_exact_ones(seed, bias):
    weights, x, w = weights_and_rows(bias=bias)
    activation = Activation.of(ExpertsOptions(), interleaved=False)
    product = partial(fp8_product, kernel=emulated)
    ours = grouped_experts(x, w, weights, COUNTS, activation, product)
    exact = loop_experts(x, w, weights, COUNTS, activation)
    relative = (ours.double() - exact.double()).norm() / exact.double().norm()
    assert 1e-3 < relative < 0.08
    inputs = [x, w, weights.gate_up_EGD, weights.down_EDH]
    ours_grads = torch.autograd.grad(ours.sum(), inputs)
    exact_grads = torch.autograd.grad(exact.sum(), inputs)
    for ours_grad, exact_grad in zip(ours_grads, exact_grads, strict=True):
        difference = (ours_grad.double() - exact_grad.double()).norm()
        assert difference < 0.15 * exact_grad.double().norm()


def test_no_rows_and_frozen_weights(seed):
    weights, x, _ = weights_and_rows()
    offsets = torch.zeros(len(COUNTS), dtype=torch.int32)
    y = fp8_product(x[:0], weights.gate_up_EGD, offsets, emulated)
    assert y.shape == (0, 96)
    (grad,) = torch.autograd.grad(y.sum(), weights.gate_up_EGD)
    assert not grad.any()
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fp8_product(x, weights.gate_up_EGD.detach(), offsets, emulated)
    assert x.shape not in [tensor.shape for tensor in saved]
    y.sum().backward()
    assert x.grad is not None


def experts_with(dtype=torch.bfloat16, hidden=32, **kwargs):
    config = MoEConfig(
        hidden_size=hidden,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        experts=ExpertsOptions(fp8=True, **kwargs),
    )
    return Experts(config, dtype=dtype)


def test_what_fp8_cannot_take_is_named():
    x, w = torch.ones(ROWS, 32, dtype=torch.bfloat16), torch.ones(ROWS)
    with pytest.raises(ValueError, match=r"fp8=True needs a CUDA device, got cpu; move the layer"):
        experts_with()(x, COUNTS, w)
    with pytest.raises(ValueError, match=r"needs weights in torch\.bfloat16, got torch\.float32"):
        experts_with(torch.float32)(x.float(), COUNTS, w)
    with pytest.raises(ValueError, match=r"multiples of 16, got hidden_size .*=24"):
        experts_with(hidden=24)(x[:, :24], COUNTS, w)
    for other in ({"gradient_accumulation_fusion": True}, {"experts_implementation": "loop"}):
        with pytest.raises(ValueError, match="fp8=True has its own implementation"):
            ExpertsOptions(fp8=True, **other)


@pytest.mark.gpu(needs="grouped products in fp8")
def test_kernel_equals_the_emulation(seed):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    weights, x, _ = weights_and_rows("cuda", hidden=256, intermediate=128)
    assert fp8_obstacle(weights) is None
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    rows, weight = quantize_rows(x), quantize_rows(weights.gate_up_EGD)
    theirs = scaled_grouped_mm(rows, weight, offsets.cuda()).cpu()
    ours = emulated(
        QuantizedRows(rows.values.cpu(), rows.scales.cpu()),
        QuantizedRows(weight.values.cpu(), weight.scales.cpu()),
        offsets,
    )
    assert_close(theirs, ours, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu(needs="grouped products in fp8")
def test_experts_on_a_gpu_are_near_the_exact_ones(seed):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    experts = experts_with().cuda()
    x = torch.randn(ROWS, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.rand(ROWS, device="cuda")
    ours = experts(x, COUNTS, w)
    activation = Activation.of(ExpertsOptions(), interleaved=False)
    exact = loop_experts(x, w, experts.weights, COUNTS, activation)
    assert (ours.double() - exact.double()).norm() < 0.08 * exact.double().norm()
    inputs = [x, *experts.parameters()]
    ours_grads = torch.autograd.grad(ours.sum(), inputs)
    exact_grads = torch.autograd.grad(exact.sum(), inputs)
    for ours_grad, exact_grad in zip(ours_grads, exact_grads, strict=True):
        difference = (ours_grad.double() - exact_grad.double()).norm()
        assert difference < 0.15 * exact_grad.double().norm()
