import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from comm_collectives import MoeOptions, dispatch
from moe_pipeline.recomputation.recomputing import (
    is_replaying,
    keep_plan,
    recompute,
    recompute_contexts,
    recorded,
    replayed_plan,
)
from moe_pipeline.routing_plan import RoutingPlan


class Chooser(nn.Module):
    """Multiplies by a number that is another one each time that it is made."""

    def __init__(self, width=3, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))
        self.made, self.replayed = [], 0

    def forward(self, x):
        self.replayed += is_replaying()
        factor = recorded(self, self.make)
        return torch.sin(x * self.weight * factor)

    def make(self):
        self.made.append(torch.rand((), dtype=torch.float64).add(1))
        return self.made[-1]


def gradients(out, *modules):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.autograd.grad(out.square().sum(), parameters)


def with_these_factors(chooser, factors, x):
    """The same function of x without recompute and without choosing."""
    for factor in factors:
        x = torch.sin(x * chooser.weight * factor)
    return x


@pytest.fixture
def x(seed):
    return torch.randn(5, 3, dtype=torch.float64)


def test_outside_of_recompute_each_call_makes_its_own(x):
    chooser = Chooser()
    assert not torch.equal(chooser(x), chooser(x))
    assert len(chooser.made) == 2
    assert chooser.replayed == 0


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
def test_second_forward_reads_what_the_first_made(x, needs_grad, early_stop):
    chooser = Chooser()
    x.requires_grad_(needs_grad)
    with set_checkpoint_early_stop(early_stop):
        out = recompute(chooser, x)
        inputs = [chooser.weight, *[x] * needs_grad]
        grads = torch.autograd.grad(out.square().sum(), inputs)
    assert (len(chooser.made), chooser.replayed) == (1, 1)
    expected = with_these_factors(chooser, chooser.made, x)
    assert torch.equal(out, expected)
    assert_close(grads, torch.autograd.grad(expected.square().sum(), inputs), atol=0, rtol=0)


def test_calls_of_one_owner_are_matched_in_order(x):
    first, second = Chooser(), Chooser()
    out = recompute(lambda x: first(second(first(first(x)))), x)
    grads = gradients(out, first, second)
    assert (len(first.made), len(second.made)) == (3, 1)
    assert (first.replayed, second.replayed) == (3, 1)
    expected = with_these_factors(first, first.made[:2], x)
    expected = with_these_factors(second, second.made, expected)
    expected = with_these_factors(first, first.made[2:], expected)
    assert_close(grads, gradients(expected, first, second), atol=0, rtol=0)


def test_each_backward_of_a_retained_graph_replays_from_the_beginning(x):
    chooser = Chooser()
    out = recompute(lambda x: chooser(chooser(x)), x).square().sum()
    out.backward(retain_graph=True)
    once = chooser.weight.grad.clone()
    out.backward()
    assert (len(chooser.made), chooser.replayed) == (2, 4)
    assert torch.equal(chooser.weight.grad, 2 * once)


def test_second_derivatives_replay_too(x):
    chooser = Chooser()
    x.requires_grad_()
    out = recompute(chooser, x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), x)
    expected = with_these_factors(chooser, chooser.made, x)
    (first,) = torch.autograd.grad(expected.sum(), x, create_graph=True)
    assert_close(second, torch.autograd.grad(first.square().sum(), x), atol=0, rtol=0)
    assert len(chooser.made) == 1


@pytest.mark.parametrize("early_stop", [True, False])
def test_recompute_within_recompute_makes_once(x, early_stop):
    outer, inner, innermost = Chooser(), Chooser(), Chooser()

    def deepest(x):
        return innermost(innermost(x))

    def middle(x):
        return inner(recompute(deepest, inner(x)))

    def function(x):
        return outer(recompute(middle, recompute(middle, outer(x))))

    with set_checkpoint_early_stop(early_stop):
        out = recompute(function, x)
        grads = gradients(out, outer, inner, innermost)
    assert [len(each.made) for each in (outer, inner, innermost)] == [2, 4, 4]
    assert min(each.replayed for each in (outer, inner, innermost)) > 0
    expected = with_these_factors(outer, outer.made[:1], x)
    for i in (0, 2):
        expected = with_these_factors(inner, inner.made[i : i + 1], expected)
        expected = with_these_factors(innermost, innermost.made[i : i + 2], expected)
        expected = with_these_factors(inner, inner.made[i + 1 : i + 2], expected)
    expected = with_these_factors(outer, outer.made[1:], expected)
    assert torch.equal(out, expected)
    assert_close(grads, gradients(expected, outer, inner, innermost), atol=0, rtol=0)


def test_gradient_taken_within_the_function_replays_only_its_own_part(x):
    outer, inner = Chooser(), Chooser()

    def function(x):
        y = outer(x)
        loss = recompute(inner, y).square().sum()
        (grad,) = torch.autograd.grad(loss, y, create_graph=True)
        return outer(y + grad)

    out = recompute(function, x.requires_grad_())
    assert inner.replayed > 0
    assert not is_replaying()
    grads = gradients(out, outer)
    assert (len(outer.made), len(inner.made)) == (2, 1)
    y = with_these_factors(outer, outer.made[:1], x)
    loss = with_these_factors(inner, inner.made, y).square().sum()
    (grad,) = torch.autograd.grad(loss, y, create_graph=True)
    expected = with_these_factors(outer, outer.made[1:], y + grad)
    assert_close(grads, gradients(expected, outer), atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("trained", ["first", "second"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(x, trained):
    choosers = dict(first=Chooser(), second=Chooser())
    for name, each in choosers.items():
        each.requires_grad_(name == trained)
    recompute(lambda x: choosers["second"](choosers["first"](x)), x).square().sum().backward()
    expected = with_these_factors(choosers["first"], choosers["first"].made, x)
    expected = with_these_factors(choosers["second"], choosers["second"].made, expected)
    (grad,) = gradients(expected, choosers[trained])
    assert torch.equal(choosers[trained].weight.grad, grad)
    assert [each.weight.grad is None for name, each in choosers.items()] == [
        name != trained for name in choosers
    ]


def test_nothing_is_kept_where_no_gradient_is_recorded(x):
    chooser = Chooser()
    with torch.no_grad():
        out = recompute(chooser, x)
    assert not out.requires_grad
    assert (len(chooser.made), chooser.replayed) == (1, 0)


def test_part_of_the_function_without_gradients_is_replayed_as_well(x):
    chooser, blind = Chooser(), Chooser()

    def function(x):
        with torch.no_grad():
            shift = recompute(blind, x)
        return chooser(x + shift)

    out = recompute(function, x)
    grads = gradients(out, chooser)
    expected = with_these_factors(blind, blind.made, x).detach()
    expected = with_these_factors(chooser, chooser.made, x + expected)
    assert len(blind.made) == 1
    assert_close(grads, gradients(expected, chooser), atol=0, rtol=0)


def test_keyword_arguments_may_have_the_names_of_checkpoints_own(x):
    def function(x, *, debug, early_stop, context_fn):
        return torch.sin(x * debug) * early_stop + context_fn

    debug = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    out = recompute(function, x, debug=debug, early_stop=3, context_fn=4)
    assert torch.equal(out, torch.sin(x * 2) * 3 + 4)
    out.sum().backward()
    assert_close(debug.grad, (x * torch.cos(x * 2) * 3).sum())


def test_a_tensor_given_by_keyword_that_changes_before_the_backward_is_noticed(x):
    chooser, h = Chooser(), x * 1
    out = recompute(chooser, x=h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.gpu
def test_gpu_dropout_of_what_is_given_by_keyword_is_the_same_in_both_forwards():
    x = torch.rand(64, device="cuda", requires_grad=True)
    out = recompute(lambda *, x: torch.dropout(x.exp(), 0.5, train=True), x=x)
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)


def test_dropout_is_the_same_in_both_forwards(x):
    x.requires_grad_()
    out = recompute(lambda x: torch.dropout(x.exp(), 0.5, train=True), x)
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)


def test_activations_are_not_kept(x):
    alive = []

    def function(x):
        y = torch.exp(x)
        alive.append(weakref.ref(y))
        return torch.sin(y * y)

    out = recompute(function, x.requires_grad_())
    assert alive[0]() is None
    out.sum().backward()
    assert len(alive) == 2


def test_a_tape_goes_with_its_graph(x):
    @dataclass(eq=False)
    class Choice:
        factor: torch.Tensor

    class Once(Chooser):
        def forward(self, x):
            choice = recorded(self, lambda: Choice(torch.tensor(2.0)))
            self.choices.append(weakref.ref(choice))
            return torch.sin(x * self.weight * choice.factor)

    module = Once()
    module.choices = []
    out = recompute(module, x)
    out.sum().backward(retain_graph=True)
    assert len(module.choices) == 2
    assert module.choices[0]() is module.choices[1]() is not None
    del out
    gc.collect()
    assert module.choices[0]() is None


def test_a_handle_of_a_dispatch_does_not_keep_its_graph(x):
    """Graph, tape, handle and graph again would be a cycle that nothing frees."""
    module, alive = Chooser(), []

    def function(x):
        kept = replayed_plan(module)
        idx = torch.arange(5)[:, None] % 2
        options = MoeOptions(reuse=None if kept is None else kept.handle)
        weights = torch.sin(x[:, :1] * module.weight[0])
        sent = dispatch(x, idx, weights, num_experts=2, options=options)
        if kept is None:
            plan = RoutingPlan(
                topk_idx_TK=idx, counts_E=idx[0], logits_TE=x.detach(), handle=sent.handle
            )
            keep_plan(module, plan)
        alive.append(weakref.ref(sent.x.grad_fn))
        return sent.x * sent.topk_weights[:, None]

    x.requires_grad_()
    out = recompute(function, x)
    out.sum().backward(retain_graph=True)
    assert len(alive) == 2
    assert alive[0]() is not None
    del out
    gc.collect()
    assert alive[0]() is None


@dataclass
class Holder:
    inside: object


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (1, [t]), lambda t: Holder({"a": t})])
def test_a_recorded_tensor_that_requires_grad_is_refused(x, wrap):
    module = Chooser()
    with pytest.raises(ValueError, match=r"Chooser records a tensor of shape \(3,\).*detach it"):
        recompute(lambda x: recorded(module, lambda: wrap(module.weight * 2)), x)
    assert torch.equal(recorded(module, lambda: module.weight * 2), module.weight * 2)


def test_a_function_that_asks_more_often_the_second_time_is_told(x):
    chooser, runs = Chooser(), []

    def function(x):
        runs.append(None)
        return chooser(chooser(x)) if len(runs) > 1 else chooser(x)

    with set_checkpoint_early_stop(False):
        out = recompute(function, x)
        with pytest.raises(RuntimeError, match=r"Chooser asks for recorded value 2.*there were 1"):
            out.sum().backward()
    assert not is_replaying()


def test_a_function_that_nests_more_often_the_second_time_is_told(x):
    chooser = Chooser()

    def function(x):
        y = chooser(x)
        return recompute(torch.sin, y) if is_replaying() else torch.sin(y)

    with set_checkpoint_early_stop(False):
        out = recompute(function, x)
        with pytest.raises(RuntimeError, match=r"call 1 of recompute within another.*there were 0"):
            out.sum().backward()


def test_an_error_in_either_forward_leaves_no_tape_behind(x):
    chooser = Chooser()

    def fails_when(replaying):
        def function(x):
            y = chooser(x)
            if is_replaying() == replaying:
                raise KeyError("from the function")
            return y.sin()

        return function

    with pytest.raises(KeyError, match="from the function"):
        recompute(fails_when(replaying=False), x)
    with set_checkpoint_early_stop(False):
        out = recompute(fails_when(replaying=True), x)
        with pytest.raises(KeyError, match="from the function"):
            out.sum().backward()
    assert not is_replaying()
    made = len(chooser.made)
    chooser(x)
    assert len(chooser.made) == made + 1


def test_a_context_that_an_error_left_open_ends_with_its_surroundings_and_no_other():
    (left_open, _), (_, again), (_, another) = (recompute_contexts() for _ in range(3))
    with again:
        left_open.__enter__()
        assert not is_replaying()
    assert not is_replaying()
    with another:
        left_open.__exit__(None, None, None)
        assert is_replaying()
    assert not is_replaying()


def test_debug_mode_of_checkpoint_works(x):
    chooser = Chooser()
    with set_checkpoint_debug_enabled(True):
        recompute(chooser, x).sum().backward()
    assert (len(chooser.made), chooser.replayed) == (1, 1)


def test_threads_have_their_own_tapes(seed):
    """Forwards and backwards of 4 threads meet in the middle of each other's."""
    chooser = Chooser()
    barrier = threading.Barrier(4, timeout=30)
    results = {}

    def function(x):
        factor = recorded(chooser, lambda: x.detach().mean())
        barrier.wait()
        again = recorded(chooser, lambda: x.detach().mean() + 1)
        return torch.sin(x * chooser.weight * factor * again)

    def work(number):
        x = torch.full((2, 3), float(number), dtype=torch.float64, requires_grad=True)
        out = recompute(function, x)
        results[number] = (x, out, torch.autograd.grad(out.sum(), x), is_replaying())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=60)
    assert sorted(results) == [1, 2, 3, 4]
    for number, (x, out, grads, replaying) in results.items():
        expected = torch.sin(x * chooser.weight * (number * (number + 1)))
        assert not replaying
        assert torch.equal(out, expected)
        assert_close(grads, torch.autograd.grad(expected.sum(), x), atol=1e-14, rtol=1e-14)


def test_backward_on_another_thread_replays(x):
    chooser = Chooser()
    out = recompute(chooser, x)
    thread = threading.Thread(target=lambda: out.square().sum().backward())
    thread.start()
    thread.join(timeout=30)
    assert (len(chooser.made), chooser.replayed) == (1, 1)
    (expected,) = gradients(with_these_factors(chooser, chooser.made, x), chooser)
    assert torch.equal(chooser.weight.grad, expected)


def test_contexts_serve_a_checkpoint_that_others_call(x):
    chooser = Chooser()
    out = checkpoint(chooser, x, use_reentrant=False, context_fn=recompute_contexts)
    grads = gradients(out, chooser)
    assert (len(chooser.made), chooser.replayed) == (1, 1)
    expected = with_these_factors(chooser, chooser.made, x)
    assert_close(grads, gradients(expected, chooser), atol=0, rtol=0)


def test_plain_checkpoint_makes_twice(x):
    """What `recompute` is for: this is the gradient of another function."""
    chooser = Chooser()
    checkpoint(chooser, x, use_reentrant=False).sum().backward()
    assert len(chooser.made) == 2


@pytest.mark.gpu(needs="thread of autograd's own for a device")
def test_gpu_backward_on_autograds_own_thread_replays(seed):
    chooser = Chooser().cuda()
    x = torch.randn(5, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    callers = []

    def function(x):
        callers.append(threading.get_ident())
        return chooser(chooser(x))

    out = recompute(function, x)
    out.square().sum().backward()
    assert callers[0] != callers[1]
    assert (len(chooser.made), chooser.replayed) == (2, 2)
    (expected,) = gradients(with_these_factors(chooser, chooser.made, x), chooser)
    assert_close(chooser.weight.grad, expected)
