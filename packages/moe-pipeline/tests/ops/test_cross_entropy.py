import itertools
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from moe_pipeline.ops.cross_entropy import chunked_cross_entropy

T, D, V = 37, 12, 53


def inputs(dtype=torch.float64, tokens=T):
    hidden = torch.randn(tokens, D, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (tokens,))
    labels[::3] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, **kwargs):
    """torch's cross entropy, in fp64."""
    return F.cross_entropy(hidden.double() @ weight.double().t(), labels, reduction="sum", **kwargs)


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 36, 37, 1000, None])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_equals_torch(seed, dtype, atol, tokens_per_chunk):
    hidden, weight, labels = inputs(dtype)
    size = None if tokens_per_chunk is None else tokens_per_chunk * V * dtype.itemsize
    ours = chunked_cross_entropy(hidden, weight, labels, chunk_bytes=size)
    theirs = reference(hidden, weight, labels)
    assert ours.dtype == dtype
    assert ours.shape == ()
    assert_close(ours.double(), theirs, atol=atol, rtol=1e-6 if dtype == torch.float32 else 1e-13)
    factor = 0.37
    ours = torch.autograd.grad(ours * factor, [hidden, weight])
    theirs = torch.autograd.grad(theirs * factor, [hidden, weight])
    assert_close(ours, theirs, atol=atol, rtol=0)


def test_bf16_is_as_exact_as_torch_with_fp32_logits(seed):
    hidden, weight, labels = inputs(torch.bfloat16)
    logits = F.linear(hidden, weight).float()
    plain = F.cross_entropy(logits, labels, reduction="sum")
    ours = chunked_cross_entropy(hidden, weight, labels, chunk_bytes=4 * V * 4)
    assert ours.dtype == torch.float32
    assert_close(ours, plain, rtol=1e-6, atol=0)
    exact = torch.autograd.grad(reference(hidden, weight, labels), [hidden, weight])
    plain_grads = torch.autograd.grad(plain, [hidden, weight])
    ours_grads = torch.autograd.grad(ours, [hidden, weight])
    for ours_grad, plain_grad, exact_grad in zip(ours_grads, plain_grads, exact, strict=True):
        assert ours_grad.dtype == torch.bfloat16
        ours_error = (ours_grad.double() - exact_grad.double()).norm()
        assert ours_error <= 1.4 * (plain_grad.double() - exact_grad.double()).norm()


def test_many_bf16_chunks_do_not_lose_small_parts(seed):
    # Added up in bf16, thousands of small parts would vanish beside the sum.
    hidden = torch.ones(4096, D, dtype=torch.bfloat16)
    weight = torch.zeros(4, D, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    chunked_cross_entropy(hidden, weight, labels, chunk_bytes=1).backward()
    assert_close(weight.grad[1].float(), torch.full((D,), 1024.0))
    assert_close(weight.grad[0].float(), torch.full((D,), -3072.0))


def test_nothing_to_count_is_zero(seed):
    hidden, weight, labels = inputs()
    for h, label in ((hidden, torch.full_like(labels, -100)), (hidden[:0], labels[:0])):
        loss = chunked_cross_entropy(h, weight, label)
        assert loss.item() == 0.0
        for grad in torch.autograd.grad(loss, [h, weight], allow_unused=True):
            assert grad is not None
            assert not grad.any()


def test_ignored_tokens_may_hold_anything(seed):
    hidden, weight, labels = inputs()
    clean = chunked_cross_entropy(hidden, weight, labels)
    expected = torch.autograd.grad(clean, [hidden, weight])
    with torch.no_grad():
        hidden[0] = float("nan")
    loss = chunked_cross_entropy(hidden, weight, labels)
    assert_close(loss, clean)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert not grads[0][0].any()
    assert_close(grads, expected)


@pytest.mark.parametrize("ignore_index", [-1, 5])
def test_ignore_index_is_a_choice(seed, ignore_index):
    hidden, weight, labels = inputs()
    labels = labels.masked_fill(labels == -100, ignore_index)
    ours = chunked_cross_entropy(hidden, weight, labels, ignore_index=ignore_index)
    assert_close(ours, reference(hidden, weight, labels, ignore_index=ignore_index))


def test_logits_too_large_for_exp(seed):
    hidden, weight, labels = inputs(torch.float32)
    ours = chunked_cross_entropy(hidden * 1e4, weight, labels)
    assert_close(ours, reference(hidden * 1e4, weight, labels).float())
    for grad in torch.autograd.grad(ours, [hidden, weight]):
        assert grad.isfinite().all()


def test_backward_can_come_twice_and_in_halves(seed):
    hidden, weight, labels = inputs()
    want = torch.autograd.grad(reference(hidden, weight, labels), [hidden, weight])
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_bytes=500)
    for _ in range(2):
        assert_close(torch.autograd.grad(loss, [hidden, weight], retain_graph=True), want)
    (grad_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (grad_weight,) = torch.autograd.grad(loss, weight)
    assert_close((grad_hidden, grad_weight), want)


def test_only_wanted_gradients_are_kept(seed):
    hidden, weight, labels = inputs()

    def kept(hidden, weight):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
        ):
            loss = chunked_cross_entropy(hidden, weight, labels)
        assert_close(loss, reference(hidden, weight, labels))
        return shapes

    assert kept(hidden, weight) == [(T, D), (V, D)]
    assert kept(hidden.detach(), weight) == [(V, D)]
    assert kept(hidden, weight.detach()) == [(T, D)]
    with torch.no_grad():
        assert kept(hidden, weight) == []


def test_non_contiguous_inputs(seed):
    hidden, weight, labels = inputs()
    odd = [hidden.t().contiguous().t(), weight.t().contiguous().t(), labels.repeat(2)[: 2 * T : 2]]
    want = reference(hidden, weight, odd[2])
    ours = chunked_cross_entropy(*odd, chunk_bytes=9 * V * 8)
    assert_close(ours, want)
    assert_close(
        torch.autograd.grad(ours, [hidden, weight]), torch.autograd.grad(want, [hidden, weight])
    )


def test_autocast_takes_the_product_in_its_dtype_and_the_loss_in_fp32(seed):
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_cross_entropy(hidden, weight, labels)
    want = chunked_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, want)
    grads = torch.autograd.grad(ours, [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.float32] * 2


def test_autocast_leaves_fp64_alone(seed):
    arguments = inputs(torch.float64)
    want = chunked_cross_entropy(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_cross_entropy(*arguments)
    assert ours.dtype == torch.float64
    assert torch.equal(ours, want)


def peak_bytes(function):
    """The most bytes that torch's allocator held at one time for what `function` made."""
    cpu = [ProfilerActivity.CPU]
    # Without acc_events torch 2.11 warns that it may forget events.
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(nbytes for _, nbytes in sorted(changes, key=itemgetter(0))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_gradients_and_one_chunk(seed, dtype):
    tokens, hidden_size, vocabulary, chunk_bytes = 512, 32, 4000, 1 << 19
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    arguments = (hidden, weight, labels)

    def forward():
        chunked_cross_entropy(*arguments, chunk_bytes=chunk_bytes)

    def step():
        chunked_cross_entropy(*arguments, chunk_bytes=chunk_bytes).backward()

    def plain():
        F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()

    fp32_bytes = 4 * hidden_size * (tokens + vocabulary)
    # Of a chunk: logits, then gradient; in bf16 both dtypes at once and a product.
    is_wide = dtype == torch.float32
    chunk = chunk_bytes if is_wide else int(1.5 * chunk_bytes) + 6 * hidden_size * vocabulary
    assert peak_bytes(forward) <= fp32_bytes + chunk + 50_000
    # Backward: what was kept, and the gradients that it returns.
    assert peak_bytes(step) <= max(2 * fp32_bytes, fp32_bytes + chunk) + 50_000
    logits_bytes = 4 * tokens * vocabulary
    assert peak_bytes(plain) >= 2.9 * logits_bytes
    with torch.no_grad():
        assert peak_bytes(forward) <= chunk + 50_000


def test_mistakes_are_named(seed):
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"label 53 of token 1 is outside 0\.\.52"):
        chunked_cross_entropy(hidden, weight, labels.index_fill(0, torch.tensor([1]), V))
    with pytest.raises(ValueError, match="label -1 of token"):
        chunked_cross_entropy(hidden, weight, labels.clamp(min=-1))
    with pytest.raises(ValueError, match=r"got \(37, 12\) and \(12, 53\); flatten"):
        chunked_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(ValueError, match=r"each of the 37 tokens, got shape \(36,\)"):
        chunked_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(TypeError, match=r"torch\.float32 and torch\.float64; convert"):
        chunked_cross_entropy(hidden.float(), weight, labels)
    with pytest.raises(TypeError, match=r"labels_T must be torch\.int64, got torch\.int32"):
        chunked_cross_entropy(hidden, weight, labels.int())
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        chunked_cross_entropy(hidden, weight, labels, chunk_bytes=0)
    with pytest.raises(TypeError, match="chunk_bytes must be an int"):
        chunked_cross_entropy(hidden, weight, labels, chunk_bytes=1e2)
    with pytest.raises(TypeError, match="ignore_index must be a int, got a NoneType"):
        chunked_cross_entropy(hidden, weight, labels, ignore_index=None)


@pytest.mark.gpu
def test_on_a_gpu_in_bf16(seed):
    hidden, weight, labels = inputs(torch.bfloat16)
    want = chunked_cross_entropy(hidden, weight, labels, chunk_bytes=5 * V * 4)
    moved = [tensor.detach().cuda().requires_grad_() for tensor in (hidden, weight)]
    ours = chunked_cross_entropy(*moved, labels.cuda(), chunk_bytes=5 * V * 4)
    assert_close(ours.cpu(), want, rtol=1e-3, atol=0)
    ours_grads = torch.autograd.grad(ours, moved)
    want_grads = torch.autograd.grad(want, [hidden, weight])
    assert_close([grad.cpu() for grad in ours_grads], list(want_grads), rtol=2e-2, atol=2e-2)
