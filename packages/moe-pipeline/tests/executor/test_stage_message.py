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
    packed = pack_message(SEND, message).tensors
    assert not any(t.requires_grad for t in packed) and len(wanting) == 1
    action, received = unpack(packed)
    assert action == SEND and received.flags == [True, False, False]
    first, state, none, empty = received.tree(received.tensors)
    assert torch.equal(first, weight * 2) and none is None and empty.shape == (0,)
    assert torch.equal(state["ids"], torch.arange(4))


def test_nothing_at_all_can_travel():
    _, received = unpack(pack_message(SEND, activations(())[0]).tensors)
    assert received.tree([]) == () and received.flags == []
    _, received = unpack(pack_message(SEND, gradients([])).tensors)
    assert received.gradients() == []


def test_gradients_travel_with_gaps():
    action = Action(2, Kind.SEND_BACKWARD, 0)
    _, received = unpack(
        pack_message(action, gradients([torch.ones(2), None, torch.zeros(0)])).tensors
    )
    got = received.gradients()
    assert torch.equal(got[0], torch.ones(2)) and got[1] is None and got[2].shape == (0,)


def test_causes_travel():
    notice = FailureNotice("rank 3 (stage 3) died: “Ω”")
    assert unpack(pack_notice(notice)) == notice


def test_messages_that_do_not_fit_are_refused():
    message = pack_message(SEND, activations((torch.ones(1),))[0]).tensors
    with pytest.raises(ValueError, match="1SEND_F3 announces 1 tensors and carries 2"):
        unpack([*message, torch.ones(1)])
    for wrong in ([], [torch.ones(3)], [torch.ones((), dtype=torch.uint8)]):
        with pytest.raises(ValueError, match="without a header"):
            unpack(wrong)


def test_what_travels_apart_is_announced_and_put_where_it_belongs():
    """An empty tensor, and one of another type of device, stay with the message."""
    x, empty, y = torch.ones(2, 3), torch.zeros(0, 3), torch.ones(4, dtype=torch.bfloat16)
    meta = torch.empty(5, device="meta")
    message, _ = activations((x, (meta, empty), y.expand(2, 4)))
    sent = pack_message(SEND, message, frozenset({"cpu"}))
    packed, beside = sent.tensors, sent.beside
    assert [t.device.type for t in packed[1:]] == ["meta", "cpu"] and packed[2].numel() == 0
    assert [t.shape for t in beside] == [(2, 3), (2, 4)] and beside[1].is_contiguous()
    _, received = unpack(packed)
    first, second = received.announced
    assert received.announced == sent.announced and received.brought == ()
    assert (first.place, first.kind, first.dtype, first.shape) == (0, "cpu", torch.float32, (2, 3))
    assert (second.place, second.dtype, second.shape) == (3, torch.bfloat16, (2, 4))
    whole = received.with_announced(beside)
    got_x, (got_meta, got_empty), got_y = whole.tree(whole.tensors)
    assert got_x is beside[0] and got_y is beside[1]
    assert got_meta is packed[1] and got_empty is packed[2]


def test_what_the_receiver_does_not_expect_comes_with_the_message():
    message, _ = activations((torch.ones(2, 3), torch.arange(4)))
    apart = frozenset({"cpu"})
    expected = pack_message(SEND, message, apart).announced
    alike = pack_message(SEND, message, apart, expected)
    assert len(alike.tensors) == 1 and len(alike.beside) == 2
    for slot in ((), expected[:1], expected[::-1]):
        other = pack_message(SEND, message, apart, slot)
        assert len(other.tensors) == 3 and not other.beside and other.announced == expected
        _, received = unpack(other.tensors)
        assert received.announced == expected and received.tensors == []
        whole = received.with_announced(received.brought)
        first, second = whole.tree(whole.tensors)
        assert torch.equal(first, torch.ones(2, 3)) and torch.equal(second, torch.arange(4))
    nothing = pack_message(SEND, activations(())[0], apart, expected)
    assert len(nothing.tensors) == 1 and nothing.announced == () and not nothing.beside
