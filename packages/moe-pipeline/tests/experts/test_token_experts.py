from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from comm_collectives import combine, dispatch
from moe_pipeline.config import ExpertsOptions
from moe_pipeline.experts.compute import experts_function
from moe_pipeline.experts.token_experts import token_experts_function
from moe_pipeline.experts.weights import ExpertWeights
from moe_pipeline.weight_grad.accumulation import InPlaceAccumulation

EXPERTS, HIDDEN, INTERMEDIATE = 6, 12, 8


def make(dtype=torch.float64, *, bias=False, accumulation=None):
    shapes = [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    shapes += [(2 * INTERMEDIATE,), (HIDDEN,)] if bias else []
    leaves = [torch.randn(EXPERTS, *s, dtype=dtype).mul(0.5).requires_grad_() for s in shapes]
    biases = leaves[2:] or [None, None]
    return leaves, ExpertWeights(
        gate_up_EGD=leaves[0],
        down_EDH=leaves[1],
        gate_up_bias_EG=biases[0],
        down_bias_ED=biases[1],
        accumulation=accumulation,
    )


def routing(tokens, choices, dropped=0.0):
    idx = torch.stack([torch.randperm(EXPERTS)[:choices] for _ in range(tokens)] or [])
    return idx.masked_fill(torch.rand(tokens, choices) < dropped, -1)


def by_dispatch(x, idx, router, weights, options):
    there = dispatch(x, idx, router, num_experts=EXPERTS)
    rows = there.num_tokens_per_expert
    return combine(
        experts_function(there.x, there.topk_weights, weights, rows, options), there.handle
    )


def results(function, x, idx, router, leaves, weights, options):
    inputs = [x.detach().requires_grad_(), router.detach().requires_grad_(), *leaves]
    y = function(inputs[0], idx, inputs[1], weights, options)
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


@pytest.mark.parametrize("implementation", ["loop", "fused", "grouped_mm"])
@pytest.mark.parametrize(("choices", "dropped"), [(1, 0.0), (3, 0.0), (3, 0.4), (6, 0.0), (2, 1.0)])
def test_values_and_gradients_are_those_of_dispatch_and_combine(
    seed, implementation, choices, dropped
):
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    options = ExpertsOptions(experts_implementation=implementation, has_bias=True)
    leaves, weights = make(dtype, bias=True)
    idx = routing(9, choices, dropped)
    case = (torch.randn(9, HIDDEN, dtype=dtype), idx, torch.rand(9, choices, dtype=dtype))
    got = results(token_experts_function, *case, leaves, weights, options)
    expected = results(
        by_dispatch, *case, leaves, weights, ExpertsOptions(experts_implementation="loop")
    )
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    scale = max(1.0, *(e.abs().max().item() for e in expected))
    assert_close(got, expected, atol=limit * scale, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_dispatch_and_combine(seed, dtype):
    leaves, weights = make(dtype)
    case = (torch.randn(40, HIDDEN).to(dtype), routing(40, 4, 0.2), torch.rand(40, 4))
    options = ExpertsOptions(experts_implementation="fused")
    got = results(token_experts_function, *case, leaves, weights, options)
    expected = results(by_dispatch, *case, leaves, weights, options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_gradcheck(seed):
    leaves, weights = make(bias=True)
    idx, options = routing(3, 2, 0.2), ExpertsOptions(has_bias=True)
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    router = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def function(x, router, *_):
        return token_experts_function(x, idx, router, weights, options)

    assert torch.autograd.gradcheck(function, (x, router, *leaves), fast_mode=True)


def test_a_token_is_saved_once_and_not_once_for_each_choice(seed):
    tokens, choices = 10, 4
    leaves, weights = make(torch.float32)
    known = {leaf.data_ptr() for leaf in leaves}
    saved = {}

    def pack(tensor):
        if tensor.data_ptr() not in known:
            saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    router, idx = torch.rand(tokens, choices, requires_grad=True), routing(tokens, choices)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        token_experts_function(x, idx, router, weights, ExpertsOptions())
    rows = tokens * choices
    order, router_weights = rows, rows
    assert sorted(saved.values()) == sorted(
        [tokens * HIDDEN, rows * 2 * INTERMEDIATE, order, router_weights]
    )


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
@pytest.mark.parametrize("implementation", ["loop", "fused", "grouped_mm"])
def test_no_tokens_and_no_choices_give_zeros(implementation, shape):
    leaves, weights = make(torch.float32)
    options = ExpertsOptions(experts_implementation=implementation)
    x = torch.randn(shape[0], HIDDEN, requires_grad=True)
    idx, router = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    out = token_experts_function(x, idx, router, weights, options)
    assert torch.equal(out, torch.zeros(shape[0], HIDDEN))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves)


def test_recompute_and_kept_gradients_give_the_same_numbers(seed):
    case = (torch.randn(9, HIDDEN, dtype=torch.float64), routing(9, 3))
    router, options = torch.rand(9, 3, dtype=torch.float64), ExpertsOptions()
    leaves, weights = make()
    expected = results(token_experts_function, *case, router, leaves, weights, options)[3:]
    kept = ExpertWeights(
        gate_up_EGD=leaves[0],
        down_EDH=leaves[1],
        accumulation=InPlaceAccumulation(keeps_memory=True),
    )
    x = case[0].clone().requires_grad_()
    out = checkpoint(token_experts_function, x, case[1], router, kept, options, use_reentrant=False)
    out.square().sum().backward()
    assert_close([leaf.grad for leaf in leaves], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_gate_and_up_may_alternate(seed, implementation):
    _, halves = make()
    gate, up = halves.gate_up_EGD.chunk(2, dim=1)
    alternating = replace(
        halves, gate_up_EGD=torch.stack((gate, up), dim=2).flatten(1, 2), interleaved=True
    )
    options = ExpertsOptions(experts_implementation=implementation)
    case = (torch.randn(9, HIDDEN).double(), routing(9, 3), torch.rand(9, 3).double())
    expected = token_experts_function(*case, halves, options)
    assert_close(token_experts_function(*case, alternating, options), expected)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    _, weights = make(torch.float32)
    options = ExpertsOptions()
    idx, router = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"expect \[rows, 12\], got shape \(3, 5\)"):
        token_experts_function(torch.zeros(3, 5), idx, router, weights, options)
    with pytest.raises(ValueError, match="one line for each row"):
        token_experts_function(torch.zeros(4, HIDDEN), idx, router, weights, options)
    with pytest.raises(ValueError, match="one line for each row"):
        token_experts_function(torch.zeros(3, HIDDEN), idx, router[:, :1], weights, options)
    counts = torch.ones(4, dtype=torch.int64)  # as many experts as rows
    with pytest.raises(ValueError, match="must both be"):
        token_experts_function(torch.zeros(4, HIDDEN), counts, torch.ones(4), weights, options)
    with pytest.raises(TypeError, match=r"topk_idx is torch\.bool; convert"):
        token_experts_function(torch.zeros(3, HIDDEN), idx.bool(), router, weights, options)
    with pytest.raises(TypeError, match="got rows in torch"):
        token_experts_function(torch.zeros(3, HIDDEN).double(), idx, router, weights, options)
