import gc
import weakref

import pytest
import torch

from moe_pipeline.errors import StageTransferError
from moe_pipeline.stage_io import (
    gate_inputs,
    pack_activations,
    pack_gradients,
    unpack_activations,
    unpack_gradients,
)


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
    assert inputs == (x,) and sink.gradients == []


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


def test_activations_travel_with_their_flags():
    weight = torch.randn(2, requires_grad=True)
    message = pack_activations([weight * 2, torch.arange(4), torch.zeros(0)])
    assert not any(t.requires_grad for t in message)
    tensors, flags = unpack_activations(message)
    assert flags == [True, False, False]
    assert torch.equal(tensors[1], torch.arange(4))
    assert unpack_activations(pack_activations([])) == ((), [])


def test_gradients_travel_with_gaps():
    gradients = [torch.ones(2), None, torch.zeros(0)]
    got = unpack_gradients(pack_gradients(gradients), 3)
    assert torch.equal(got[0], torch.ones(2)) and got[1] is None and got[2].shape == (0,)


def test_messages_that_do_not_fit_are_refused():
    with pytest.raises(StageTransferError, match="covers 1 tensors, but 2 sent tensors"):
        unpack_gradients(pack_gradients([None]), 2)
    with pytest.raises(StageTransferError, match="announces 1 tensors and carries 2"):
        unpack_activations([torch.ones(1, dtype=torch.uint8), torch.ones(1), torch.ones(1)])
