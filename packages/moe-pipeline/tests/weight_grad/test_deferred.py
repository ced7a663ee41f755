import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from moe_pipeline.weight_grad.deferred import current_splitting, defer, deferrable
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward


class Outer(torch.autograd.Function):
    """`x @ weight`, and how often its weight's gradient was computed."""

    computed = 0

    @staticmethod
    def forward(ctx, x, weight, token):
        ctx.save_for_backward(x, weight)
        ctx.token = token
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        def of_weight(x, grad):
            Outer.computed += 1
            return x.t() @ grad

        x, weight = ctx.saved_tensors
        grad_weight = defer(ctx.token, of_weight, x, grad) if ctx.needs_input_grad[1] else None
        return grad @ weight.t(), grad_weight, None


def outer(x, weight):
    return Outer.apply(x, *deferrable(weight))


@pytest.fixture
def tensors(seed):
    Outer.computed = 0
    return (
        torch.randn(7, 5, dtype=torch.float64, requires_grad=True),
        nn.Parameter(torch.randn(5, 5, dtype=torch.float64)),
    )


def split(function, store):
    with split_backward(store):
        y = function()
    with store.deferring():
        y.square().sum().backward()


def test_outside_of_a_split_a_weight_is_itself(tensors):
    x, weight = tensors
    assert deferrable(weight) == (weight, None)
    assert current_splitting() is None
    with split_backward(WeightGradStore()):
        assert current_splitting() is not None
        alias, token = deferrable(weight)
        assert alias is not weight
        assert alias.data_ptr() == weight.data_ptr()
        assert token.leaf is weight
        assert deferrable(weight * 2)[1] is None
        with torch.no_grad():
            assert deferrable(weight) == (weight, None)
        assert deferrable(x.detach())[1] is None
    assert current_splitting() is None


def test_functions_of_users_put_their_weights_off(tensors):
    x, weight = tensors
    expected = torch.autograd.grad(outer(x, weight).square().sum(), [x, weight])
    store, Outer.computed = WeightGradStore(), 0
    split(lambda: outer(x, weight), store)
    assert weight.grad is None
    assert Outer.computed == 0
    assert_close(x.grad, expected[0], atol=0, rtol=0)
    store.run()
    assert Outer.computed == 1
    assert_close(weight.grad, expected[1], atol=0, rtol=0)


def test_transposed_weights_get_their_gradient_in_their_own_layout(tensors):
    x, weight = tensors
    expected = torch.autograd.grad(outer(x, weight.t()).square().sum(), weight)[0]
    store = WeightGradStore()
    split(lambda: outer(x, weight.t()), store)
    store.run()
    assert_close(weight.grad, expected, atol=0, rtol=0)
    assert weight.grad.stride() == weight.stride()


def test_hooks_see_the_gradient_and_nothing_before(tensors):
    x, weight = tensors
    seen = []
    weight.register_hook(lambda g: seen.append("hook") or 2 * g)
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    expected = torch.autograd.grad(outer(x, weight.detach().requires_grad_()).sum(), x)
    assert expected
    store = WeightGradStore()
    split(lambda: F.linear(outer(x, weight), weight), store)
    assert seen == []
    store.run()
    plain = weight.detach().clone().requires_grad_()
    F.linear(x @ plain, plain).square().sum().backward()
    assert seen[0] == "hook"
    assert_close(seen[1:], [2 * plain.grad], atol=1e-12, rtol=1e-12)
    assert weight.grad is not None
    assert store.held_bytes == 0


def test_gradients_add_up_and_the_first_is_not_copied(tensors):
    x, weight = tensors
    store, places = WeightGradStore(), []

    def of_weight(x, grad):
        gradient = x.t() @ grad
        places.append(gradient.data_ptr())
        return gradient

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, token):
            ctx.save_for_backward(x)
            ctx.token = token
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            return None, defer(ctx.token, of_weight, *ctx.saved_tensors, grad), None

    for times in (1, 2):
        split(lambda: Watched.apply(x, *deferrable(weight)), store)
        store.run()
        plain = weight.detach().clone().requires_grad_()
        (x @ plain).square().sum().backward()
        assert_close(weight.grad, times * plain.grad, atol=1e-12, rtol=1e-12)
    assert weight.grad.data_ptr() == places[0]


def test_a_gradient_given_at_once_is_delivered_within_the_backward(tensors):
    x, weight = tensors
    store = WeightGradStore()
    with split_backward(store):
        alias, _ = deferrable(weight)
        y = (alias * 3).sum() + outer(x, weight).square().sum()
    with store.deferring():
        y.backward()
    assert_close(weight.grad, torch.full_like(weight, 3.0))
    store.run()
    plain = weight.detach().clone().requires_grad_()
    ((plain * 3).sum() + (x @ plain).square().sum()).backward()
    assert_close(weight.grad, plain.grad, atol=1e-12, rtol=1e-12)


def test_an_error_says_whose_gradient_it_was(tensors):
    x, weight = tensors

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, token):
            ctx.token = token
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            def of_weight(grad):
                raise FloatingPointError("overflow")

            return None, defer(ctx.token, of_weight, grad), None

    store = WeightGradStore()
    split(lambda: Broken.apply(x, *deferrable(weight)), store)
    with pytest.raises(FloatingPointError) as caught:
        store.run()
    (note,) = caught.value.__notes__
    assert "work 1 of 1" in note
    assert "of_weight, gradient of a weight of shape (5, 5) in torch.float64" in note
    assert len(store) == 0


def test_a_gradient_of_another_shape_is_refused(tensors):
    x, weight = tensors

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, token):
            ctx.token = token
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            return None, defer(ctx.token, lambda grad: grad, grad), None

    store = WeightGradStore()
    split(lambda: Wrong.apply(x, *deferrable(weight)), store)
    with pytest.raises(RuntimeError, match="invalid gradient") as caught:
        store.run()
    assert "shape (5, 5)" in caught.value.__notes__[0]


def test_the_queue_keeps_inputs_and_output_gradients_and_no_graph(tensors):
    x, weight = tensors
    store, alive = WeightGradStore(), []

    def stage():
        hidden = torch.tanh(x * 2)  # saves its result
        wide = F.linear(hidden, weight)
        saved = torch.exp(wide)  # saves its result, of which W needs nothing
        alive.extend(weakref.ref(t.untyped_storage()) for t in (hidden, saved))
        return saved

    split(stage, store)
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False]
    assert store.held_bytes == 2 * 7 * 5 * 8
    store.run()
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False]


def test_aliases_end_with_the_split(tensors):
    x, weight = tensors
    count = len(gc.get_referrers(weight))
    for _ in range(3):
        split(lambda: F.linear(x, weight), WeightGradStore())
    gc.collect()
    assert len(gc.get_referrers(weight)) == count


def test_a_weight_that_is_frozen_after_its_forward_gets_no_gradient(tensors):
    x, weight = tensors
    other = torch.ones_like(weight).requires_grad_()
    for deferring in (False, True):
        store = WeightGradStore()
        with split_backward(store):
            y = (outer(x, weight) + outer(x, other)).sum()
        weight.requires_grad_(False)
        with store.deferring() if deferring else store.at_once():
            y.backward()
        store.run()
        weight.requires_grad_(True)
    assert weight.grad is None
    expected = 2 * x.sum(0)[:, None].expand_as(other)
    assert_close(other.grad, expected, atol=1e-12, rtol=1e-12)
