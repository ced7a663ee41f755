import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from moe_pipeline.recomputation.offload import ActivationOffload
from moe_pipeline.recomputation.output_discarding import discard_outputs, discarded
from moe_pipeline.recomputation.recomputing import recompute
from moe_pipeline.weight_grad.store import WeightGradStore, split_backward


def model(device="cpu"):
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers).to(device)


def gradients(module, x):
    found = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    x.grad = None
    return found


def test_on_a_cpu_nothing_moves_and_nothing_changes(seed):
    module, x = model(), torch.randn(32, 64, requires_grad=True)
    module(x).square().sum().backward()
    expected = gradients(module, x)
    offload = ActivationOffload(module.parameters(), min_bytes=1)
    with offload:
        loss = module(x).square().sum()
    assert (offload.offloaded_bytes, offload.total_bytes) == (0, 0)
    loss.backward()
    assert_close(gradients(module, x), expected, atol=0, rtol=0)


def test_tensors_without_memory_are_left_alone():
    with FakeTensorMode():
        linear = nn.Linear(4, 4)
        with ActivationOffload(linear.parameters(), min_bytes=1):
            loss = linear(torch.randn(3, 4)).sum()
        loss.backward()
    assert linear.weight.grad.shape == (4, 4)


def test_contexts_compose_in_any_depth(seed):
    module, x, store = model(), torch.randn(32, 64, requires_grad=True), WeightGradStore()

    def forward(x):
        for norm, linear, act in module:
            x = x + recompute(act, linear(discarded(norm, x)))
        return x

    forward(x).square().sum().backward()
    expected = gradients(module, x)
    offload = ActivationOffload(module.parameters(), min_bytes=1)
    for _ in range(2):
        with offload, split_backward(store), discard_outputs(), offload:
            loss = forward(x).square().sum()
        with store.deferring():
            loss.backward()
        store.run()
        assert_close(gradients(module, x), expected, atol=0, rtol=0)


def test_an_error_in_the_forward_ends_the_context(seed):
    offload = ActivationOffload()
    with pytest.raises(KeyError), offload:
        raise KeyError
    assert torch.sin(torch.ones(2, requires_grad=True)).sum().backward() is None


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="min_bytes=0"):
        ActivationOffload(min_bytes=0)
    with pytest.raises(ValueError, match="max_bytes=-1"):
        ActivationOffload(max_bytes=-1)


@pytest.mark.gpu(needs="storages that know their device")
def test_gpu_activations_leave_and_come_back(seed):
    module = model("cuda")
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    module(x).square().sum().backward()
    expected = gradients(module, x)
    offload = ActivationOffload(module.parameters(), min_bytes=256 * 64 * 4)
    for _ in range(2):
        with offload:
            loss = module(x).square().sum()
        # Of each layer the outputs of norm, linear and GELU, which the next operations save.
        assert offload.offloaded_bytes == 4 * 3 * 256 * 64 * 4
        loss.backward()
        assert_close(gradients(module, x), expected, atol=0, rtol=0)
        del loss
        gc.collect()
        assert offload.offloaded_bytes == 0
    assert offload.total_bytes == 2 * 4 * 3 * 256 * 64 * 4


@pytest.mark.gpu(needs="storages that know their device")
def test_gpu_memory_is_free_between_forward_and_backward(seed):
    module = model("cuda")
    x = torch.randn(1 << 16, 64, device="cuda", requires_grad=True)
    held = []
    for offload in (None, ActivationOffload(module.parameters())):
        before = torch.cuda.memory_allocated()
        if offload is None:
            loss = module(x).sum()
        else:
            with offload:
                loss = module(x).sum()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients(module, x)
        del loss
        gc.collect()
    assert held[1] < 0.2 * held[0]


@pytest.mark.gpu(needs="storages that know their device")
def test_gpu_storages_are_copied_once_and_parameters_not_at_all(seed):
    weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
    x = torch.randn(256, 64, device="cuda", requires_grad=True)

    def function():
        hidden = torch.sin(x)  # x is a leaf that requires grad
        return (hidden @ weight.t() + hidden.view(64, 256).t().reshape(256, 64) @ weight).exp()

    expected = torch.autograd.grad(function().sum(), [x, weight])
    offload = ActivationOffload([weight], min_bytes=1)
    with offload:
        loss = function().sum()
    size = 256 * 64 * 4
    # Hidden, of which both products keep a view, and the exponential.
    assert offload.offloaded_bytes == 2 * size
    assert_close(torch.autograd.grad(loss, [x, weight]), expected, atol=0, rtol=0)


@pytest.mark.gpu(needs="storages that know their device")
def test_gpu_users_on_other_streams_wait_for_the_copy_back(seed):
    side = torch.cuda.Stream()

    def function(x):
        hidden = x * 2
        here = hidden.square()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = hidden.sin() * hidden
        torch.cuda.current_stream().wait_stream(side)
        return (here + there).sum()

    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(function(x), x)
    for _ in range(5):
        with ActivationOffload():
            loss = function(x)
        assert_close(torch.autograd.grad(loss, x)[0], expected, atol=0, rtol=0)


@pytest.mark.gpu(needs="storages that know their device")
def test_gpu_limits_and_changes_in_place_are_respected(seed):
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    size = 256 * 64 * 4
    offload = ActivationOffload(min_bytes=1, max_bytes=2 * size)
    with offload:
        y = x
        for _ in range(4):
            y = torch.exp(y)
    assert offload.offloaded_bytes == 2 * size
    y.sum().backward()
    offload = ActivationOffload(min_bytes=size + 1)
    with offload:
        y = F.gelu(x).exp()
    assert offload.total_bytes == 0
    offload = ActivationOffload(min_bytes=1)
    a = torch.randn(256, 64, device="cuda")
    with offload:
        first = x * a
        a.add_(1)
        second = x * a
    assert offload.total_bytes == 2 * size
    (grad,) = torch.autograd.grad((first + second).sum(), x)
    assert_close(grad, 2 * a - 1)
