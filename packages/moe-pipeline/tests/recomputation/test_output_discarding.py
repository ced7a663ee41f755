import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from moe_pipeline.config import MoEConfig
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.recomputation.output_discarding import discard_outputs, discarded
from moe_pipeline.recomputation.recomputing import recompute, recorded
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward


class Storages(TorchDispatchMode):
    """The storages of all results, by weak reference."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.seen.append(weakref.ref(each.untyped_storage()))
        return result

    def alive_bytes(self, *others):
        """Of what still lives, besides the storages of `others`."""
        left_out = {t.untyped_storage().data_ptr() for t in others}
        alive = [s for s in (ref() for ref in self.seen) if s is not None]
        return sum(
            {s.data_ptr(): s.nbytes() for s in alive if s.data_ptr() not in left_out}.values()
        )


def block(width=8, dtype=torch.float64):
    torch.manual_seed(1)
    return nn.ModuleDict(
        {
            "norm": nn.LayerNorm(width, dtype=dtype),
            "up": nn.Linear(width, 3 * width, dtype=dtype),
            "gate": nn.Linear(width, 3 * width, bias=False, dtype=dtype),
            "down": nn.Linear(3 * width, width, bias=False, dtype=dtype),
        }
    )


def forward(block, x, call):
    """Norm, then two products of its output, an activation and a product of that."""
    h = call(block["norm"], x)
    act = call(lambda g, u: F.silu(g) * u, block["gate"](h), block["up"](h))
    return x + block["down"](act)


def plainly(function, *args):
    return function(*args)


def gradients(module, x):
    found = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    x.grad = None
    return found


@pytest.fixture
def x(seed):
    return torch.randn(5, 8, dtype=torch.float64, requires_grad=True)


def test_gradients_are_those_without_it_and_the_outputs_are_not_saved(x):
    module = block()
    plain = forward(module, x, plainly)
    plain.square().sum().backward()
    expected = gradients(module, x)
    with Storages() as kept, discard_outputs():
        y = forward(module, x, discarded)
    assert_close(y, plain, atol=0, rtol=0)
    # The gate's and up's outputs stay as inputs of the activation; norm's and its own do not.
    assert kept.alive_bytes(y, *module.parameters()) == 2 * 5 * 24 * 8
    y.square().sum().backward()
    assert_close(gradients(module, x), expected, atol=0, rtol=0)


def test_an_output_is_computed_again_once_for_all_its_users(x):
    module, calls = block(), []

    def norm(x):
        calls.append(torch.is_grad_enabled())
        return module["norm"](x)

    with discard_outputs():
        h = discarded(norm, x)
        y = sum(F.linear(h.view(1, 5, 8), module["up"].weight[i : i + 8]) for i in (0, 8, 16))
    del h
    y.square().sum().backward(retain_graph=True)
    assert len(calls) == 2
    first = gradients(module, x)
    y.square().sum().backward()
    assert len(calls) == 3
    assert_close(gradients(module, x)[:3], first[:3], atol=0, rtol=0)


def test_views_of_an_output_are_views_of_what_is_computed_again(x):
    w = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def run(call):
        h = call(torch.sin, x)
        return (h[:, 2:4].t() * w).sum() + (h.view(10, 4)[::3] ** 3).sum() + h[0].exp().sum()

    expected = torch.autograd.grad(run(plainly), [x, w])
    with discard_outputs():
        y = run(discarded)
    assert_close(torch.autograd.grad(y, [x, w]), expected, atol=0, rtol=0)


def test_random_numbers_are_the_same_again(x):
    weight = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for call in (plainly, discarded):
        torch.manual_seed(7)
        with discard_outputs():
            y = F.linear(call(lambda x: F.dropout(x, 0.5), x), weight)
        torch.rand(3)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight])])
    assert_close(results[0], results[1], atol=0, rtol=0)


def test_what_is_recorded_is_replayed(x):
    class Chooser(nn.Module):
        made = 0

        def make(self):
            self.made += 1
            return torch.rand((), dtype=torch.float64)

        def forward(self, x):
            return x * recorded(self, self.make)

    chooser, weight = Chooser(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    with discard_outputs():
        y = F.linear(discarded(chooser, x), weight)
    values = y.detach().clone()
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert chooser.made == 1
    hidden = torch.linalg.lstsq(weight.detach(), values.t()).solution
    assert hidden.shape == (8, 5)
    ratio = grad / x.sum(0)
    assert_close(ratio, ratio[0, 0].expand_as(ratio))


def test_a_split_backward_recomputes_in_its_first_half_alone(x):
    module, store, calls = block(), WeightGradStore(), []

    def counting(function, *args):
        def run(*args):
            calls.append(1)
            return function(*args)

        return discarded(run, *args)

    forward(module, x, plainly).square().sum().backward()
    expected = gradients(module, x)
    with split_backward(store), discard_outputs():
        y = forward(module, x, counting)
    assert len(calls) == 2
    with store.deferring():
        y.square().sum().backward()
    assert len(calls) == 4
    assert len(store) == 3
    store.run()
    assert len(calls) == 4
    assert_close(gradients(module, x), expected, atol=0, rtol=0)


def test_other_hooks_see_what_is_not_discarded(x):
    module, packed = block(), []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    forward(module, x, plainly).square().sum().backward()
    expected = gradients(module, x)
    with saved_tensors_hooks(pack, lambda t: t), discard_outputs():
        y = forward(module, x, discarded)
    assert packed
    y.square().sum().backward()
    assert_close(gradients(module, x), expected, atol=0, rtol=0)


def test_within_a_recompute_and_without_the_context_it_is_a_call(x):
    module = block()
    forward(module, x, plainly).square().sum().backward()
    expected = gradients(module, x)
    for wrapped in (
        lambda: forward(module, x, discarded),
        lambda: recompute(lambda x: forward(module, x, discarded), x),
    ):
        wrapped().square().sum().backward()
        assert_close(gradients(module, x), expected, atol=0, rtol=0)
        with discard_outputs():
            y = wrapped()
        y.square().sum().backward()
        assert_close(gradients(module, x), expected, atol=0, rtol=0)


def test_a_norm_before_an_moe_layer_is_discarded(seed):
    config = MoEConfig(hidden_size=8, moe_intermediate_size=6, num_experts=4, num_experts_per_tok=2)
    layer, norm = MoELayer(config), nn.LayerNorm(8)
    module = nn.ModuleList([layer, norm])
    x = torch.randn(2, 16, 8, requires_grad=True)
    results, sizes = [], []
    for call in (plainly, discarded):
        with Storages() as kept, discard_outputs():
            out = layer(call(norm, x))
            loss = out.hidden.square().sum() + out.aux_loss
        del out
        sizes.append(kept.alive_bytes(loss))
        loss.backward()
        results.append(gradients(module, x))
    assert_close(results[1], results[0], atol=0, rtol=0)
    assert sizes[0] - sizes[1] >= 2 * 16 * 8 * 4


def test_outputs_without_gradient_or_memory_are_left_alone(seed):
    x = torch.randn(5, 8)
    weight = torch.randn(3, 8, requires_grad=True)
    with discard_outputs():
        y = F.linear(discarded(torch.sin, x), weight)
        none = F.linear(discarded(torch.sin, x[:0].clone().requires_grad_()), weight)
    (y.sum() + none.sum()).backward()
    assert_close(weight.grad, torch.sin(x).sum(0).expand(3, 8))
    with discard_outputs(), torch.no_grad():
        assert not discarded(torch.sin, weight).requires_grad


def test_an_output_that_was_changed_in_place_is_saved_as_it_is(x):
    linear = nn.Linear(8, 8, dtype=torch.float64)
    x = x.detach().requires_grad_()

    def gradients(call):
        hidden = call(torch.sin, x)
        first = hidden.exp()
        return torch.autograd.grad((linear(hidden.add_(1)) * first).sum(), [x, linear.weight])

    expected = gradients(lambda function, x: function(x))
    with discard_outputs():
        found = gradients(discarded)
    assert_close(found, expected, atol=0, rtol=0)


def test_several_outputs_are_refused(x):
    with discard_outputs(), pytest.raises(TypeError, match="one tensor, got tuple"):
        discarded(lambda x: (x, x), x)


def test_a_graph_that_is_dropped_without_backward_is_freed(x):
    model = block()
    storages = Storages()
    with storages, discard_outputs():
        hidden = model["up"](discarded(model["norm"], x.sin()))
        y = model["down"](discarded(F.gelu, hidden.sin())).sum()
    del hidden, y
    gc.collect()
    assert storages.alive_bytes(x, *model.parameters()) == 0
