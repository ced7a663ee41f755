import copy
import pickle

import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.layer.local_experts import Experts
from moe_pipeline.weight_grad.grad_buffers import GradBuffers, GradTarget

COUNTS = (3, 0, 5, 1)


def make(*, fusion, dtype=torch.float64, **options):
    config = MoEConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        num_experts=4,
        num_experts_per_tok=1,
        experts=ExpertsOptions(has_bias=True, gradient_accumulation_fusion=fusion, **options),
        initializer_range=0.5,
    )
    experts = Experts(config, dtype=dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def pair(**options):
    fused, plain = make(fusion=True, **options), make(fusion=False, **options)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def step(experts, seed, counts=COUNTS, wrap=None):
    generator = torch.Generator().manual_seed(seed)
    dtype = experts.down_proj.dtype
    x = torch.randn(sum(counts), 8, generator=generator, dtype=dtype).requires_grad_()
    weights = torch.rand(sum(counts), generator=generator, dtype=dtype).requires_grad_()
    y = experts(x, counts, weights) if wrap is None else wrap(experts, x, counts, weights)
    y.square().sum().backward()
    return x.grad, weights.grad


def gradients(experts):
    return {name: parameter.grad for name, parameter in experts.named_parameters()}


def test_gradients_equal_those_through_autograd_over_several_micro_batches(seed):
    fused, plain = pair()
    for counts in (COUNTS, (0, 0, 0, 0), (0, 9, 0, 2), COUNTS):
        assert_close(step(fused, seed, counts), step(plain, seed, counts), atol=0, rtol=0)
        assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_memory_outlives_zero_grad_and_old_numbers_do_not(seed):
    fused, plain = pair()
    places = []
    for counts in (COUNTS, (0, 4, 0, 0), (0, 0, 0, 0)):
        fused.zero_grad()
        plain.zero_grad()
        assert fused.down_proj.grad is None
        step(fused, seed, counts)
        step(plain, seed, counts)
        assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)
        places.append([parameter.grad.data_ptr() for parameter in fused.parameters()])
    assert places[0] == places[1] == places[2]


def test_a_gradient_that_is_already_there_is_added_to(seed):
    fused, plain = pair()
    for experts in (fused, plain):
        for parameter in experts.parameters():
            parameter.grad = torch.ones_like(parameter)
        step(experts, seed)
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_frozen_weights_get_no_gradient(seed):
    for name, _ in make(fusion=True).named_parameters():
        fused, plain = pair()
        for experts in (fused, plain):
            experts.get_parameter(name).requires_grad_(False)
            step(experts, seed)
        assert fused.get_parameter(name).grad is None
        assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_recompute_fills_the_same_gradients(seed):
    fused, plain = pair()

    def wrap(experts, *arguments):
        return checkpoint(experts, *arguments, use_reentrant=False)

    for _ in range(2):
        step(fused, seed, wrap=wrap)
        step(plain, seed)
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)
    kept = fused.down_proj.grad.data_ptr()
    fused.zero_grad()
    step(fused, seed, wrap=wrap)
    assert fused.down_proj.grad.data_ptr() == kept


def test_weights_that_are_not_leaves_go_through_autograd(seed):
    fused, plain = pair()
    x, weights = torch.randn(9, 8, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    results = []
    for experts in (fused, plain):
        leaf = experts.down_proj.detach().clone().requires_grad_()
        y = torch.func.functional_call(experts, {"down_proj": 2 * leaf}, (x, COUNTS, weights))
        y.square().sum().backward()
        results.append(leaf.grad)
    assert_close(results[0], results[1], atol=1e-12, rtol=1e-12)
    assert fused.down_proj.grad is None
    assert fused.gate_up_proj.grad is not None


def test_two_weights_under_one_name_have_memory_of_their_own():
    buffers = GradBuffers()
    first, second = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    for parameter in (first, second):
        assert buffers.target("down", parameter).accumulate is False
    assert first.grad.data_ptr() != second.grad.data_ptr()


def test_memory_follows_a_conversion_of_the_module(seed):
    fused, plain = pair(dtype=torch.float32)
    step(fused, seed)
    fused.zero_grad()
    fused.double()
    plain.double()
    step(fused, seed)
    step(plain, seed)
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_copies_and_pickles_share_no_memory(seed):
    fused, plain = pair()
    step(fused, seed)
    fused.zero_grad()
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        plain.zero_grad()
        step(twin, seed)
        step(plain, seed)
        step(fused, seed + 1)
        assert_close(gradients(twin), gradients(plain), atol=1e-12, rtol=1e-12)


def test_what_is_served():
    weight = nn.Parameter(torch.zeros(2, 3))
    assert GradBuffers.serves(weight)
    assert not GradBuffers.serves(weight * 1)
    assert not GradBuffers.serves(torch.zeros(2, 3))
    weight.grad = torch.zeros(2, 3).to_sparse()
    assert not GradBuffers.serves(weight)


def test_a_target_writes_first_and_adds_afterwards(seed):
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    full = torch.full((2, 3, 5), float("nan"))
    GradTarget(full, False).write([0], [left], [right])
    GradTarget(full, False).zero([1])
    assert_close(full, torch.stack([left @ right, torch.zeros(3, 5)]))
    GradTarget(full, True).write([0], [left], [right])
    GradTarget(full, True).zero([0, 1])
    assert_close(full[0], 2 * (left @ right))
