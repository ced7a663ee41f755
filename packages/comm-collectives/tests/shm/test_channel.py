"""Steps over shared memory: who waits for whom, what leaving means, how much room there is."""

import ctypes
import math
import time

import pytest
import torch
import torch.distributed as dist

from comm_collectives.errors import PeerFailedError
from comm_collectives.shm.channel import Channel, LeftEarlierError
from ranktest import run_ranks


def _open(rank, size):
    def all_gather(message):
        own = torch.frombuffer(bytearray(message.ljust(256, b"\0")), dtype=torch.uint8)
        told = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(told, own)
        return [bytes(other.tolist()) for other in told]

    channel = Channel.open(rank, [10 + r for r in range(size)], all_gather)
    assert channel is not None
    return channel


def _soon():
    return time.monotonic() + 20


def test_slots_and_heads_of_a_step_are_those_of_all_ranks():
    def fn(rank, size):
        channel = _open(rank, size)
        seen = []
        for step in range(7):
            channel.begin()
            mine = bytes([rank, step]) * 4
            ctypes.memmove(channel.mine(), mine, len(mine))
            channel.announce(b"head" + mine)
            assert channel.arrived(_soon())
            slots = [ctypes.string_at(channel.theirs(r), 8) for r in range(size)]
            assert slots == [bytes([r, step]) * 4 for r in range(size)]
            assert channel.heads(12) == [b"head" + slot for slot in slots]
            typed = [channel.their_tensor(r, torch.int16)[0].item() for r in range(size)]
            seen.append(typed)
        return seen

    answers = run_ranks(fn, 3)
    assert answers == [[[256 * step + r for r in range(3)] for step in range(7)]] * 3


def test_slot_survives_while_another_rank_is_one_step_ahead():
    def fn(rank, size):
        channel = _open(rank, size)
        channel.begin()
        for step in range(50):
            channel.my_tensor(torch.int64)[:1000] = 1000 * step + rank
            channel.announce()
            assert channel.arrived(_soon())
            if step % 7 == rank:
                time.sleep(0.002)  # the other may announce its next step meanwhile
            values = channel.their_tensor(1 - rank, torch.int64)[:1000].unique().tolist()
            assert values == [1000 * step + 1 - rank]

    run_ranks(fn, 2)


def test_absent_rank_is_missing_and_a_mere_look_does_not_wait():
    def fn(rank, size):
        channel = _open(rank, size)
        if rank == 0:
            channel.begin()
            channel.announce()
            assert not channel.arrived(-math.inf)
            assert not channel.arrived(time.monotonic() + 0.05)
            missing = channel.missing()
            dist.barrier()
            assert channel.arrived(_soon())
            return missing, channel.missing()
        dist.barrier()
        channel.begin()
        channel.announce()
        channel.arrived(_soon())
        return None

    assert run_ranks(fn, 2)[0] == ([11], [])


def test_rank_that_leaves_fails_its_call_for_the_others_and_the_next_call_goes_elsewhere():
    def fn(rank, size):
        channel = _open(rank, size)
        if rank == 0:
            channel.begin()
            channel.announce()
            channel.leave()
            assert not channel.is_open
            dist.barrier()
            dist.barrier()  # until then it has left, but is not gone
            return
        dist.barrier()
        channel.begin()
        channel.announce()
        with pytest.raises(PeerFailedError, match="rank 10 gave up in this call"):
            channel.arrived(_soon())
        channel.begin()
        channel.announce()
        with pytest.raises(LeftEarlierError, match="rank 10 has left"):
            channel.arrived(_soon())
        dist.barrier()

    run_ranks(fn, 2)


def test_rank_that_closes_counts_as_gone():
    def fn(rank, size):
        channel = _open(rank, size)
        if rank == 0:
            channel.close()
            return
        channel.begin()
        channel.announce()
        with pytest.raises(PeerFailedError, match="connection closed by peer: rank 10 is gone"):
            channel.arrived(_soon())

    run_ranks(fn, 2)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_step_holds_what_is_promised_for_any_number_of_pieces(num_ranks):
    def fn(rank, size):
        channel = _open(rank, size)
        slot = channel.my_tensor(torch.uint8)
        return channel.capacity, slot.numel(), slot.data_ptr() % 64

    for capacity, num_bytes, misalignment in run_ranks(fn, num_ranks):
        assert misalignment == 0
        assert capacity == 2**20
        assert num_bytes >= capacity + 64 * num_ranks
