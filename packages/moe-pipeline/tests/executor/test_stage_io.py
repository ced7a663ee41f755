import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_pipeline.executor.stage_io import StageOutput, gate_inputs, gate_output


def test_gate_catches_the_gradients_of_the_wanted_inputs(seed):
    x, ids, y = torch.randn(3, 2), torch.arange(3), torch.randn(3, 2)
    (gx, gids, gy), sink = gate_inputs((x, ids, y), [True, False, True])
    assert gids is ids
    (gx * 2 + gy * gy).sum().backward()
    assert torch.equal(sink.gradients[0], torch.full((3, 2), 2.0))
    assert torch.equal(sink.gradients[1], 2 * y)


def test_an_input_without_part_in_the_result_has_no_gradient(seed):
    (a, _b), sink = gate_inputs((torch.randn(2), torch.randn(2)), [True, True])
    a.sum().backward()
    assert sink.gradients[1] is None
    _, untouched = gate_inputs((torch.randn(2),), [True])
    assert untouched.gradients == [None]


def test_gate_without_wanted_inputs_passes_them_on():
    x = torch.arange(3)
    inputs, sink = gate_inputs((x,), [False])
    assert inputs[0] is x and sink.gradients == []


def test_an_input_that_nothing_saved_is_freed_before_the_backward():
    x = torch.randn(1000)
    storage = weakref.ref(x.untyped_storage())
    (gated,), sink = gate_inputs((x,), [True])
    result = gated * 3
    del x, gated
    gc.collect()
    assert storage() is None
    result.sum().backward()
    assert torch.equal(sink.gradients[0], torch.full((1000,), 3.0))


def test_the_gradient_of_an_output_is_freed_once_it_is_used():
    """When the backward of the operation before the last runs, it is gone already."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            seen.append(storage.expired())
            return gradient

    weight = torch.ones(1000, requires_grad=True)
    root, source = gate_output(Look.apply(weight * 2) * 3)
    source.gradient = torch.full((1000,), 5.0)
    storage = StorageWeakRef(source.gradient.untyped_storage())
    root.backward()
    assert seen == [True]
    assert torch.equal(weight.grad, torch.full((1000,), 30.0))


def test_the_gate_of_an_output_keeps_neither_output_nor_graph():
    output = torch.ones(1000, requires_grad=True) * 2
    storage = StorageWeakRef(output.untyped_storage())
    root, source = gate_output(output)
    graph = weakref.ref(root.grad_fn)
    del output
    assert storage.expired() and source.shape == (1000,)
    del root
    assert graph() is None


def test_a_bare_tensor_or_a_number_is_no_stage_output():
    assert StageOutput(tensors=[1.0]).loss is None
    with pytest.raises(TypeError, match=r"tensors of type Tensor; give a tuple .* \(hidden,\)"):
        StageOutput(tensors=torch.ones(2))
    with pytest.raises(TypeError, match="a loss of type float; give a 0-d tensor, or None"):
        StageOutput(loss=1.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float8_e5m2])
def test_outputs_of_every_dtype_have_a_root(dtype):
    x = torch.ones(3, requires_grad=True)
    root, source = gate_output((2 * x).to(dtype))
    source.gradient = torch.ones(3, dtype=dtype)
    root.backward()
    assert x.grad.tolist() == [2.0] * 3
