import math

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.ops.dropout import dropout, dropout_add
from moe_pipeline.ops.rng import counter_blocks

KEY = 1234


def kept_mask(token_ids, width, p):
    blocks = [bits.clone() for _, bits in counter_blocks(KEY, token_ids.reshape(-1), width)]
    u = (torch.cat(blocks).double() + 2**31) / 2**32
    return (u >= p).view(*token_ids.shape, width)


def reference(x, residual, token_ids, p):
    """fp64, rounded once."""
    scaled = torch.where(kept_mask(token_ids, x.shape[-1], p), x.double() / (1 - p), 0.0)
    return scaled + residual.double()


def inputs(dtype, residual_dtype, *shape):
    x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    residual = torch.randn(shape, dtype=torch.float64).to(residual_dtype).requires_grad_()
    return x, residual, torch.randint(0, 10**9, shape[:-1])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype", "out_dtype"),
    [
        (torch.float64, torch.float64, torch.float64),
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_values_and_gradients_equal_the_reference(seed, p, dtype, residual_dtype, out_dtype):
    x, residual, ids = inputs(dtype, residual_dtype, 3, 50, 33)
    out = dropout_add(x, residual, p=p, key=KEY, token_ids=ids, training=True)
    assert out.dtype == out_dtype
    want = reference(x, residual, ids, p)
    # Half a unit in the last place of the result: one rounding; some fp32 slack.
    eps = torch.finfo(out_dtype).eps
    slack = 1e-15 if out_dtype == torch.float64 else 4e-7
    assert ((out.double() - want).abs() <= want.abs() * eps / 2 + slack * (1 / (1 - p) + 1)).all()
    grad = torch.randn_like(out)
    grad_x, grad_residual = torch.autograd.grad(out, [x, residual], grad)
    assert grad_x.dtype == dtype
    assert torch.equal(grad_residual, grad.to(residual_dtype))
    scaled = torch.where(kept_mask(ids, 33, p), grad.double() / (1 - p), 0.0)
    finfo = torch.finfo(dtype)
    assert_close(grad_x.double(), scaled, rtol=finfo.eps, atol=finfo.tiny * finfo.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_dropout_is_the_plain_sum_to_the_last_bit(seed, dtype):
    x, residual, ids = inputs(dtype, dtype, 40, 16)
    for p, training in ((0.0, True), (0.7, False), (1.0, False)):
        out = dropout_add(x, residual, p=p, key=KEY, token_ids=ids, training=training)
        assert torch.equal(out, x + residual)
        assert dropout(x, p=p, key=KEY, token_ids=ids, training=training) is x


def test_bf16_is_rounded_once_where_torch_rounds_twice(seed):
    x, residual, ids = inputs(torch.bfloat16, torch.bfloat16, 300, 64)
    keep = kept_mask(ids, 64, 0.1)
    want = reference(x, residual, ids, 0.1)
    out = dropout_add(x, residual, p=0.1, key=KEY, token_ids=ids, training=True)
    twice = residual + x * keep * (1 / 0.9)
    assert (out.double() - want).pow(2).mean() < 0.8 * (twice.double() - want).pow(2).mean()


def test_p_one_drops_everything(seed):
    x, residual, ids = inputs(torch.float32, torch.float32, 5, 7)
    out = dropout_add(x, residual, p=1.0, key=KEY, token_ids=ids, training=True)
    assert torch.equal(out, residual)
    grad_x, grad_residual = torch.autograd.grad(out.sum(), [x, residual])
    assert not grad_x.any()
    assert torch.equal(grad_residual, torch.ones_like(residual))


def test_what_is_dropped_adds_zero_even_if_infinite():
    ids = torch.arange(100)
    x = torch.full((100, 8), float("inf"))
    out = dropout_add(x, torch.ones(100, 8), p=0.5, key=KEY, token_ids=ids, training=True)
    keep = kept_mask(ids, 8, 0.5)
    assert torch.equal(out, torch.where(keep, float("inf"), 1.0))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.999])
def test_share_of_kept_numbers(p):
    ids = torch.arange(1000)
    kept = dropout(torch.ones(1000, 200), p=p, key=KEY, token_ids=ids, training=True) != 0
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
    for axis in (0, 1):
        z = (kept.double().mean(axis) - (1 - p)) / (deviation * math.sqrt(kept.shape[1 - axis]))
        assert abs(z.var().item() - 1) < 0.5


def test_tokens_lose_the_same_numbers_in_every_split(seed):
    x, residual, ids = inputs(torch.float32, torch.float32, 4, 30, 24)

    def run(x, residual, ids):
        return dropout_add(x, residual, p=0.3, key=KEY, token_ids=ids, training=True)

    whole = run(x, residual, ids)
    by_batch = [run(*part) for part in zip(x, residual, ids, strict=True)]
    assert torch.equal(torch.stack(by_batch), whole)
    cuts = [tensor.split([1, 0, 12, 17], dim=1) for tensor in (x, residual, ids)]
    by_sequence = [run(*part) for part in zip(*cuts, strict=True)]
    assert torch.equal(torch.cat(by_sequence, 1), whole)
    swapped = run(x.transpose(0, 1), residual.transpose(0, 1), ids.t())
    assert torch.equal(swapped.transpose(0, 1), whole)
    other = dropout_add(x, residual, p=0.3, key=KEY + 1, token_ids=ids, training=True)
    assert 0.3 < (other == whole).double().mean() < 0.7


def test_only_token_ids_are_saved(seed):
    x, residual, ids = inputs(torch.bfloat16, torch.bfloat16, 64, 128)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = dropout_add(x, residual, p=0.2, key=KEY, token_ids=ids, training=True)
    assert [tensor.shape for tensor in saved] == [ids.shape]
    out.sum().backward()  # an expanded gradient
    assert_close(x.grad.float(), kept_mask(ids, 128, 0.2) / 0.8, rtol=1e-2, atol=0)


def test_gradcheck_once_and_twice(seed):
    x, residual, ids = inputs(torch.float64, torch.float64, 3, 4)

    def run(x, residual):
        return dropout_add(x, residual, p=0.4, key=KEY, token_ids=ids, training=True)

    assert torch.autograd.gradcheck(run, (x, residual))
    assert torch.autograd.gradgradcheck(run, (x, residual))


def test_no_tokens_and_frozen_inputs(seed):
    x, residual, ids = inputs(torch.float32, torch.float32, 0, 6)
    out = dropout_add(x, residual, p=0.4, key=KEY, token_ids=ids, training=True)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 6)
    x, residual, ids = inputs(torch.float32, torch.float32, 3, 0)
    assert dropout(x, p=0.4, key=KEY, token_ids=ids, training=True).shape == (3, 0)
    x, residual, ids = inputs(torch.float32, torch.float32, 5, 6)
    out = dropout_add(x, residual.detach(), p=0.4, key=KEY, token_ids=ids, training=True)
    out.sum().backward()
    assert x.grad is not None
    assert residual.grad is None


def test_mistakes_are_named():
    x, ids = torch.ones(3, 4), torch.arange(3)
    with pytest.raises(ValueError, match=r"p=1\.5 is no probability"):
        dropout_add(x, x, p=1.5, key=1, token_ids=ids, training=True)
    with pytest.raises(ValueError, match=r"token_ids has shape \(2,\) and x \(3, 4\)"):
        dropout(x, p=0.5, key=1, token_ids=ids[:2], training=True)
    with pytest.raises(ValueError, match=r"residual has shape \(4,\)"):
        dropout_add(x, x[0], p=0.5, key=1, token_ids=ids, training=True)
    with pytest.raises(TypeError, match="token ids must be integers"):
        dropout(x, p=0.5, key=1, token_ids=ids.float(), training=True)
    with pytest.raises(TypeError, match=r"float tensor, got torch\.int64"):
        dropout(x.long(), p=0.5, key=1, token_ids=ids, training=True)


@pytest.mark.gpu
def test_a_gpu_drops_the_same_numbers():
    x, residual, ids = torch.randn(50, 70), torch.randn(50, 70), torch.arange(50)
    ours = dropout_add(x, residual, p=0.3, key=KEY, token_ids=ids, training=True)
    theirs = dropout_add(
        x.cuda(), residual.cuda(), p=0.3, key=KEY, token_ids=ids.cuda(), training=True
    )
    assert_close(theirs.cpu(), ours)


@pytest.mark.parametrize("first", [0, 8, 13])
def test_columns_on_another_rank_lose_what_they_lose_beside_the_others(first):
    x, ids = torch.randn(4, 33), torch.arange(4)
    whole = dropout(x, p=0.4, key=KEY, token_ids=ids, training=True)
    part = dropout(x[:, first:20], p=0.4, key=KEY, token_ids=ids, training=True, first_column=first)
    assert torch.equal(part, whole[:, first:20])
