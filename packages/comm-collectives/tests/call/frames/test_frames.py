"""Frames over real streams: what ends well, what differs, and what comes late."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from comm_collectives._torch_private import default_store
from comm_collectives.base.streams.sockets import SocketStreams
from comm_collectives.base.transport.clock import SYSTEM_CLOCK
from comm_collectives.call.frames.frames import Cargo, Frames
from comm_collectives.call.frames.link import SIGNATURE_BYTES, Kind, Notice
from ranktest import mark, more_than_sockets_hold, run_ranks, until_marked

_SAME = bytes(SIGNATURE_BYTES)


class _LeftError(Exception):
    """A peer did not come, or has left."""


@dataclass
class _Waiter:
    number: int = 1
    limit_s: float = 30.0

    def not_all_here(self, missing: Collection[int], gone: Collection[int]) -> Exception:
        return _LeftError(f"missing {sorted(missing)}, gone {sorted(gone)}")

    def told(self, notice: Notice) -> Exception:
        return _LeftError(f"{notice.peer} left {notice.number}: {notice.kind} {notice.text}")

    def asked(self, peer: int, question: bytes) -> None:
        """Nobody asks."""

    def stuck(self, told: Sequence[bytes]) -> None:
        """Nobody is told."""

    def go_on(self) -> None:
        """Nobody was told."""


def _frames(rank: int, size: int) -> Frames:
    streams = SocketStreams(rank=rank, size=size, store=default_store(), key="test")
    return Frames(streams, SYSTEM_CLOCK)


def _swap(frames: Frames, waiter: _Waiter, data: list[bytes], step: int = 1) -> list[bytes]:
    """Exchange payloads of any size."""
    cargo = Cargo(payloads=[memoryview(piece) for piece in data])
    theirs = frames.offer(_SAME, step=step, cargo=cargo, waiter=waiter)
    rank = frames.streams.rank
    room = [bytearray(0 if r == rank else theirs[r].size) for r in range(len(data))]
    frames.receive([memoryview(piece) for piece in room], waiter)
    return [bytes(data[rank] if r == rank else piece) for r, piece in enumerate(room)]


@pytest.mark.parametrize("length", [0, 1, 16_384, 16_385, 70_000, 5_000_000])
def test_payloads_of_every_size_arrive_whole(length: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        frames = _frames(rank, world_size)
        for number in (1, 2):
            data = [bytes([rank, peer]) * length for peer in range(world_size)]
            got = _swap(frames, _Waiter(number), data)
            assert got == [bytes([peer, rank]) * length for peer in range(world_size)]

    run_ranks(fn, 3)


def test_parts_longer_than_the_staging_memory_arrive() -> None:
    def fn(rank: int, world_size: int) -> None:
        frames, waiter = _frames(rank, world_size), _Waiter()
        parts = [bytes([rank]) * 200_000] * world_size
        theirs = frames.offer(_SAME, step=1, cargo=Cargo(parts=parts), waiter=waiter)
        frames.receive(None, waiter)
        assert theirs[1 - rank].part == bytes([1 - rank]) * 200_000

    run_ranks(fn, 2)


def test_payload_that_nobody_wants_is_skipped() -> None:
    def fn(rank: int, world_size: int) -> None:
        frames, waiter = _frames(rank, world_size), _Waiter()
        cargo = Cargo(payloads=[memoryview(bytes(3_000_000))] * world_size)
        frames.offer(_SAME, step=1, cargo=cargo, waiter=waiter)
        frames.drop()
        assert frames.tell(bytes([65 + rank]), waiter) == {1 - rank: bytes([66 - rank])}
        assert _swap(frames, _Waiter(2), [b"a", b"b"]) == [[b"a", b"b"][rank]] * 2

    run_ranks(fn, 2)


def test_peer_that_left_the_call_is_told_of_though_it_left_long_before() -> None:
    def fn(rank: int, world_size: int) -> str:
        frames = _frames(rank, world_size)
        _swap(frames, _Waiter(1), [b"connected"] * 2)
        if rank == 1:
            until_marked("left")
        with pytest.raises(_LeftError) as caught:
            _swap(frames, _Waiter(2, limit_s=0.2), [b"old"] * 2)
        frames.fail(2, "SomeError", f"of rank {rank}")
        mark("left")
        assert _swap(frames, _Waiter(3), [b"new"] * 2) == [b"new"] * 2
        return str(caught.value)

    assert run_ranks(fn, 2) == ["missing [1], gone []", "0 left 2: SomeError of rank 0"]


def test_peer_that_left_an_earlier_call_after_doing_its_part_is_no_failure() -> None:
    def fn(rank: int, world_size: int) -> None:
        frames = _frames(rank, world_size)
        _swap(frames, _Waiter(1), [b"a"] * 2)
        dist.barrier()
        if rank == 0:
            frames.fail(1, "SomeError", "")
        assert _swap(frames, _Waiter(2), [b"b"] * 2) == [b"b"] * 2

    run_ranks(fn, 2)


def test_peer_that_ended_after_its_part_is_no_failure_and_then_is_one() -> None:
    def fn(rank: int, world_size: int) -> str:
        frames = _frames(rank, world_size)
        if rank == 1:
            _swap(frames, _Waiter(), [b"a" * 100_000] * 2)
            frames.streams.close()
            return ""
        time.sleep(0.5)
        assert _swap(frames, _Waiter(), [b"a" * 100_000] * 2)
        with pytest.raises(_LeftError) as caught:
            _swap(frames, _Waiter(2), [b"b"] * 2)
        return str(caught.value)

    assert run_ranks(fn, 2)[0] == "missing [1], gone [1]"


def test_steps_that_came_are_seen_without_waiting() -> None:
    def fn(rank: int, world_size: int) -> object:
        frames = _frames(rank, world_size)
        if rank == 0:
            return _swap(frames, _Waiter(7), [b"x"] * 2)
        started = time.monotonic()
        while not frames.ahead():
            assert time.monotonic() < started + 30
            frames.streams.wait((0,), (), 0.05)
        seen = frames.ahead()[0]
        assert _swap(frames, _Waiter(7), [b"y"] * 2) == [b"x", b"y"]
        last = frames.last_seen(0)
        return seen.number, seen.step, seen.size, last is not None and last.number

    assert run_ranks(fn, 2)[1] == (7, 1, 1, 7)


def test_streams_are_never_handed_payload_that_was_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind each payload is a look for word of a peer that left: into memory without rows."""

    def fn(rank: int, world_size: int) -> None:
        frames = _frames(rank, world_size)
        mark, seen, recv = b"row of tokens", [], SocketStreams.recv_some

        def watched(streams: SocketStreams, peer: int, into: memoryview) -> int:
            seen.append(mark in bytes(into))
            return recv(streams, peer, into)

        monkeypatch.setattr(SocketStreams, "recv_some", watched)
        for number in (1, 2, 3):
            got = _swap(frames, _Waiter(number), [mark * 10] * world_size)
            assert got == [mark * 10] * world_size
        assert not any(seen)

    run_ranks(fn, 2)


def test_payload_of_a_call_that_failed_is_sent_from_memory_of_its_own() -> None:
    length = more_than_sockets_hold()

    def fn(rank: int, world_size: int) -> None:
        frames = _frames(rank, world_size)
        _swap(frames, _Waiter(1), [b"connected"] * 2)
        data, waiter = bytearray(b"a" * length), _Waiter(2, limit_s=0.3 if rank == 0 else 30)
        if rank == 1:
            until_marked("left")  # so that rank 0 has left with most of its payload unsent
        cargo, room = Cargo(payloads=[memoryview(data)] * 2), bytearray(length)
        with pytest.raises(_LeftError):
            frames.offer(_SAME, step=1, cargo=cargo, waiter=waiter)
            frames.receive([memoryview(room)] * 2, waiter)
        frames.fail(2, "SomeError", "")
        mark("left")
        data[:] = b"b" * length  # as a program may that has the error
        assert rank == 0 or room == b"a" * length
        assert _swap(frames, _Waiter(3), [b"new"] * 2) == [b"new"] * 2

    run_ranks(fn, 2)


def test_word_of_a_call_that_failed_outlives_the_failure_of_the_next() -> None:
    """Rank 1 comes when rank 0 has left two calls, the first with its frame half sent."""
    length = more_than_sockets_hold()

    def fn(rank: int, world_size: int) -> None:
        frames = _frames(rank, world_size)
        _swap(frames, _Waiter(1), [b"connected"] * 2)
        told = []
        if rank == 1:
            until_marked("left two")
        for number in (2, 3):
            waiter = _Waiter(number, limit_s=0.3 if rank == 0 else 30)
            data = [bytes([number]) * length] * 2
            with pytest.raises(_LeftError) as error:
                _swap(frames, waiter, data)
            told.append(str(error.value))
            frames.fail(number, "SomeError", "")
        mark("left two")
        assert rank == 0 or all(f"0 left {n}" in text for n, text in zip((2, 3), told, strict=True))
        assert _swap(frames, _Waiter(4), [b"new"] * 2) == [b"new"] * 2

    run_ranks(fn, 2)


def test_word_to_a_peer_that_never_reads_neither_piles_up_nor_costs_time() -> None:
    text = bytes(100_000)
    num_words = 2 * more_than_sockets_hold() // len(text)

    def fn(rank: int, world_size: int) -> float:
        frames, total_s = _frames(rank, world_size), 0.0
        _swap(frames, _Waiter(1), [b"connected"] * 2)
        if rank == 1:
            until_marked("said all")
        for _ in range(num_words if rank == 0 else 0):
            started = time.perf_counter()
            frames.say(Kind.QUESTION, [1], text)
            total_s += time.perf_counter() - started
            assert frames._links[1].queued <= 2
        if rank == 0:
            frames.say(Kind.QUESTION, [1], b"the last")
            mark("said all")
        assert _swap(frames, _Waiter(2), [b"a", b"b"]) == [[b"a", b"b"][rank]] * 2
        assert frames.waiting()[0] == ({} if rank == 0 else {0: b"the last"})
        return total_s

    in_full_s = 0.1 * num_words / 2
    assert run_ranks(fn, 2, timeout_s=120)[0] < in_full_s / 4
