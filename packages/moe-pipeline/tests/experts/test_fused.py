import pytest
import torch

from moe_pipeline.experts.activations import Activation
from moe_pipeline.experts.fused import fused_experts
from moe_pipeline.experts.weights import ExpertWeights

ACT = Activation()


def make(rows, experts, hidden, intermediate):
    return (
        torch.randn(rows, hidden, requires_grad=True),
        torch.rand(rows, requires_grad=True),
        torch.randn(experts, 2 * intermediate, hidden, requires_grad=True),
        torch.randn(experts, hidden, intermediate, requires_grad=True),
    )


def run(tensors, counts, activation=ACT):
    x, weights, gate_up, down = tensors
    held = ExpertWeights(gate_up_EGD=gate_up, down_EDH=down)
    return fused_experts(x, weights, held, counts, activation)


def saved_elements(tensors, counts):
    """Elements of each tensor that is kept for backward and is no weight of an expert."""
    parameters = {t.data_ptr() for t in tensors[2:]}
    saved = []

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(tensors, counts)
    return sorted(saved)


def test_only_input_weights_and_gate_up_output_are_saved(seed):
    rows, experts, hidden, intermediate = 24, 4, 20, 8
    tensors = make(rows, experts, hidden, intermediate)
    assert saved_elements(tensors, (10, 0, 6, 8)) == [rows, rows * 2 * intermediate, rows * hidden]


def test_the_input_is_not_saved_for_frozen_weights(seed):
    tensors = make(24, 4, 20, 8)
    tensors[2].requires_grad_(False)
    assert saved_elements(tensors, (10, 0, 6, 8)) == [24, 24 * 16]


def test_gradients_of_empty_experts_are_exact_zeros(seed):
    tensors = make(6, 4, 8, 4)
    run(tensors, (0, 6, 0, 0)).sum().backward()
    for weight in tensors[2:]:
        assert not weight.grad[[0, 2, 3]].any()
        assert weight.grad[1].any()


def test_gradients_keep_the_strides_of_the_weights(seed):
    x, weights, gate_up, down = make(6, 2, 8, 4)
    stored = [t.detach().mT.contiguous().requires_grad_() for t in (gate_up, down)]
    run((x, weights, *(t.mT for t in stored)), (2, 4)).sum().backward()
    run((x, weights, gate_up, down), (2, 4)).sum().backward()
    for leaf, weight in zip(stored, (gate_up, down), strict=True):
        assert leaf.grad.is_contiguous()
        torch.testing.assert_close(leaf.grad.mT, weight.grad)


def test_inputs_are_not_modified(seed):
    tensors = make(6, 2, 8, 4)
    before = [t.detach().clone() for t in tensors]
    gradient = torch.ones(6, 8)
    run(tensors, (2, 4)).backward(gradient)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert torch.equal(gradient, torch.ones(6, 8))


def test_backward_runs_again_over_a_kept_graph(seed):
    tensors = make(6, 2, 8, 4)
    loss = run(tensors, (2, 4)).square().sum()
    once = torch.autograd.grad(loss, tensors, retain_graph=True)
    twice = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_a_second_derivative_is_refused(seed):
    tensors = make(6, 2, 8, 4)
    (grad,) = torch.autograd.grad(
        run(tensors, (2, 4)).square().sum(), tensors[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
