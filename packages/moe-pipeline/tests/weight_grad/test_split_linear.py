import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from moe_pipeline.weight_grad.split_linear import looped_product
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward


def halves(leaves, function, grad=None):
    """Outputs and gradients of a whole backward without a store, and of I and W; pieces of work."""
    results, store = [], WeightGradStore()
    for split in (False, True):
        for leaf in leaves:
            leaf.grad = None
        if split:
            with split_backward(store):
                y = function()
            with store.deferring():
                backward(y, grad)
            waiting = len(store)
            store.run()
        else:
            y = function()
            backward(y, grad)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    return results[0], results[1], waiting


def backward(y, grad):
    torch.autograd.backward(y, torch.ones_like(y) if grad is None else grad)


def assert_same_bits(leaves, function, grad=None, work=1):
    expected, got, waiting = halves(leaves, function, grad)
    assert_close(got, expected, atol=0, rtol=0)
    assert waiting == work


def drawn(*shape, dtype=torch.float64, trained=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(trained)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5), (2, 0, 5)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_gives_the_same_bits(seed, dtype, shape, with_bias):
    x, weight = drawn(*shape, dtype=dtype), drawn(4, 5, dtype=dtype)
    bias = drawn(4, dtype=dtype) if with_bias else None
    leaves = [x, weight] if bias is None else [x, weight, bias]
    grad = torch.randn(*shape[:-1], 4, dtype=dtype)
    assert_same_bits(leaves, lambda: F.linear(x, weight, bias), grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_expanded_and_strided_tensors_give_the_same_numbers(seed, dtype):
    x, weight = drawn(5, 3, 2, dtype=dtype), drawn(4, 5, dtype=dtype)
    bias = drawn(4, dtype=dtype)
    cases = [
        (lambda: F.linear(x.permute(2, 1, 0), weight, bias), torch.ones(2, 3, 4)),
        (lambda: F.linear(x.permute(2, 1, 0), weight, bias), torch.ones(()).expand(2, 3, 4)),
        (lambda: F.linear(x[:, 1:2].expand(5, 3, 2).mT.mT.permute(2, 1, 0), weight, bias), None),
        (lambda: F.linear(x[:, 0].t(), weight, bias), torch.randn(4, 2).t()),
    ]
    for function, grad in cases:
        grad = None if grad is None else grad.to(dtype)
        expected, got, waiting = halves([x, weight, bias], function, grad)
        tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {}
        assert_close(got, expected, **tolerance)
        assert waiting == 1


def test_products_by_any_name_are_split(seed):
    x, weight, bias = drawn(7, 5), drawn(5, 4), drawn(4)
    grad = torch.randn(7, 4, dtype=torch.float64)
    products = [
        lambda: x @ weight,
        lambda: torch.matmul(x, weight),
        lambda: torch.matmul(x, other=weight),
        lambda: x.matmul(weight),
        lambda: torch.mm(x, weight),
        lambda: torch.mm(x, mat2=weight),
        lambda: x.mm(weight),
        lambda: F.linear(x, weight.t()),
        lambda: F.linear(input=x, weight=weight.mT, bias=None),
    ]
    for product in products:
        assert_same_bits([x, weight], product, grad)
    assert_same_bits([x, weight, bias], lambda: torch.addmm(bias, x, weight), grad)
    # By these names it is left to torch.
    store = WeightGradStore()
    with split_backward(store):
        y = torch.addmm(input=bias, mat1=x, mat2=weight)
    assert_close(y, torch.addmm(bias, x, weight))
    stored = drawn(4, 5)
    assert_same_bits([x, stored], lambda: x @ stored.t(), grad)
    batch = drawn(2, 3, 5)
    assert_same_bits([batch, weight], lambda: batch @ weight)


@pytest.mark.parametrize("shape", [(4,), (1,), (7, 4), (7, 1)])
def test_biases_of_any_shape_get_their_gradient(seed, shape):
    x, weight, bias = drawn(7, 5), drawn(4, 5), drawn(*shape)
    expected, got, _ = halves([x, weight, bias], lambda: F.linear(x, weight, bias))
    assert_close(got, expected)


def test_what_cannot_be_deferred_is_computed_at_once(seed):
    x, weight, batch = drawn(5, 5), drawn(5, 5), drawn(2, 5, 5)
    others = [
        lambda: F.linear(x, weight * 2),
        lambda: F.linear(x, weight[:3]),
        lambda: F.linear(x, weight.t() * 1),
        lambda: weight @ (x * 1),
        lambda: torch.addmm(torch.ones(5, dtype=x.dtype), x, weight, beta=2),
        lambda: torch.mv(weight, x[0]),
        lambda: torch.baddbmm(batch, x.expand(2, 5, 5), weight.expand(2, 5, 5)),
        lambda: F.linear(x, weight.to(torch.float32).double()),
        lambda: torch.mm(x.detach().relu().to_sparse(), weight),
        lambda: torch.func.vmap(lambda row: F.linear(row, weight))(x),
        lambda: torch.func.grad(lambda x: (x @ weight).sin().sum())(x),
    ]
    for function in others:
        expected, got, waiting = halves([x, weight], function)
        assert_close(got, expected, atol=0, rtol=0)
        assert waiting == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch(seed):
    weight, rows = drawn(4, 5), [torch.randn(2, 5), torch.randn(3, 5)]

    def function():
        nested = torch.nested.nested_tensor(rows, dtype=torch.float64)
        return torch.nested.to_padded_tensor(F.linear(nested, weight), 0.0)

    assert_same_bits([weight], function, work=0)


def test_hooks_on_a_transpose_are_called_and_its_gradient_is_kept(seed):
    x, weight, kept = drawn(7, 5), drawn(4, 5), []

    def function():
        transposed = weight.t()
        transposed.register_hook(lambda grad: 2 * grad)
        return x @ transposed

    def retained():
        kept.append(weight.t())
        kept[-1].retain_grad()
        return x @ kept[-1]

    assert_same_bits([x, weight], function, work=0)
    assert_same_bits([x, weight], retained, work=0)
    assert_close(kept[1].grad, kept[0].grad, atol=0, rtol=0)


def test_frozen_weights_make_no_work(seed):
    x, weight, bias = drawn(7, 5), drawn(4, 5, trained=False), drawn(4)
    assert_same_bits([x, bias], lambda: F.linear(x, weight, bias), work=0)
    assert weight.grad is None
    store = WeightGradStore()
    with split_backward(store), torch.no_grad():
        assert not F.linear(x, drawn(4, 5)).requires_grad
    late = drawn(4, 5)
    with split_backward(store):
        y = F.linear(x, late)
    with store.deferring():
        y.sum().backward()
    late.requires_grad_(False)
    store.run()
    assert late.grad is None


def test_weights_without_elements_are_left_to_torch(seed):
    x, weight = drawn(7, 5), drawn(0, 5)
    assert_same_bits([x, weight], lambda: F.linear(x, weight), torch.ones(7, 0).double(), work=0)


def test_an_input_without_gradient_costs_no_product_for_it(seed):
    x, weight = drawn(7, 5, trained=False), drawn(4, 5)
    assert_same_bits([weight], lambda: F.linear(x, weight))
    assert x.grad is None


def test_results_may_be_changed_in_place(seed):
    x, weight, bias = drawn(7, 5), drawn(4, 5), drawn(4)
    assert_same_bits([x, weight, bias], lambda: F.relu(F.linear(x, weight, bias), inplace=True))
    assert_same_bits([x, weight], lambda: F.linear(x, weight).mul_(3).add_(1))


def test_a_weight_that_changes_before_backward_is_noticed(seed):
    x, weight = drawn(7, 5), drawn(4, 5)
    with split_backward(WeightGradStore()):
        y = F.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_is_followed(seed):
    x, weight, bias = (drawn(*s, dtype=torch.float32) for s in ((7, 5), (4, 5), (4,)))

    def function():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, weight, bias)

    expected, got, waiting = halves([x, weight, bias], function)
    assert waiting == 1
    assert got[0].dtype == torch.bfloat16
    assert [g.dtype for g in got] == [e.dtype for e in expected]
    assert_close(got, expected)
    wide = drawn(7, 5), drawn(4, 5)

    def unchanged():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(*wide)

    assert_same_bits(list(wide), unchanged)


def test_a_tied_weight_is_delivered_once_for_all_its_products(seed):
    x, weight = drawn(7, 5), drawn(5, 5)
    calls = []
    weight.register_post_accumulate_grad_hook(lambda w: calls.append(w.grad.clone()))
    assert_same_bits([x, weight], lambda: F.linear(F.linear(x, weight).tanh(), weight), work=2)
    assert len(calls) == 2  # one for the whole backward, one for I and W
    table = drawn(9, 5)
    tokens = torch.tensor([0, 3, 3, 8])
    tied = [table]
    expected, got, waiting = halves(tied, lambda: F.linear(F.embedding(tokens, table), table))
    assert waiting == 1
    assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["as torch multiplies", "transposed"])
def test_grouped_products_give_the_same_bits(seed, dtype, stored):
    shape = (3, 8, 16) if stored == "as torch multiplies" else (3, 16, 8)
    x, weight = drawn(9, 8, dtype=dtype), drawn(*shape, dtype=dtype)
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)
    grad = torch.randn(9, 16, dtype=dtype)
    right = weight if stored == "as torch multiplies" else None

    def function():
        return F.grouped_mm(x, weight.mT if right is None else right, offs=offsets)

    def by_position():
        return torch._grouped_mm(x, weight.mT if right is None else right, offsets)

    for each in (function, by_position):
        assert_same_bits([x, weight], each, grad)


@pytest.mark.parametrize("counts", [(4, 0, 5), (0, 0, 0)])
def test_looped_products_equal_products_one_by_one(seed, counts):
    x, weight = drawn(sum(counts), 8), drawn(3, 6, 8)
    grad = torch.randn(sum(counts), 6, dtype=torch.float64)
    assert_same_bits([x, weight], lambda: looped_product(x, weight, counts), grad)
    plain = torch.cat([F.linear(a, w) for a, w in zip(x.split(counts), weight, strict=True)])
    expected = torch.autograd.grad(plain, [x, weight], grad)
    assert_close(looped_product(x, weight, counts), plain, atol=0, rtol=0)
    assert_close([x.grad, weight.grad], list(expected), atol=0, rtol=0)


def test_subclasses_of_tensors_are_left_to_torch(seed):
    class Logged(torch.Tensor):
        pass

    x, weight = drawn(7, 5), nn.Parameter(drawn(4, 5).detach().as_subclass(Logged))
    expected, got, waiting = halves([x, weight], lambda: F.linear(x, weight))
    assert waiting == 0
    assert_close(got, expected, atol=0, rtol=0)
