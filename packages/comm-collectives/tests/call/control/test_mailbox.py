"""The control exchange place in shared memory: all ranks see the same call, or the same failure."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from comm_collectives.base.transport import shm_region
from comm_collectives.call.control.mailbox import Arrival, SharedMailbox
from comm_collectives.call.control.mailbox_slots import Slot
from comm_collectives.call.signature import INLINE_BYTES, SIGNATURE_BYTES
from ranktest import collect_ranks, run_ranks

_LIMIT_S = 20.0
_COMPLETE = Arrival(missing=(), dead=(), withdrawn=())


def _all_gather(message: bytes) -> list[bytes]:
    sent = torch.frombuffer(bytearray(message.ljust(256, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [bytes(text.tolist()) for text in received]


def _open(rank: int, size: int) -> SharedMailbox:
    mailbox = SharedMailbox.open(rank, size, _all_gather)
    assert mailbox is not None
    return mailbox


def _text(length: int, *key: int) -> bytes:
    """Bytes that differ for every key."""
    return random.Random(hash(key)).randbytes(length)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_reads_what_every_rank_posted(size: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        mailbox = _open(rank, world_size)
        ranks = range(world_size)
        for number in range(1, 60):
            lengths = [[_LENGTHS[(number + s + 3 * d) % 4] for d in ranks] for s in ranks]
            parts = [_text(lengths[rank][dst], number, rank, dst) for dst in ranks]
            speaks = [(number + src) % 3 > 0 for src in ranks]
            common = _text(number % (SIGNATURE_BYTES + 1), number, rank)
            mailbox.post(number, common, parts if speaks[rank] else None)
            assert mailbox.wait(number, _LIMIT_S) == _COMPLETE
            assert mailbox.commons(number) == [
                _text(number % (SIGNATURE_BYTES + 1), number, src).ljust(SIGNATURE_BYTES, b"\0")
                for src in ranks
            ]
            assert mailbox.parts(number) == [
                _text(lengths[src][rank] if speaks[src] else 0, number, src, rank).ljust(
                    INLINE_BYTES, b"\0"
                )
                for src in ranks
            ]

    run_ranks(fn, size)


_LENGTHS = (0, 1, 200, INLINE_BYTES)


def test_all_equal_tells_whether_all_said_the_same() -> None:
    def fn(rank: int, world_size: int) -> list[bool]:
        mailbox = _open(rank, world_size)
        equal = []
        for number, common in enumerate((b"a", b"a\0" if rank else b"a", b"b" * rank, b""), 1):
            mailbox.post(number, common, None)
            assert mailbox.wait(number, _LIMIT_S).complete
            equal.append(mailbox.all_equal(number, common))
        return equal

    assert run_ranks(fn, 3) == [[True, True, False, True]] * 3


def test_rank_that_has_not_posted_is_missing_and_reads_as_nothing() -> None:
    def fn(rank: int, world_size: int) -> object:
        mailbox = _open(rank, world_size)
        if rank == 2:
            dist.barrier()
            return None
        mailbox.post(1, b"x", [b"y"] * 3)
        started = time.monotonic()
        arrival = mailbox.wait(1, 0.1)
        limited = 0.1 <= time.monotonic() - started < _LIMIT_S
        seen = [bool(text) for text in (*mailbox.commons(1), *mailbox.parts(1))]
        equal = mailbox.all_equal(1, b"x")
        dist.barrier()
        return arrival, limited, seen, equal

    missing = Arrival(missing=(2,), dead=(), withdrawn=())
    want = (missing, True, [True, True, False] * 2, False)
    assert run_ranks(fn, 3) == [want, want, None]


def test_late_rank_finds_who_withdrew_and_all_meet_again_in_the_next_call() -> None:
    def fn(rank: int, world_size: int) -> list[Arrival]:
        mailbox = _open(rank, world_size)
        seen = []
        if rank == 2:
            time.sleep(0.3)
        mailbox.post(1, b"first", None)
        seen.append(mailbox.wait(1, _LIMIT_S if rank else 0.1))
        if rank == 0:
            seen.append(mailbox.withdraw(1))
        mailbox.post(2, b"second", None)
        seen.append(mailbox.wait(2, _LIMIT_S))
        assert mailbox.all_equal(2, b"second")
        return seen

    gave_up = Arrival(missing=(2,), dead=(), withdrawn=(0,))
    first, second, third = run_ranks(fn, 3)
    assert first == [Arrival(missing=(2,), dead=(), withdrawn=()), gave_up, _COMPLETE]
    assert second == [gave_up, _COMPLETE]
    assert third == [Arrival(missing=(), dead=(), withdrawn=(0,)), _COMPLETE]


def test_rank_many_calls_behind_finds_each_of_them_given_up() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[Arrival, bytes]]:
        mailbox = _open(rank, world_size)
        seen = []
        if rank == 1:
            dist.barrier()
        for number in range(1, 8):
            mailbox.post(number, b"%d" % number, None)
            arrival = mailbox.wait(number, 0.01 if rank == 0 else _LIMIT_S)
            if rank == 0:
                arrival = mailbox.withdraw(number)
            seen.append((arrival, mailbox.commons(number)[0][:1]))
        if rank == 0:
            dist.barrier()
        dist.barrier()
        mailbox.post(8, b"", None)
        seen.append((mailbox.wait(8, _LIMIT_S), b""))
        return seen

    ahead, behind = run_ranks(fn, 2)
    gone = Arrival(missing=(1,), dead=(), withdrawn=(0,))
    assert ahead == [*((gone, b"%d" % n) for n in range(1, 8)), (_COMPLETE, b"")]
    late = Arrival(missing=(), dead=(), withdrawn=(0,))
    # Rank 0 stands at 7; its posts 6 and 7 are still there, the others are written over.
    texts = [b"", b"", b"", b"", b"", b"6", b"7"]
    assert behind == [*((late, text) for text in texts), (_COMPLETE, b"")]


def test_withdrawal_after_the_last_post_is_a_complete_call() -> None:
    """The peer has found the call complete by then, and goes on with it."""

    def fn(rank: int, world_size: int) -> list[Arrival]:
        mailbox = _open(rank, world_size)
        seen = []
        if rank == 0:
            mailbox.post(1, b"", None)
            seen.append(mailbox.wait(1, 0.01))
        dist.barrier()
        if rank == 1:
            mailbox.post(1, b"", None)
            seen.append(mailbox.wait(1, _LIMIT_S))
        dist.barrier()
        seen.append(mailbox.withdraw(1))
        return seen

    first = Arrival(missing=(1,), dead=(), withdrawn=())
    assert run_ranks(fn, 2) == [[first, _COMPLETE], [_COMPLETE, _COMPLETE]]


def test_rank_that_arrives_while_another_decides_waits_for_the_decision() -> None:
    def fn(rank: int, world_size: int) -> Arrival:
        mailbox = _open(rank, world_size)
        if rank == 1:
            dist.barrier()
            mailbox.post(1, b"", None)
            return mailbox.wait(1, _LIMIT_S)
        mailbox.post(1, b"", None)
        look = Slot.posted

        def look_and_pause(slot: Slot, number: int) -> bool:
            Slot.posted = look  # the first look only, which is that of `withdraw`
            seen = look(slot, number)
            dist.barrier()
            time.sleep(0.3)  # rank 1 posts, and finds all posts there
            return seen

        Slot.posted = look_and_pause
        return mailbox.withdraw(1)

    given_up = Arrival(missing=(), dead=(), withdrawn=(0,))
    assert run_ranks(fn, 2) == [given_up, given_up]


@pytest.mark.parametrize("size", [2, 4])
def test_last_post_wakes_all_who_sleep(size: int) -> None:
    """With 20 s between looks, one lost wake would be seen."""

    def fn(rank: int, world_size: int) -> None:
        shm_region._SLICE_S = _LIMIT_S
        mailbox = _open(rank, world_size)
        mailbox._look_s = _LIMIT_S
        mailbox._region._longest_spin_s = mailbox._region._spin_s = 0.0
        for number in range(1, 1500):
            mailbox.post(number, b"", None)
            assert mailbox.wait(number, _LIMIT_S).complete

    started = time.monotonic()
    run_ranks(fn, size, timeout_s=50)
    assert time.monotonic() - started < _LIMIT_S


@pytest.mark.parametrize("size", [2, 3, 4])
def test_verdict_on_a_call_is_the_same_on_every_rank(size: int) -> None:
    """Ranks give up at random moments, just when the last ones arrive."""
    seed = random.randrange(2**32)
    print("seed", seed)
    calls = 400

    def fn(rank: int, world_size: int) -> list[bool]:
        mailbox = _open(rank, world_size)
        moments = random.Random(seed + rank)
        verdicts = []
        for number in range(1, calls + 1):
            time.sleep(moments.choice((0.0, 1e-4, 4e-4)))
            mailbox.post(number, b"", None)
            arrival = mailbox.wait(number, moments.choice((0.0, 1e-4, 5e-4, _LIMIT_S)))
            if not arrival.complete:
                arrival = mailbox.withdraw(number)
            verdicts.append(arrival.complete)
        return verdicts

    verdicts = run_ranks(fn, size)
    assert verdicts == [verdicts[0]] * size
    complete = sum(verdicts[0])  # type: ignore[arg-type]
    print("complete", complete)
    assert 0 < complete < calls


def test_what_is_written_over_while_it_is_read_is_never_mixed() -> None:
    def fn(rank: int, world_size: int) -> tuple[int, int]:
        mailbox = _open(rank, world_size)
        end = time.monotonic() + 0.5
        number, seen = 0, 0
        while time.monotonic() < end:
            number += 1
            text = bytes([number % 251 + 1]) * SIGNATURE_BYTES
            mailbox.post(number, text, [text * 3] * 2)
            mailbox.withdraw(number)
            peer = 1 - rank
            last, common = mailbox.last_posted()[peer]
            assert common in (b"", bytes([last % 251 + 1]) * SIGNATURE_BYTES)
            for ahead in (last - 1, last, last + 1):
                if ahead > 0:
                    want = bytes([ahead % 251 + 1]) * SIGNATURE_BYTES
                    assert mailbox.commons(ahead)[peer] in (b"", want)
                    assert mailbox.parts(ahead)[peer] in (b"", want * 3)
            seen += last > 0
        return number, seen

    for number, seen in run_ranks(fn, 2):  # type: ignore[misc]
        assert number > 100
        assert seen > 100


def test_last_post_of_each_rank_is_known() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[int, bytes]]:
        mailbox = _open(rank, world_size)
        for number in range(1, rank + 1):
            mailbox.post(number, b"%d of %d" % (number, rank), None)
        dist.barrier()
        return [(number, text.rstrip(b"\0")) for number, text in mailbox.last_posted()]

    assert run_ranks(fn, 3) == [[(0, b""), (1, b"1 of 1"), (2, b"2 of 2")]] * 3


def test_rank_that_died_before_its_post_is_dead_and_one_that_died_after_has_arrived() -> None:
    def fn(rank: int, world_size: int) -> list[Arrival]:
        mailbox = _open(rank, world_size)
        for number in (1, 2):
            mailbox.post(number, b"", None)
            if rank == 1 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1:
                assert mailbox.wait(number, _LIMIT_S).complete
        time.sleep(0.2)  # until it is gone
        after = mailbox.wait(2, _LIMIT_S)
        mailbox.post(3, b"", None)
        return [after, mailbox.wait(3, _LIMIT_S), mailbox.withdraw(3)]

    outcomes = collect_ranks(fn, 3, timeout_s=30)
    assert outcomes[1].error_type == "Died"
    for rank in (0, 2):
        after, before, verdict = outcomes[rank].value  # type: ignore[misc]
        assert after == _COMPLETE
        assert (before.missing, before.dead) == ((1,), (1,))
        assert rank in verdict.withdrawn


@pytest.mark.parametrize("attempt", range(3))
def test_survivors_of_a_kill_at_any_moment_stop_at_the_same_call(attempt: int) -> None:
    def fn(rank: int, world_size: int) -> tuple[int, Arrival, bool]:
        mailbox = _open(rank, world_size)
        if rank == 1:
            delay_s = random.Random(time.time_ns()).uniform(0.02, 0.2)
            killer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            killer.start()
        number = 0
        while True:
            number += 1
            mailbox.post(number, b"same", [b"%d" % rank] * 3)
            arrival = mailbox.wait(number, _LIMIT_S)
            if not arrival.complete:
                break
            assert mailbox.all_equal(number, b"same")
        started = time.monotonic()
        mailbox.wait(number, _LIMIT_S)
        return number, arrival, time.monotonic() - started < 5

    outcomes = collect_ranks(fn, 3, timeout_s=40)
    first, second = outcomes[0].value, outcomes[2].value
    assert first == second
    assert first[1:] == (Arrival(missing=(1,), dead=(1,), withdrawn=()), True)  # type: ignore[index]
    assert first[0] > 1  # type: ignore[index]


def test_rank_killed_while_it_decides_to_withdraw_does_not_hold_up_the_others() -> None:
    def fn(rank: int, world_size: int) -> tuple[Arrival, bool]:
        mailbox = _open(rank, world_size)
        mailbox.post(1, b"", None)
        if rank == 0:
            mailbox._withdrawn[rank] = 2  # as `withdraw` leaves it until it has looked
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        started = time.monotonic()
        return mailbox.wait(1, _LIMIT_S), time.monotonic() - started < _LIMIT_S / 2

    outcomes = collect_ranks(fn, 2, timeout_s=30)
    assert outcomes[1].value == (Arrival(missing=(), dead=(0,), withdrawn=(0,)), True)


def test_stopped_rank_is_missing_and_not_dead() -> None:
    def fn(rank: int, world_size: int) -> Arrival | None:
        mailbox = _open(rank, world_size)
        mailbox.post(1, b"%d" % os.getpid(), None)
        assert mailbox.wait(1, _LIMIT_S).complete
        if rank == 1:
            time.sleep(0.1)
            mailbox.post(2, b"", None)
            assert not mailbox.wait(2, _LIMIT_S).complete
            return None
        pid = int(mailbox.commons(1)[1].rstrip(b"\0"))
        os.kill(pid, signal.SIGSTOP)
        try:
            mailbox.post(2, b"", None)
            mailbox.wait(2, 0.3)
            return mailbox.withdraw(2)
        finally:
            os.kill(pid, signal.SIGCONT)

    stopped = Arrival(missing=(1,), dead=(), withdrawn=(0,))
    assert run_ranks(fn, 2) == [stopped, None]


def test_no_mailbox_on_any_rank_if_one_cannot_share() -> None:
    def fn(rank: int, world_size: int) -> bool:
        if rank == 1:
            shm_region._machine_fits = lambda: False
        return SharedMailbox.open(rank, world_size, _all_gather) is None

    assert run_ranks(fn, 3) == [True] * 3


def test_closed_mailbox_is_dead_only_for_calls_that_it_missed() -> None:
    def fn(rank: int, world_size: int) -> object:
        mailbox = _open(rank, world_size)
        mailbox.post(1, b"", None)
        if rank == 1:
            mailbox.close()
            mailbox.close()
            dist.barrier()
            return None
        dist.barrier()
        first = mailbox.wait(1, _LIMIT_S)
        mailbox.post(2, b"", None)
        return first, mailbox.wait(2, _LIMIT_S), mailbox.dead()

    gone = Arrival(missing=(1,), dead=(1,), withdrawn=())
    assert run_ranks(fn, 2) == [(_COMPLETE, gone, (1,)), None]


def test_posts_that_do_not_fit_are_refused_and_leave_the_mailbox_as_it_was() -> None:
    def fn(rank: int, world_size: int) -> bool:
        mailbox = _open(rank, world_size)
        for number, common, parts, match in (
            (2, b"", None, "numbers go 1, 2"),
            (1, bytes(SIGNATURE_BYTES + 1), None, "at most 128"),
            (1, b"", [b""], "give 2 parts"),
            (1, b"", [b"", bytes(INLINE_BYTES + 1)], "at most 384"),
        ):
            with pytest.raises(ValueError, match=match):
                mailbox.post(number, common, parts)
        assert mailbox.last_posted()[rank] == (0, b"")
        mailbox.post(1, b"fits", [bytes(INLINE_BYTES)] * 2)
        return mailbox.wait(1, _LIMIT_S).complete and mailbox.all_equal(1, b"fits")

    assert run_ranks(fn, 2) == [True, True]
