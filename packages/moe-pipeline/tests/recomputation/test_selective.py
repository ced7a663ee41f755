import copy
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.recomputation.output_discarding import discard_outputs, discarded
from moe_pipeline.recomputation.recomputing import recompute
from moe_pipeline.recomputation.selective import (
    MATRIX_PRODUCTS,
    recompute_modules,
    selective_recompute,
)
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward

ATEN = torch.ops.aten
PRODUCTS = {"mm", "addmm", "bmm", "_grouped_mm"}


class Watch(TorchDispatchMode):
    """Counts matrix products and remembers the storages of all results, weakly."""

    def __init__(self):
        super().__init__()
        self.products, self.storages = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func._schema.name.removeprefix("aten::") in PRODUCTS
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.storages.append(weakref.ref(each.untyped_storage()))
        return result

    def alive_bytes(self):
        alive = [s for s in (ref() for ref in self.storages) if s is not None]
        return sum({s.data_ptr(): s.nbytes() for s in alive}.values())


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, *, p=0.0):
        return self.down(F.dropout(F.gelu(self.up(x)), p))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, width=8, layers=3):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(module, x):
    found = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    x.grad = None
    return found


@pytest.fixture
def x(seed):
    return torch.randn(5, 8, dtype=torch.float64, requires_grad=True)


KEEP = partial(selective_recompute, keep=MATRIX_PRODUCTS)
KINDS = {
    "none": {},
    "full": {"layers.*": recompute},
    "some modules": {"layers.*.mlp": recompute},
    "operations": {"layers.*.mlp": KEEP},
    "outputs": {"layers.*.norm": discarded},
    "all kinds": {"layers.0.mlp": recompute, "layers.[12].norm": discarded, "layers.1.mlp": KEEP},
}


def run(model, x, chosen):
    """Gradients, bytes held after forward, and products in the backward."""
    ways = recompute_modules(model, chosen) if chosen else None
    with Watch() as forward, discard_outputs():
        loss = model(x).square().sum()
    held = forward.alive_bytes()
    with Watch() as backward:
        loss.backward()
    if ways is not None:
        ways.remove()
    return gradients(model, x), held, backward.products


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_gives_the_gradients_of_none(x, kind):
    model = Model()
    expected, most, products = run(model, x, {})
    got, held, again = run(model, x, KINDS[kind])
    assert_close(got, expected, atol=0, rtol=0)
    assert held < most or kind == "none"
    repeated = {"full": 3, "some modules": 3, "all kinds": 1}.get(kind, 0)
    assert again == products + repeated


def test_kinds_save_what_they_say(x):
    model = Model()
    held = {kind: run(model, x, chosen)[1] for kind, chosen in KINDS.items()}
    tokens = 5 * 8 * 8  # bytes of one hidden state
    # Of each layer: its sum, the norm's statistics and output, the MLP's two wide tensors.
    assert held["none"] - held["some modules"] == 3 * 8 * tokens
    assert held["none"] - held["operations"] == 3 * (4 - 1) * tokens  # and keeps the last product
    assert held["none"] - held["outputs"] == 3 * (tokens + 2 * 5 * 8)
    assert held["full"] < held["some modules"] < held["outputs"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_composes_with_a_split_backward(x, kind):
    model, store = Model(), WeightGradStore()
    expected, _, products = run(model, x, KINDS[kind])
    ways = recompute_modules(model, KINDS[kind]) if KINDS[kind] else None
    with split_backward(store), discard_outputs():
        loss = model(x).square().sum()
    with Watch() as inputs, store.deferring():
        loss.backward()
    with Watch() as weights:
        store.run()
    assert_close(gradients(model, x), expected, atol=0, rtol=0)
    assert inputs.products + weights.products == products
    assert weights.products == 6
    if ways is not None:
        ways.remove()


def test_random_numbers_are_those_of_the_first_forward(x):
    mlp, results = MLP(8).double(), []
    for call in (lambda f, *a, **k: f(*a, **k), recompute, KEEP):
        torch.manual_seed(5)
        y = call(mlp, x, p=0.5)
        torch.rand(2)
        y.square().sum().backward()
        results.append(gradients(mlp, x))
    assert_close(results[1:], [results[0]] * 2, atol=0, rtol=0)


@pytest.mark.parametrize("implementation", ["fused", "grouped_mm", "loop"])
def test_routing_is_replayed_with_kept_products(seed, implementation):
    config = MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        experts=ExpertsOptions(experts_implementation=implementation),
        initializer_range=0.5,
    )
    layer, results = MoELayer(config), []
    x = torch.randn(2, 9, 16, requires_grad=True)
    for call in (lambda f, *a: f(*a), KEEP):
        for store in (None, WeightGradStore()):
            if store is None:
                out = call(layer, x)
                (out.hidden.square().sum() + out.aux_loss).backward()
            else:
                with split_backward(store):
                    out = call(layer, x)
                with store.deferring():
                    (out.hidden.square().sum() + out.aux_loss).backward()
                store.run()
            results.append(gradients(layer, x))
    assert_close(results[1:], [results[0]] * 3)
    assert_close(results[2], results[0], atol=0, rtol=0)


def test_parameters_keep_their_names_and_copies_their_ways(x):
    model = Model()
    names = list(model.state_dict())
    calls = []

    def way(function, *args):
        calls.append(1)
        return function(*args)

    ways = recompute_modules(model, {"layers.*": way})
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == names
    assert_close(model(x), twin(x), atol=0, rtol=0)
    assert len(calls) == 6
    with torch.no_grad():
        twin.layers[0].mlp.up.weight.zero_()
    assert not torch.equal(model(x), twin(x))
    ways.remove()
    calls.clear()
    model(x)
    assert calls == []
    twin(x)
    assert len(calls) == 3
    ways.remove()
    plain = recompute_modules(model, {"layers.*": recompute})
    again = pickle.loads(pickle.dumps(model))
    assert_close(again(x), model(x), atol=0, rtol=0)
    plain.remove()


def test_mistakes_are_named(x):
    model = Model()
    with pytest.raises(ValueError, match=r"pattern 'layer\.\*' fits no module of Model"):
        recompute_modules(model, {"layer.*": recompute})
    with pytest.raises(ValueError, match=r"'layers.0' fits 'layers.0' and a pattern before"):
        recompute_modules(model, {"layers.?": recompute, "layers.0": recompute})
    ways = recompute_modules(model, {"layers.0": recompute})
    with pytest.raises(ValueError, match="recomputed already"):
        recompute_modules(model, {"layers.0": recompute})
    ways.remove()
    for operation in (ATEN.mm.out, ATEN.add_.Tensor):
        with pytest.raises(ValueError, match="writes into an argument"):
            selective_recompute(model, x, keep=[operation])
    with pytest.raises(TypeError, match="give overloads of operations"):
        selective_recompute(model, x, keep=[torch.mm])
    for keep in (ATEN.mm.default, (each for each in MATRIX_PRODUCTS)):
        with pytest.raises(TypeError, match="keep must be a Collection of operations"):
            selective_recompute(model, x, keep=keep)
    with pytest.raises(TypeError, match=r"choose\['layers.0'\] must be a Callable, got a NoneType"):
        recompute_modules(model, {"layers.0": None})


def test_a_kept_result_that_was_changed_in_place_is_refused(x):
    linear = nn.Linear(8, 8).double()
    y = KEEP(lambda x: F.relu(linear(x), inplace=True).exp(), x)
    with pytest.raises(RuntimeError, match=r"aten.addmm.default returned was changed in place"):
        y.sum().backward()


def test_other_calls_in_the_second_forward_are_refused(x):
    weights, sizes = torch.randn(8, 8, dtype=torch.float64, requires_grad=True), iter([8, 4])
    y = KEEP(lambda x: (x @ weights[:, : next(sizes)]).exp(), x)
    with pytest.raises(RuntimeError, match=r"call 1 of aten.mm.default in the second forward"):
        y.sum().backward()


def test_kept_results_live_through_several_backwards_and_within_another_recompute(x):
    model = Model()
    expected, _, _ = run(model, x, {})
    for call in (lambda x: KEEP(model, x), lambda x: recompute(partial(KEEP, model), x)):
        loss = call(x).square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert_close(gradients(model, x), expected, atol=0, rtol=0)


def test_hooks_around_see_what_is_kept(x):
    model, packed = Model(), []
    expected, _, _ = run(model, x, {})

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda t: t):
        loss = KEEP(model, x).square().sum()
    assert packed.count((5, 32)) == 3  # each up projection's result
    loss.backward()
    assert_close(gradients(model, x), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_operations_with_several_results_are_kept(x, dropout):
    operation = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    linear = nn.Linear(8, 8).double()
    runs = []

    def attend(x):
        y = linear(x)
        runs.append(1)
        variance, _ = torch.var_mean(y, 0)
        y, *_ = operation(y[None, None], y[None, None], y[None, None])
        return F.dropout(y, dropout) * variance

    expected, state = run_with_gradients(attend, x, linear)
    for keep in ([operation], [operation, ATEN.var_mean.correction]):
        torch.set_rng_state(state)
        found, _ = run_with_gradients(
            lambda x, keep=keep: selective_recompute(attend, x, keep=keep), x, linear
        )
        assert_close(found, expected)
    assert len(runs) == 5


def run_with_gradients(function, x, module):
    """Output and gradients, and the state of the random numbers before it."""
    state = torch.get_rng_state()
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())], state


@pytest.mark.parametrize("operation", [ATEN.rand_like.default, ATEN.native_dropout.default])
def test_random_numbers_after_a_kept_random_operation_are_the_same_again(x, operation):
    linear = nn.Linear(8, 8).double()

    def noisy(x):
        y = linear(x)
        y = torch.native_dropout(torch.rand_like(y) * y.sin(), 0.5, True)[0]
        return y.cos() * torch.rand_like(y)

    expected, state = run_with_gradients(noisy, x, linear)
    torch.set_rng_state(state)
    found, _ = run_with_gradients(
        lambda x: selective_recompute(noisy, x, keep=[operation]), x, linear
    )
    assert_close(found, expected)
