import random

import pytest
import torch

from comm_collectives import isend_tensors, recv_tensors
from comm_collectives.base.transport.header import TransferHeader
from comm_collectives.p2p.eager import Framing
from ranktest import run_ranks
from ranktest.fixtures import seed as seed

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool),
    torch.complex64,
]


def drawn_tensor(draw):
    """Of 0 bytes to 1 MiB, some of them with gaps, 0-d or with a dim of 0."""
    shape = draw.choice([(), (0, 3), (7,), (3, 5), (40, 50), (1000, 30), (400, 300)])
    x = torch.randint(0, 2, (*shape, 2), dtype=torch.uint8)
    return x.to(draw.choice(DTYPES))[..., draw.randrange(2)]


def packed(framing, tensors):
    kinds = ["cpu"] * len(tensors)
    return framing.pack(TransferHeader.describe(tensors, 1, kinds), tensors)


def unpacked(framing, messages):
    """As over a wire that lets a message be shorter than the memory for it."""
    waiting = list(messages)

    def receive(flat):
        message = waiting.pop(0)
        assert message.numel() <= flat.numel()
        flat.fill_(255)
        flat[: message.numel()] = message

    found = framing.unpack(receive)
    assert waiting == []
    return found


def same(found, expected):
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found.to(torch.complex64), expected.to(torch.complex64))
    )


def test_any_sequence_of_transfers_arrives_as_it_was_sent(seed):
    draw = random.Random(seed)
    sender, receiver = Framing(), Framing()
    for _ in range(60):
        tensors = [drawn_tensor(draw) for _ in range(draw.choice([0, 1, 2, 3, 12]))]
        header, found = unpacked(receiver, packed(sender, tensors))
        assert header.number == 1
        assert len(found) == len(tensors)
        assert all(same(f, t) for f, t in zip(found, tensors, strict=True))


def test_a_transfer_of_ordinary_size_becomes_one_message_with_memory_of_its_own():
    sender, receiver = Framing(), Framing()
    x = torch.arange(30_000, dtype=torch.float32)
    counts = []
    for _ in range(3):
        messages = packed(sender, [x, x[:10]])
        counts.append(len(messages))
        _, found = unpacked(receiver, messages)
    assert counts == [2, 1, 1]
    assert [t.untyped_storage().nbytes() for t in found] == [120_000, 40]


def test_large_tensors_travel_uncopied_behind_it():
    x = torch.zeros(1 << 18)
    for _ in range(2):
        first, second = packed(Framing(), [x])
    assert first.numel() < 1000
    assert second.data_ptr() == x.data_ptr()


def test_headers_longer_than_the_first_message_arrive():
    sender, receiver = Framing(), Framing()
    tensors = [torch.full((1, 1, 1, 1, 1), i) for i in range(600)]
    for _ in range(2):
        _, found = unpacked(receiver, packed(sender, tensors))
        assert [int(t) for t in found] == list(range(600))


def test_what_is_no_transfer_is_told():
    assert unpacked(Framing(), [torch.zeros(512, dtype=torch.uint8)]) is None


@pytest.mark.parametrize("waits", [True, False])
def test_sizes_that_change_over_gloo_arrive_whether_or_not_the_receiver_waits(seed, waits):
    def tensors(number):
        draw = random.Random(seed + number)
        torch.manual_seed(seed + number)
        return [drawn_tensor(draw) for _ in range(draw.choice([0, 1, 3]))]

    def fn(rank, world_size):
        if rank == 0:
            handles = []
            for number in range(30):
                handles.append(isend_tensors(tensors(number), dst=1))
                if waits:
                    recv_tensors(src=1)
            for handle in handles:
                handle.wait()
            return True
        checked = []
        for number in range(30):
            found, expected = recv_tensors(src=0), tensors(number)
            checked += [same(f, t) for f, t in zip(found, expected, strict=True)]
            if waits:
                isend_tensors([], dst=0).wait()
        return all(checked)

    assert run_ranks(fn, 2) == [True, True]
