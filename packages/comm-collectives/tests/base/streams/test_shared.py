"""Streams through shared memory: every byte once and in order, a peer's end, bounded memory."""

import os
import random
import signal
import time
from datetime import timedelta

import torch.distributed as dist

from comm_collectives.base.streams.shared import ShmStreams
from ranktest import collect_ranks, run_ranks

LIMIT_S = 60.0


def _open(rank, size):
    def all_gather(message):
        gathered = [None] * size
        dist.all_gather_object(gathered, message)
        return gathered

    streams = ShmStreams.open(rank, size, all_gather)
    assert streams is not None
    return streams


def _store():
    return dist.distributed_c10d._get_default_store()


def _exchange(streams, outgoing, incoming):
    """Send and receive by peer, all at once and in random pieces."""
    draw = random.Random(streams.rank)
    sent, got = dict.fromkeys(outgoing, 0), dict.fromkeys(incoming, 0)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        sending = [peer for peer, data in outgoing.items() if sent[peer] < len(data)]
        receiving = [peer for peer, data in incoming.items() if got[peer] < len(data)]
        if not sending and not receiving:
            return
        moved = 0
        for peer in sending:
            cut = sent[peer] + draw.choice([1, 7, 5_000, 300_000, 3_000_000])
            count = streams.send_some(peer, outgoing[peer][sent[peer] : cut])
            sent[peer], moved = sent[peer] + count, moved + count
        for peer in receiving:
            cut = got[peer] + draw.choice([1, 9, 6_000, 400_000, 2_000_000])
            count = streams.recv_some(peer, incoming[peer][got[peer] : cut])
            got[peer], moved = got[peer] + count, moved + count
        if not moved:
            streams.wait(receiving, sending, 5.0)
    raise AssertionError((sent, got))


def test_every_byte_arrives_once_and_in_order_whatever_the_pieces():
    def fn(rank, size):
        streams = _open(rank, size)
        peers = [peer for peer in range(size) if peer != rank]
        lengths = {(a, b): 40_001 * (3 * a + b) ** 2 for a in range(size) for b in range(size)}
        data = {(a, b): random.Random(3 * a + b).randbytes(n) for (a, b), n in lengths.items()}
        outgoing = {peer: memoryview(data[rank, peer]) for peer in peers}
        incoming = {peer: memoryview(bytearray(lengths[peer, rank])) for peer in peers}
        _exchange(streams, outgoing, incoming)
        return all(incoming[peer] == data[peer, rank] for peer in peers)

    assert run_ranks(fn, 3) == [True] * 3


def test_a_full_stream_takes_nothing_and_memory_is_bounded():
    def fn(rank, size):
        streams = _open(rank, size)
        if rank:
            _store().wait(["filled"], timedelta(seconds=LIMIT_S))
            got = memoryview(bytearray(1 << 22))
            count = streams.recv_some(0, got)
            _store().set("emptied", "yes")
            return count
        taken = streams.send_some(1, memoryview(bytearray(1 << 22)))
        more = streams.send_some(1, memoryview(b"x"))
        started = time.monotonic()
        streams.wait([], [1], 0.2)
        waited_s = time.monotonic() - started
        _store().set("filled", "yes")
        _store().wait(["emptied"], timedelta(seconds=LIMIT_S))
        streams.wait([], [1], LIMIT_S)
        return taken, more, waited_s >= 0.2, streams.send_some(1, memoryview(b"x"))

    (taken, more, has_waited, then), got = run_ranks(fn, 2)
    assert (more, has_waited, then) == (0, True, 1)
    assert 0 < taken == got <= ShmStreams.num_bytes(2) <= 1.1 * 2**20
    assert ShmStreams.num_bytes(40) < 9 * 2**20


def test_what_a_peer_sent_before_it_was_killed_can_still_be_received():
    def fn(rank, size):
        streams = _open(rank, size)
        if rank == 1:
            streams.send_some(0, memoryview(b"last words"))
            streams.wait([0], [], LIMIT_S)
            os.kill(os.getpid(), signal.SIGKILL)
        into = memoryview(bytearray(64))
        streams.wait([1], [], LIMIT_S)
        before = streams.recv_some(1, into[:4])
        streams.send_some(1, memoryview(b"end"))
        started = time.monotonic()
        while not streams.gone():
            streams.wait([] if streams.gone() else [2], [], LIMIT_S)
        noticed_s = time.monotonic() - started
        after = streams.recv_some(1, into[4:])
        lost = streams.send_some(1, memoryview(bytearray(1 << 22)))
        return before, bytes(into[: before + after]), streams.gone(), noticed_s, lost

    first, killed, _ = collect_ranks(lambda r, n: fn(r, n) if r < 2 else _stay(r, n), 3)
    assert killed.exitcode == -signal.SIGKILL
    before, words, gone, noticed_s, lost = first.value
    assert (before, words, gone, lost) == (4, b"last words", (1,), 1 << 22)
    assert noticed_s < 10


def _stay(rank, size):
    """Be there until the first rank is done."""
    streams = _open(rank, size)
    deadline = time.monotonic() + LIMIT_S
    while 0 not in streams.gone() and time.monotonic() < deadline:
        streams.wait([0], [], 1.0)


def test_a_rank_that_closes_is_gone():
    def fn(rank, size):
        streams = _open(rank, size)
        if rank:
            streams.close()
            streams.close()
            _store().wait(["seen"], timedelta(seconds=LIMIT_S))
            return ()
        deadline = time.monotonic() + LIMIT_S
        while not streams.gone() and time.monotonic() < deadline:
            streams.wait([1], [], LIMIT_S)
        gone = streams.gone()
        _store().set("seen", "yes")
        return gone

    assert run_ranks(fn, 2)[0] == (1,)
