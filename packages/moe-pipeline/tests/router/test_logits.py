import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from moe_pipeline.router.logits import router_logits, with_values


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_and_gradients_equal_those_of_linear_in_fp32(seed, dtype, tokens, has_bias):
    tensors = [torch.randn(tokens, 6), torch.randn(5, 6), torch.randn(5)][: 2 + has_bias]
    ours = [t.to(dtype).requires_grad_() for t in tensors]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    theirs = [t.detach().to(wide).requires_grad_() for t in ours]
    got, expected = router_logits(*ours), F.linear(*theirs)
    assert got.dtype == wide
    assert torch.equal(got, expected)
    factors = torch.randn_like(got)
    grads = torch.autograd.grad(got, ours, factors)
    wanted = torch.autograd.grad(expected, theirs, factors)
    for mine, other in zip(grads, wanted, strict=True):
        assert mine.dtype == dtype
        assert_close(mine, other.to(dtype))


def test_mixed_dtypes_are_computed_in_the_wider_one(seed):
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.bfloat16)
    assert torch.equal(router_logits(x, weight), x @ weight.double().t())


def test_gradients_of_first_and_second_order_are_right(seed):
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 3), (5, 3), 5]
    ]
    assert torch.autograd.gradcheck(router_logits, tensors)
    assert torch.autograd.gradgradcheck(router_logits, tensors)


def test_expanded_gradients_and_strides_work(seed):
    x = torch.randn(6, 4).t().requires_grad_()
    weight = torch.randn(6, 5).t().requires_grad_()
    router_logits(x, weight).sum().backward()
    assert_close(x.grad, weight.detach().sum(0).expand(4, 6))
    assert_close(weight.grad, x.detach().sum(0).expand(5, 6))


def test_autocast_changes_neither_logits_nor_gradients(seed):
    x, weight = torch.randn(30, 16), torch.randn(8, 16, requires_grad=True)
    factors = torch.randn(30, 8)
    outside = router_logits(x, weight)
    (expected,) = torch.autograd.grad(outside, weight, factors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router_logits(x, weight)
        (got,) = torch.autograd.grad(inside, weight, factors)
    assert torch.equal(inside, outside)
    assert torch.equal(got, expected)


def test_only_the_tokens_themselves_are_saved(seed):
    saved = []

    def pack(tensor):
        saved.append((tensor.data_ptr(), tensor.dtype))
        return tensor

    x = torch.randn(30, 16).bfloat16().requires_grad_()
    weight = torch.randn(8, 16).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        router_logits(x, weight)
    assert sorted(saved) == sorted((t.data_ptr(), torch.bfloat16) for t in (x, weight))


def test_frozen_weights_and_tokens_get_no_gradient(seed):
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    router_logits(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert not router_logits(x, weight.detach()).requires_grad


def test_given_values_replace_those_computed_and_keep_their_gradient(seed):
    x = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    values = torch.randn(4, 5)
    got = with_values(router_logits(x, weight), values)
    assert torch.equal(got, values)
    got.square().sum().backward()
    assert_close(x.grad, 2 * values @ weight.detach())
    assert_close(weight.grad, 2 * values.t() @ x.detach())


def test_values_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"shape \(4, 5\), but these tokens have logits of "):
        with_values(torch.zeros(3, 5), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="float64"):
        with_values(torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.float64))
