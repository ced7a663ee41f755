import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from moe_pipeline.config import ExpertsOptions, MoEConfig, SharedExpertOptions
from moe_pipeline.experts import chunks as expert_chunks
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.recomputation.recomputing import recompute, recompute_contexts
from moe_pipeline.weight_grad.deferred import defer, deferrable
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward
from ranktest import run_ranks

PRODUCTS = {"mm", "addmm", "addmm_", "addmv_", "bmm", "baddbmm", "_grouped_mm"}
LAYERS = 16


class Products(TorchDispatchMode):
    """Counts matrix products and their multiplications."""

    def __init__(self):
        super().__init__()
        self.count = self.multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            first, second = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            self.count += 1
            self.multiplications += first.numel() * second.shape[-1]
        return func(*args, **(kwargs or {}))

    def figures(self):
        return self.count, self.multiplications


def counted(run):
    with Products() as products:
        run()
    return products.figures()


def gradients(module, x):
    found = {name: p.grad for name, p in module.named_parameters()}
    found["input"] = x.grad
    module.zero_grad()
    x.grad = None
    return found


def whole_and_split(module, forward, x):
    """Gradients and products of a whole backward without a store, and of I and W with one."""
    store = WeightGradStore()
    loss = forward(x)
    whole = counted(loss.backward)
    expected = gradients(module, x)
    with split_backward(store):
        loss = forward(x)
    with store.deferring():
        inputs = counted(loss.backward)
    assert len(store) > 0
    weights = counted(store.run)
    assert len(store) == 0
    assert store.held_bytes == 0
    return expected, gradients(module, x), whole, inputs, weights


def assert_nothing_is_doubled(module, forward, x):
    expected, got, whole, inputs, weights = whole_and_split(module, forward, x)
    assert_close(got, expected, atol=0, rtol=0)
    assert (inputs[0] + weights[0], inputs[1] + weights[1]) == whole
    return inputs, weights


class Scaled(torch.autograd.Function):
    """The function of the documentation: a product that is not torch's."""

    @staticmethod
    def forward(ctx, x, weight, token):
        ctx.save_for_backward(x, weight)
        ctx.token = token
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = defer(ctx.token, lambda x, grad: x.t() @ grad, x, grad)
        return grad @ weight.t(), grad_weight, None


class Custom(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / width)

    def forward(self, x):
        return Scaled.apply(x, *deferrable(self.weight))


def layers_of(kind, width=6):
    def layer():
        if kind == "custom":
            return nn.Sequential(Custom(width), nn.Tanh(), Custom(width))
        return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    return nn.ModuleList(layer() for _ in range(LAYERS)).double()


def forward_of(layers, region):
    """The stage without recompute, or with recompute of each layer or all of it."""

    def all_of(x):
        for layer in layers:
            x = layer(x)
        return x

    def each(wrap):
        def forward(x):
            for layer in layers:
                x = wrap(layer, x)
            return x

        return forward

    def torchs(function, x):
        return checkpoint(function, x, use_reentrant=False)

    def with_contexts(function, x):
        return checkpoint(function, x, use_reentrant=False, context_fn=recompute_contexts)

    forward = {
        "none": all_of,
        "torch layers": each(torchs),
        "torch stage": lambda x: torchs(all_of, x),
        "our layers": each(recompute),
        "our stage": lambda x: recompute(all_of, x),
        "contexts": lambda x: with_contexts(all_of, x),
        "nested": lambda x: recompute(each(recompute), x),
    }[region]
    return lambda x: forward(x).square().sum()


REGIONS = ("none", "torch layers", "torch stage", "our layers", "our stage", "contexts", "nested")


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("kind", ["linear", "custom"])
def test_input_and_weight_halves_do_the_products_of_one_backward(seed, kind, region):
    layers = layers_of(kind)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    inputs, weights = assert_nothing_is_doubled(layers, forward_of(layers, region), x)
    assert weights[0] == 2 * LAYERS
    assert inputs[0] >= 2 * LAYERS


EXPERTS = [("fused", False), ("fused", True), ("loop", False), ("grouped_mm", False)]


def moe_layer(implementation, fusion, dtype, has_bias=False):
    config = MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_experts=5,
        num_experts_per_tok=2,
        experts=ExpertsOptions(
            experts_implementation=implementation,
            gradient_accumulation_fusion=fusion,
            has_bias=has_bias,
        ),
        shared_expert=SharedExpertOptions(
            moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True
        ),
        moe_latent_size=24,
        initializer_range=0.5,
    )
    return MoELayer(config, dtype=dtype)


def moe_loss(layer):
    def forward(x):
        out = layer(x)
        return out.hidden.float().square().sum() + out.aux_loss

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("implementation", "fusion"), EXPERTS)
def test_moe_layers_do_the_products_of_one_backward(seed, implementation, fusion, dtype):
    layer = moe_layer(implementation, fusion, dtype)
    x = torch.randn(2, 9, 16, dtype=dtype, requires_grad=True)
    inputs, weights = assert_nothing_is_doubled(layer, moe_loss(layer), x)
    # Router, shared expert with its gate and the latent projections; experts in one call or each.
    assert weights[0] >= 4 + 3 + 2
    assert weights[1] < inputs[1] * 1.01


@pytest.mark.parametrize("wrap", ["ours", "torch's"])
@pytest.mark.parametrize(("implementation", "fusion"), EXPERTS)
def test_recomputed_moe_layers_replay_and_repeat_nothing_in_weights(
    seed, implementation, fusion, wrap
):
    layer = moe_layer(implementation, fusion, torch.float32)
    plain = moe_loss(layer)

    def forward(x):
        if wrap == "ours":
            return recompute(plain, x)
        return checkpoint(plain, x, use_reentrant=False, context_fn=recompute_contexts)

    x = torch.randn(2, 9, 16, requires_grad=True)
    expected, got, whole, inputs, weights = whole_and_split(layer, forward, x)
    assert_close(got, expected, atol=0, rtol=0)
    # The loop's experts are one function under a store, which stops ahead of all their products.
    total = inputs[0] + weights[0], inputs[1] + weights[1]
    assert total == whole or (implementation == "loop" and total < whole)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(("implementation", "fusion"), EXPERTS[:3])
def test_split_moe_layers_with_biases_equal_whole_backwards(seed, implementation, fusion, tokens):
    layer = moe_layer(implementation, fusion, torch.float64, has_bias=True)
    x = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    expected, got, *_ = whole_and_split(layer, moe_loss(layer), x)
    assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("region", REGIONS)
def test_a_whole_backward_of_a_split_graph_is_an_ordinary_one(seed, region):
    layers, store = layers_of("linear"), WeightGradStore()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    forward = forward_of(layers, region)
    whole = counted(forward(x).backward)
    expected = gradients(layers, x)
    with split_backward(store):
        loss = forward(x)
    with store.at_once():
        assert counted(loss.backward) == whole
    assert len(store) == 0
    assert_close(gradients(layers, x), expected, atol=0, rtol=0)


def test_plain_checkpoints_need_the_context_and_recompute_does_not(seed):
    layers, store = layers_of("linear"), WeightGradStore()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    with split_backward(store):
        ours, torchs = (forward_of(layers, f"{whose} stage")(x) for whose in ("our", "torch"))
    ours.backward()
    with pytest.raises(CheckpointError):
        torchs.backward()


def test_backward_takes_edges_and_gradients_as_torch_does(seed):
    layer, store = nn.Linear(4, 3), WeightGradStore()
    x, grad = torch.randn(2, 4, requires_grad=True), torch.randn(2, 3)
    edge = torch.autograd.graph.get_gradient_edge
    expected = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], grad)

    def made():
        with split_backward(store):
            return checkpoint(layer, x, use_reentrant=False)

    runs = [
        lambda y: y.backward(grad),
        lambda y: y.backward(gradient=grad),
        lambda y: torch.autograd.backward(y, grad),
        lambda y: torch.autograd.backward([edge(y)], [grad]),
        lambda y: torch.autograd.backward((y.sum() * 0, y), grad_tensors=(None, grad)),
    ]
    for run in runs:
        y = made()
        with store.deferring():
            run(y)
        assert layer.weight.grad is None
        store.run()
        assert_close([x.grad, layer.weight.grad, layer.bias.grad], list(expected))
        layer.zero_grad()
        x.grad = None
    with store.deferring(), pytest.raises(RuntimeError, match=r"shape \(2, 3\)"):
        made().backward()


def test_two_microbatches_may_wait_in_any_order(seed):
    layers = layers_of("linear")
    xs = [torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (5, 3)]
    forward = forward_of(layers, "none")
    for x in xs:
        forward(x).backward()
    expected = gradients(layers, xs[0])
    stores, losses = [WeightGradStore(), WeightGradStore()], []
    for x, store in zip(xs, stores, strict=True):
        x.grad = None
        with split_backward(store):
            losses.append(forward(x))
    for loss, store in zip(losses, stores, strict=True):
        with store.deferring():
            loss.backward()
    for store in reversed(stores):
        store.run()
    assert_close(gradients(layers, xs[0]), expected, atol=1e-12, rtol=1e-12)


def test_backward_in_another_thread_finds_the_queue(seed):
    layer, store = nn.Linear(4, 3), WeightGradStore()
    with split_backward(store):
        loss = layer(torch.randn(2, 4)).sum()
    with store.deferring():
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join(timeout=60)
    assert len(store) == 1
    assert layer.weight.grad is None


def test_other_threads_and_other_forwards_are_not_split(seed):
    layer, store = nn.Linear(4, 3), WeightGradStore()
    with split_backward(store):
        losses = []
        thread = threading.Thread(target=lambda: losses.append(layer(torch.ones(2, 4)).sum()))
        thread.start()
        thread.join(timeout=60)
    losses.append(layer(torch.ones(2, 4)).sum())
    with store.deferring():
        for loss in losses:
            loss.backward()
    assert len(store) == 0
    assert_close(layer.weight.grad, torch.full((3, 4), 4.0))


def test_work_runs_in_order_and_an_error_names_it():
    store, done = WeightGradStore(), []

    def failing():
        raise ZeroDivisionError("no such gradient")

    store.put(lambda: done.append(1))
    store.put(failing, name="stage 3")
    store.put(lambda: done.append(2))
    assert len(store) == 3
    with pytest.raises(ZeroDivisionError) as caught:
        store.run()
    assert caught.value.__notes__ == ["in deferred work 2 of 3: stage 3"]
    assert (len(store), done) == (0, [1])
    store.put(lambda: done.append(3))
    store.run()
    assert done == [1, 3]


def test_held_bytes_are_those_of_inputs_and_output_gradients(seed):
    store = WeightGradStore()
    layer = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    x = torch.randn(10, 8, requires_grad=True)
    with split_backward(store):
        y = layer(x)
    assert store.held_bytes == 0
    with store.deferring():
        y.backward(torch.ones(10, 2))
    assert store.held_bytes == 4 * 10 * (8 + 4 + 4 + 2)
    held = torch.zeros(7)
    store.put(lambda: None, held=[held, held[2:]])
    assert store.held_bytes == 4 * 10 * (8 + 4 + 4 + 2) + 4 * 7


def test_errors_leave_no_mode_behind(seed):
    store, layer = WeightGradStore(), nn.Linear(2, 2)
    for context in (split_backward(store), store.deferring(), store.at_once()):
        with pytest.raises(KeyError), context:
            raise KeyError
    layer(torch.ones(1, 2)).sum().backward()
    assert len(store) == 0
    assert layer.weight.grad is not None


@pytest.mark.parametrize("implementation", ["fused", "loop", "grouped_mm"])
def test_frozen_parameters_of_moe_layers_make_no_work(seed, implementation):
    layer = moe_layer(implementation, False, torch.float32)
    x = torch.randn(9, 16, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
        expected, got, whole, inputs, weights = whole_and_split(layer, moe_loss(layer), x)
        assert got[name] is None
        assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert inputs[0] + weights[0] == whole[0]
        layer.get_parameter(name).requires_grad_(True)
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    store = WeightGradStore()
    with split_backward(store):
        loss = moe_loss(layer)(x)
    with store.deferring():
        loss.backward()
    assert len(store) == 0


def test_layers_over_ranks_split_their_backwards(seed):
    tokens = [5, 3]

    def fn(rank, world_size):
        torch.manual_seed(seed)
        config = MoEConfig(
            hidden_size=8, moe_intermediate_size=6, num_experts=4, num_experts_per_tok=2
        )
        groups = MoEGroups(ep=dist.group.WORLD, tokens=dist.group.WORLD)
        layer = MoELayer(config, groups=groups, dtype=torch.float64)
        x = torch.randn(tokens[rank], 8, dtype=torch.float64, requires_grad=True)
        same = []
        for wrap in (lambda f, x: f(x), recompute):

            def forward(x, wrap=wrap):
                out = wrap(layer, x)
                return out.hidden.square().sum() + out.aux_loss

            expected, got, whole, inputs, weights = whole_and_split(layer, forward, x)
            same.append(all(torch.equal(got[name], expected[name]) for name in expected))
            same.append(inputs[0] + weights[0] == whole[0])
        return same

    assert run_ranks(fn, 2) == [[True] * 4] * 2


def test_a_stage_that_is_only_run_forward_leaves_nothing(seed):
    layer, store = nn.Linear(4, 3), WeightGradStore()
    with split_backward(store), torch.no_grad():
        assert_close(layer(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    with split_backward(store):
        layer(torch.ones(2, 4))
    assert (len(store), store.held_bytes) == (0, 0)


@pytest.mark.parametrize("fusion", [False, True])
def test_many_chunks_of_experts_are_deferred_chunk_by_chunk(seed, fusion, monkeypatch):
    monkeypatch.setattr(expert_chunks, "_CPU_CHUNK_ELEMENTS", 8 * 6)
    layer = moe_layer("fused", fusion, torch.float64, has_bias=True)
    layer.experts.gate_up_proj.requires_grad_(fusion)
    x = torch.randn(31, 16, dtype=torch.float64, requires_grad=True)
    assert_nothing_is_doubled(layer, moe_loss(layer), x)


@pytest.mark.gpu(needs="thread of autograd's own for a device")
@pytest.mark.parametrize("region", REGIONS)
def test_gpu_backward_on_autograds_own_thread_is_split(seed, region):
    layers = layers_of("linear").cuda()
    x = torch.randn(5, 6, dtype=torch.float64, device="cuda", requires_grad=True)
    _, weights = assert_nothing_is_doubled(layers, forward_of(layers, region), x)
    assert weights[0] == 2 * LAYERS


@pytest.mark.gpu(needs="thread of autograd's own for a device")
@pytest.mark.parametrize(("implementation", "fusion"), EXPERTS)
def test_gpu_moe_layers_split_their_backwards(seed, implementation, fusion):
    layer = moe_layer(implementation, fusion, torch.bfloat16).cuda()
    x = torch.randn(2, 9, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    expected, got, whole, inputs, weights = whole_and_split(layer, moe_loss(layer), x)
    assert_close(got, expected)
    assert inputs[0] + weights[0] == whole[0]


def test_backwards_without_memory_are_split_as_real_ones_are():
    def pieces(*_):
        found = []
        for mode in (FakeTensorMode(), nullcontext()):
            with mode:
                layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4))
                store = WeightGradStore()
                with split_backward(store):
                    again = torch.ones(2, 8) @ layers[0].weight.t()
                    out = layers(torch.ones(3, 8)).sum() + again.sum()
                with store.deferring():
                    out.backward()
                before = [p.grad is None for p in layers.parameters()]
                waiting = len(store), store.held_bytes
                store.run()
                found.append((before, waiting, [tuple(p.grad.shape) for p in layers.parameters()]))
        return found

    # In a process of its own: autograd's threads, which fake tensors start, do not survive a fork.
    fake, real = run_ranks(pieces, 1, init=False)[0]
    assert fake == real
    assert fake[0] == [True, True, False] and fake[1][0] == 3
