import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import ACTIVATIONS, ExpertsOptions
from moe_pipeline.experts.activations import Activation, compute_dtype

KINDS = [
    *(dict(name=name, has_gate=gate) for name in ACTIVATIONS for gate in (True, False)),
    *(dict(name=name, interleaved=True) for name in ACTIVATIONS),
    *(dict(limit=0.8, alpha=alpha, interleaved=i) for alpha in (1.702, 1.0) for i in (True, False)),
]


def scalar_phi(name, x):
    if name == "silu":
        return x / (1 + math.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def scalar_act(activation, gate, up):
    """One number at a time, by the formulas of the papers."""
    if activation.limit is None:
        return scalar_phi(activation.name, gate) * (1.0 if up is None else up)
    gate = min(gate, activation.limit)
    up = max(-activation.limit, min(up, activation.limit))
    return gate / (1 + math.exp(-activation.alpha * gate)) * (up + 1)


def brute_force(activation, pre):
    rows = []
    for row in pre.tolist():
        half = len(row) // 2
        if not activation.has_gate:
            pairs = [(value, None) for value in row]
        elif activation.interleaved:
            pairs = list(zip(row[0::2], row[1::2], strict=True))
        else:
            pairs = list(zip(row[:half], row[half:], strict=True))
        rows.append([scalar_act(activation, *pair) for pair in pairs])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_those_of_the_formulas(seed, kind):
    activation = Activation(**kind)
    pre, weights = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    expected = brute_force(activation, pre)
    assert_close(activation(pre), expected, atol=1e-12, rtol=1e-12)
    weighted = activation.weighted(pre, weights)
    assert_close(weighted, weights[:, None] * expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_derivatives_by_hand_are_those_of_autograd(seed, kind):
    activation = Activation(**kind)
    pre = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, dtype=torch.float64, requires_grad=True)
    act = activation(pre) * weights[:, None]
    grad_act = torch.randn_like(act)
    expected = torch.autograd.grad(act, (pre, weights), grad_act)
    grad_weights = torch.empty(6, dtype=torch.float64)
    with torch.no_grad():
        again, grad_pre = activation.backward(pre, weights, grad_act.clone(), grad_weights)
        without, _ = activation.backward(pre, weights, grad_act.clone(), None)
    assert_close([again, without], [act.detach()] * 2, atol=1e-13, rtol=1e-13)
    assert_close([grad_pre, grad_weights], list(expected), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_plain_autograd_passes_gradcheck_twice(seed, kind):
    pre = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Activation(**kind), pre)
    assert torch.autograd.gradgradcheck(Activation(**kind), pre)


@pytest.mark.parametrize("at_limit", [0.8, -0.8])
def test_no_gradient_passes_at_the_limit_or_beyond(at_limit):
    activation = Activation(limit=0.8)
    values = [0.8, at_limit, 2.0, -3.0, 0.1]
    pre = torch.tensor([[g, u] for g in values for u in values], dtype=torch.float64)
    pre.requires_grad_()
    ones = torch.ones(len(pre), dtype=torch.float64)
    (expected,) = torch.autograd.grad(activation(pre).sum(), pre)
    _, grad_pre = activation.backward(pre.detach(), ones, ones[:, None].clone(), None)
    assert_close(grad_pre, expected, atol=1e-13, rtol=1e-13)
    clamped = torch.stack([pre[:, 0] >= 0.8, pre[:, 1].abs() >= 0.8], dim=1)
    assert torch.equal(grad_pre == 0, clamped)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(seed, kind, dtype):
    activation = Activation(**kind)
    pre, weights = torch.randn(16, 32).to(dtype), torch.rand(16)
    exact = partial(Activation.weighted, activation)
    got = exact(pre, weights)
    assert got.dtype == dtype
    assert torch.equal(got, exact(pre.float(), weights).to(dtype))
    grad_act = torch.randn(got.shape).to(dtype)
    _, grad_pre = activation.backward(pre, weights, grad_act.clone(), None)
    _, expected = activation.backward(pre.float(), weights, grad_act.float(), None)
    assert torch.equal(grad_pre, expected.to(dtype))


def test_no_rows_give_no_rows(seed):
    activation = Activation()
    pre = torch.zeros(0, 8)
    assert activation.weighted(pre, torch.zeros(0)).shape == (0, 4)
    act, grad_pre = activation.backward(pre, torch.zeros(0), torch.zeros(0, 4), torch.zeros(0))
    assert (act.shape, grad_pre.shape) == ((0, 4), (0, 8))


def test_the_saved_output_is_not_modified(seed):
    for kind in KINDS:
        pre = torch.randn(3, 8)
        before = pre.clone()
        act = Activation(**kind).weighted(pre, torch.rand(3))
        Activation(**kind).backward(pre, torch.rand(3), torch.randn_like(act), torch.empty(3))
        assert torch.equal(pre, before)


def test_options_name_the_activation():
    options = ExpertsOptions(swiglu_limit=7.0, swiglu_alpha=1.5)
    assert Activation.of(options, interleaved=True) == Activation(
        limit=7.0, alpha=1.5, interleaved=True
    )
    assert not Activation.of(ExpertsOptions(has_gate=False), interleaved=True).interleaved


def test_elementwise_work_is_in_fp32_or_fp64():
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert [compute_dtype(d) for d in dtypes] == [torch.float32] * 3 + [torch.float64]
