import pytest
import torch

from moe_pipeline.executor.stage_message import (
    FailureNotice,
    activations,
    gradients,
    pack_message,
    pack_notice,
    unpack,
)
from moe_pipeline.schedules.table.schedule import Action, Kind

SEND = Action(1, Kind.SEND_FORWARD, 3)


def test_activations_travel_nested_with_their_flags():
    weight = torch.randn(2, requires_grad=True)
    message, wanting = activations((weight * 2, {"ids": torch.arange(4)}, None, torch.zeros(0)))
    packed = pack_message(SEND, message)
    assert not any(t.requires_grad for t in packed) and len(wanting) == 1
    action, received = unpack(packed)
    assert action == SEND and received.flags == [True, False, False]
    first, state, none, empty = received.tree(received.tensors)
    assert torch.equal(first, weight * 2) and none is None and empty.shape == (0,)
    assert torch.equal(state["ids"], torch.arange(4))


def test_nothing_at_all_can_travel():
    _, received = unpack(pack_message(SEND, activations(())[0]))
    assert received.tree([]) == () and received.flags == []
    _, received = unpack(pack_message(SEND, gradients([])))
    assert received.gradients() == []


def test_gradients_travel_with_gaps():
    action = Action(2, Kind.SEND_BACKWARD, 0)
    _, received = unpack(pack_message(action, gradients([torch.ones(2), None, torch.zeros(0)])))
    got = received.gradients()
    assert torch.equal(got[0], torch.ones(2)) and got[1] is None and got[2].shape == (0,)


def test_causes_travel():
    notice = FailureNotice("rank 3 (stage 3) died: “Ω”")
    assert unpack(pack_notice(notice)) == notice


def test_messages_that_do_not_fit_are_refused():
    message = pack_message(SEND, activations((torch.ones(1),))[0])
    with pytest.raises(ValueError, match="1SEND_F3 announces 1 tensors and carries 2"):
        unpack([*message, torch.ones(1)])
    for wrong in ([], [torch.ones(3)], [torch.ones((), dtype=torch.uint8)]):
        with pytest.raises(ValueError, match="without a header"):
            unpack(wrong)
