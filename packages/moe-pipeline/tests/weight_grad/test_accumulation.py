"""Products that add themselves to a weight's gradient, against autograd's own sums."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_pipeline.config import ExpertsOptions, MoEConfig, SharedExpertOptions
from moe_pipeline.layer.local_experts import Experts
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.weight_grad.accumulation import (
    GradTarget,
    InPlaceAccumulation,
    add_product,
    fits,
    is_observed,
    open_grad,
)
from moe_pipeline.weight_grad.deferred import accumulated
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward
from ranktest import run_ranks

WIDTH = 8
LIMITS = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_product_is_added_whatever_its_rows(seed, rows, transposed, dtype):
    left, right = torch.randn(rows, 5), torch.randn(rows, 7)
    to = torch.randn(7, 5).t() if transposed else torch.randn(5, 7)
    expected = to.double() + left.to(dtype).double().t() @ right.to(dtype).double()
    to = to.to(dtype)
    before = to.data_ptr()
    add_product(to, left.to(dtype).t(), right.to(dtype))
    add_product(to, left.to(dtype).t(), -right.to(dtype), torch.empty(5, 7, dtype=dtype))
    add_product(to, left.to(dtype).t(), right.to(dtype))
    limits = LIMITS if dtype == torch.float64 else {"rtol": 0.1, "atol": 0.5}
    assert_close(to.double(), expected, **limits)
    assert to.data_ptr() == before


def test_a_gradient_is_open_if_it_is_there_plain_and_laid_out_as_its_weight():
    weight = nn.Parameter(torch.ones(3, 4))
    assert open_grad(weight) is None
    weight.grad = torch.zeros(3, 4)
    assert open_grad(weight) is weight.grad
    weight.grad = torch.zeros(4, 3).t()
    assert open_grad(weight) is None
    weight.grad = torch.eye(3, 4).to_sparse()
    assert open_grad(weight) is None
    weight.grad = torch.zeros(3, 4)
    weight.requires_grad_(False)
    assert open_grad(weight) is None


def test_factors_fit_in_the_dtype_of_the_gradient():
    grad = torch.zeros(2, 2)
    assert fits(grad, torch.ones(2), torch.ones(3))
    assert not fits(grad, torch.ones(2), torch.ones(3, dtype=torch.bfloat16))


def test_a_weight_that_nobody_listens_to_is_not_observed():
    weight = nn.Parameter(torch.ones(3))
    assert not is_observed(weight)
    for _ in range(2):
        (weight * weight).sum().backward()
        assert not is_observed(weight)
    handle = weight.register_hook(lambda grad: grad)
    assert is_observed(weight)
    handle.remove()
    assert not is_observed(weight)


def test_hooks_on_a_weight_and_on_its_accumulation_are_seen():
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(lambda weight: None)
    assert is_observed(weight)
    # As libraries of data parallelism do that reduce gradients while the backward runs.
    accumulation = other.expand_as(other).grad_fn.next_functions[0][0]
    accumulation.register_hook(lambda *grads: None)
    assert is_observed(other)
    assert is_observed(other)
    del accumulation
    assert not is_observed(other)


def test_weights_of_a_model_in_ddp_are_observed():
    def fn(rank, world_size):
        model = nn.Linear(3, 3)
        before = [is_observed(p) for p in model.parameters()]
        wrapped = DistributedDataParallel(model)
        return before, [is_observed(p) for p in wrapped.parameters()]

    assert run_ranks(fn, 1) == [([False, False], [True, True])]


class Mixed(nn.Module):
    """Each kind of product that can add itself, and a weight that is used twice."""

    def __init__(self, implementation):
        super().__init__()
        config = MoEConfig(
            hidden_size=WIDTH,
            moe_intermediate_size=4,
            num_experts=4,
            num_experts_per_tok=2,
            experts=ExpertsOptions(experts_implementation=implementation),
            shared_expert=SharedExpertOptions(moe_shared_expert_intermediate_size=12),
            initializer_range=0.5,
        )
        self.moe = MoELayer(config)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.conv1d = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        x = torch.tanh(self.linear(x)) + x
        x = torch.addmm(self.bias, x, self.conv1d) @ self.plain
        x = x + self.moe(x).hidden
        return (self.linear(x) @ self.plain.t()).square().mean()


@pytest.mark.parametrize("transposed", [False, True])
def test_split_graphs_that_are_asked_for_other_gradients_add_nothing(seed, transposed):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    weight.grad = torch.ones_like(weight)
    x, store = torch.randn(3, WIDTH, requires_grad=True), WeightGradStore(InPlaceAccumulation())
    with split_backward(store):
        loss = (x @ (weight.t() if transposed else weight)).sin().sum()
        (within,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], within)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    loss.backward()
    assert not torch.equal(weight.grad, torch.ones_like(weight))


def test_experts_that_want_gradients_in_another_dtype_get_them(seed):
    config = MoEConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_experts=2,
        num_experts_per_tok=1,
        experts=ExpertsOptions(gradient_accumulation_fusion=True),
    )
    layer = MoELayer(config, dtype=torch.bfloat16)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    for _ in range(2):
        layer(torch.randn(5, WIDTH, dtype=torch.bfloat16)).hidden.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def run(model, batches, *, store_of, deferring, wrap=lambda f, x: f(x)):
    """Gradients of the weights and of the inputs of all batches."""
    inputs = []
    for x in batches:
        x = x.clone().requires_grad_()
        store = store_of()
        with split_backward(store):
            loss = wrap(model, x)
        with store.deferring() if deferring else store.whole():
            loss.backward()
        assert (len(store) > 0) == deferring
        store.run()
        inputs.append(x.grad)
    return [p.grad for p in model.parameters()], inputs


def torchs_checkpoint(function, x):
    return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("wrap", [lambda f, x: f(x), torchs_checkpoint], ids=["plain", "repeated"])
@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("implementation", ["fused", "loop", "grouped_mm"])
def test_gradients_equal_those_of_autograd_over_microbatches(seed, implementation, deferring, wrap):
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # it has no fp64
    plain = Mixed(implementation).to(dtype)
    fused = copy.deepcopy(plain)
    batches = [torch.randn(rows, WIDTH, dtype=dtype) for rows in (130, 0, 3, 200)]
    limits = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else LIMITS
    inputs = []
    for x in batches:
        inputs.append(x.clone().requires_grad_())
        plain(inputs[-1]).nan_to_num().backward()
    accumulation = InPlaceAccumulation()
    first = WeightGradStore(accumulation)
    stores = [first, *(WeightGradStore(accumulation, beside=first) for _ in batches[1:])]
    found, input_grads = run(
        fused,
        batches,
        store_of=iter(stores).__next__,
        deferring=deferring,
        wrap=lambda model, x: wrap(lambda x: model(x).nan_to_num(), x),
    )
    for got, parameter in zip(found, plain.parameters(), strict=True):
        assert_close(got, parameter.grad, **limits)
    for got, x in zip(input_grads, inputs, strict=True):
        assert_close(got, x.grad, **limits)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.data_ptr() not in given:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
def test_no_gradient_of_the_weights_size_is_made_beside_grad(seed, fusion, deferring):
    model, x = nn.Linear(300, 500, bias=False), torch.randn(128, 300)
    model.weight.grad = torch.zeros(500, 300)
    store = WeightGradStore(InPlaceAccumulation() if fusion else None)
    with Largest() as largest:
        with split_backward(store):
            loss = model(x).sum()
        with store.deferring() if deferring else store.whole():
            loss.backward()
        store.run()
    assert (largest.num_bytes < model.weight.nbytes) == fusion
    assert_close(model.weight.grad, x.sum(0).expand(500, 300))


@pytest.mark.parametrize("deferring", [False, True])
def test_hooks_get_the_gradient_of_each_microbatch(seed, deferring):
    model, seen = nn.Linear(4, 4, bias=False), []
    model.weight.register_hook(lambda grad: seen.append(grad.clone()))
    batches = [torch.randn(3, 4) for _ in range(3)]
    run(
        model,
        batches,
        store_of=lambda: WeightGradStore(InPlaceAccumulation()),
        deferring=deferring,
        wrap=lambda model, x: model(x).sum(),
    )
    assert_close(torch.stack(seen), torch.stack([x.sum(0).expand(4, 4) for x in batches]))
    assert_close(model.weight.grad, sum(seen))


def test_products_in_another_dtype_are_added_by_autograd(seed):
    plain = nn.Linear(8, 8)
    fused = copy.deepcopy(plain)
    for x in (torch.randn(5, 8), torch.randn(4, 8)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain(x).float().square().sum().backward()
        store = WeightGradStore(InPlaceAccumulation())
        with torch.autocast("cpu", dtype=torch.bfloat16), split_backward(store):
            loss = fused(x).float().square().sum()
        loss.backward()
    assert_close(fused.weight.grad, plain.weight.grad, rtol=0, atol=0)


COUNTS = (3, 0, 5, 1)


def make_experts(*, fusion, dtype=torch.float64, **options):
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


def experts_pair(**options):
    fused, plain = make_experts(fusion=True, **options), make_experts(fusion=False, **options)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def expert_step(experts, seed, counts=COUNTS, wrap=None):
    generator = torch.Generator().manual_seed(seed)
    dtype = experts.down_proj.dtype
    x = torch.randn(sum(counts), 8, generator=generator, dtype=dtype).requires_grad_()
    weights = torch.rand(sum(counts), generator=generator, dtype=dtype).requires_grad_()
    y = experts(x, counts, weights) if wrap is None else wrap(experts, x, counts, weights)
    y.square().sum().backward()
    return x.grad, weights.grad


def gradients(experts):
    return {name: parameter.grad for name, parameter in experts.named_parameters()}


def test_gradients_equal_those_through_autograd_over_several_microbatches(seed):
    fused, plain = experts_pair()
    for counts in (COUNTS, (0, 0, 0, 0), (0, 9, 0, 2), COUNTS):
        assert_close(
            expert_step(fused, seed, counts), expert_step(plain, seed, counts), atol=0, rtol=0
        )
        assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_memory_outlives_zero_grad_and_old_numbers_do_not(seed):
    fused, plain = experts_pair()
    places = []
    for counts in (COUNTS, (0, 4, 0, 0), (0, 0, 0, 0)):
        fused.zero_grad()
        plain.zero_grad()
        assert fused.down_proj.grad is None
        expert_step(fused, seed, counts)
        expert_step(plain, seed, counts)
        assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)
        places.append([parameter.grad.data_ptr() for parameter in fused.parameters()])
    assert places[0] == places[1] == places[2]


def test_a_gradient_that_is_already_there_is_added_to(seed):
    fused, plain = experts_pair()
    for experts in (fused, plain):
        for parameter in experts.parameters():
            parameter.grad = torch.ones_like(parameter)
        expert_step(experts, seed)
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_frozen_weights_get_no_gradient(seed):
    for name, _ in make_experts(fusion=True).named_parameters():
        fused, plain = experts_pair()
        for experts in (fused, plain):
            experts.get_parameter(name).requires_grad_(False)
            expert_step(experts, seed)
        assert fused.get_parameter(name).grad is None
        assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_recompute_fills_the_same_gradients(seed):
    fused, plain = experts_pair()

    def wrap(experts, *arguments):
        return checkpoint(experts, *arguments, use_reentrant=False)

    for _ in range(2):
        expert_step(fused, seed, wrap=wrap)
        expert_step(plain, seed)
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)
    kept = fused.down_proj.grad.data_ptr()
    fused.zero_grad()
    expert_step(fused, seed, wrap=wrap)
    assert fused.down_proj.grad.data_ptr() == kept


def test_weights_that_are_not_leaves_go_through_autograd(seed):
    fused, plain = experts_pair()
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


def test_each_weight_has_memory_of_its_own():
    accumulation = InPlaceAccumulation(keeps_memory=True)
    first, second = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    for parameter in (first, second):
        assert accumulation.target(parameter).accumulate is False
    assert first.grad.data_ptr() != second.grad.data_ptr()


def test_memory_follows_a_conversion_of_the_module(seed):
    fused, plain = experts_pair(dtype=torch.float32)
    expert_step(fused, seed)
    fused.zero_grad()
    fused.double()
    plain.double()
    expert_step(fused, seed)
    expert_step(plain, seed)
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)


def test_copies_and_pickles_share_no_memory(seed):
    fused, plain = experts_pair()
    expert_step(fused, seed)
    fused.zero_grad()
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        plain.zero_grad()
        expert_step(twin, seed)
        expert_step(plain, seed)
        expert_step(fused, seed + 1)
        assert_close(gradients(twin), gradients(plain), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("keeps_memory", [False, True])
def test_which_gradients_are_accumulated_in_place(keeps_memory):
    accumulation = InPlaceAccumulation(keeps_memory=keeps_memory)
    weight = nn.Parameter(torch.zeros(2, 3))
    assert (accumulation.target(weight) is not None) == keeps_memory
    weight.grad = torch.ones(2, 3)
    assert accumulation.target(weight).grad is weight.grad
    assert accumulation.target(weight).accumulate
    weight.grad = torch.zeros(2, 3).to_sparse()
    assert accumulation.target(weight) is None
    assert accumulation.target(torch.zeros(2, 3)) is None


def test_what_is_given_an_alias_outside_of_a_split_backward():
    accumulation = InPlaceAccumulation(keeps_memory=True)
    weight = nn.Parameter(torch.zeros(2, 3))
    alias, deferred = accumulated(weight, accumulation)
    assert alias is not weight and alias.data_ptr() == weight.data_ptr()
    assert deferred.leaf is weight and not deferred.is_deferring
    for other, how in ((weight * 1, accumulation), (torch.zeros(2), accumulation), (weight, None)):
        assert accumulated(other, how) == (other, None)
    weight.register_hook(lambda grad: grad)
    assert accumulated(weight, accumulation) == (weight, None)


def test_experts_with_hooks_keep_autograds_way_and_the_hooks_get_each_gradient(seed):
    fused, plain = experts_pair()
    seen = []
    fused.down_proj.register_hook(lambda grad: seen.append(grad.clone()))
    for counts in (COUNTS, (0, 9, 0, 2)):
        assert_close(expert_step(fused, seed, counts), expert_step(plain, seed, counts))
    assert_close(gradients(fused), gradients(plain), atol=1e-12, rtol=1e-12)
    assert len(seen) == 2
    assert_close(sum(seen), fused.down_proj.grad, atol=1e-12, rtol=1e-12)


def test_a_target_writes_first_and_adds_afterwards(seed):
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    full = torch.full((2, 3, 5), float("nan"))
    GradTarget(full, False).write([0], [left], [right])
    GradTarget(full, False).zero([1])
    assert_close(full, torch.stack([left @ right, torch.zeros(3, 5)]))
    GradTarget(full, True).write([0], [left], [right])
    GradTarget(full, True).zero([0, 1])
    assert_close(full[0], 2 * (left @ right))


@pytest.mark.parametrize("way", ["grad", "inputs"])
@pytest.mark.parametrize("begun", [False, True])
def test_backwards_that_ask_for_other_tensors_add_nothing(seed, way, begun):
    config = MoEConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_experts=4,
        num_experts_per_tok=2,
        experts=ExpertsOptions(gradient_accumulation_fusion=True),
    )
    layer = MoELayer(config).double()
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)

    def gradients():
        return {name: weight.grad for name, weight in layer.named_parameters()}

    layer(x).hidden.sum().backward()
    once = {name: grad.clone() for name, grad in gradients().items()}
    of_x, x.grad = x.grad, None
    if not begun:
        layer.zero_grad()
    before = {name: None if g is None else g.clone() for name, g in gradients().items()}
    if way == "grad":
        (found,) = torch.autograd.grad(layer(x).hidden.sum(), x)
    else:
        layer(x).hidden.sum().backward(inputs=[x])
        found = x.grad
    assert_close(found, of_x, **LIMITS)
    for name, grad in gradients().items():
        assert (grad is None) == (before[name] is None), name
        assert grad is None or torch.equal(grad, before[name]), name
    layer(x).hidden.sum().backward()
    for name, grad in gradients().items():
        assert_close(grad, once[name] * (1 + begun), **LIMITS)
