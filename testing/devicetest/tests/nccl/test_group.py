"""Groups of NCCL's rules in real processes: right values, planted order faults named."""

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from devicetest import fake_cuda
from devicetest.nccl import NcclRuleError, NcclRules, register_nccl_rules
from ranktest import collect_ranks, run_ranks

Plan = Callable[[int, int, dist.ProcessGroup, dist.ProcessGroup], None]


def _big(value: float) -> torch.Tensor:
    return torch.full((4096,), float(value))


def test_collectives_give_what_gloo_gives() -> None:
    def calls(rank: int, world_size: int, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        x = torch.randn(6, dtype=torch.float64)
        reduced, rooted, sent = x.clone(), x.clone(), x.clone()
        gathered = [torch.empty_like(x) for _ in range(world_size)]
        stacked, swapped, piece = torch.empty(18).double(), torch.empty(6).double(), x[:2].clone()
        dist.all_reduce(reduced, group=group)
        dist.reduce(rooted, 1, dist.ReduceOp.MAX, group=group)
        dist.broadcast(sent, 2, group=group)
        dist.all_gather(gathered, x, group=group)
        dist.all_gather_into_tensor(stacked, x, group=group)
        dist.all_to_all_single(swapped, x, group=group)
        dist.scatter(piece, list(x.clone().chunk(3)) if rank == 0 else None, 0, group=group)
        dist.barrier(group)
        objects: list[object] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": each} for each in range(world_size)]
        return [reduced, rooted if rank == 1 else x, sent, *gathered, stacked, swapped, piece]

    def fn(rank: int, world_size: int) -> None:
        register_nccl_rules()
        rules = dist.new_group(backend="nccl_rules")
        for ours, gloos in zip(
            calls(rank, world_size, rules), calls(rank, world_size, None), strict=True
        ):
            assert torch.allclose(ours, gloos, rtol=1e-12), (ours, gloos)

    run_ranks(fn, 3)


def test_rules_that_were_given_stay_those_of_their_name_on_fake_devices() -> None:
    def fn(rank: int, world_size: int) -> None:
        register_nccl_rules(NcclRules(buffering="full"))
        with fake_cuda():
            group = dist.new_group(backend="nccl_rules")
        assert group.rules.buffering == "full"

    run_ranks(fn, 1)


def test_a_swap_by_sends_and_receives_hangs_unless_it_is_buffered_and_a_batch_does_not() -> None:
    def fn(rank: int, world_size: int) -> str:
        peer = 1 - rank
        for buffering, swapped in (("full", 4096), ("small", 1024), ("none", 0)):
            register_nccl_rules(NcclRules(buffering=buffering))
            group = dist.new_group(backend="nccl_rules")
            x, y = _big(rank), _big(-1)
            ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, y, peer, group)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert y[0] == peer
            y.zero_()
            if swapped:
                sending = dist.isend(x[:swapped], peer, group=group)
                dist.recv(y[:swapped], peer, group=group)
                sending.wait()
                assert y[0] == peer
        sending = dist.isend(x, peer, group=group)
        with pytest.raises(NcclRuleError) as error:
            dist.recv(y, peer, group=group)
        assert sending.is_completed() and not sending.is_success()
        return str(error.value)

    for told in run_ranks(fn, 2):
        assert "rank 0 is in send of 16384 bytes to rank 1 at test_group.py" in told
        assert "rank 1 has its recv behind send of 16384 bytes to rank 0 at test_group.py" in told


def ring(rank: int, size: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Every rank sends to the next before it receives, and waits for neither at once."""
    sending = dist.isend(_big(rank), (rank + 1) % size, group=one)
    dist.recv(_big(-1), (rank - 1) % size, group=one)
    sending.wait()


def waited(rank: int, size: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """The same, but the host waits for the send."""
    dist.send(_big(rank), (rank + 1) % size, group=one)
    dist.recv(_big(-1), (rank - 1) % size, group=one)


def crossed(rank: int, size: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Two communicators in two orders."""
    for group in (one, two) if rank else (two, one):
        dist.all_reduce(_big(rank), group=group)


def differing(rank: int, size: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Two collectives instead of one."""
    if rank:
        dist.all_reduce(_big(rank), group=one)
    else:
        dist.broadcast(_big(rank), 0, group=one)


def batched(rank: int, size: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """A batch on one side, a single receive, which has another order, on the other."""
    if rank == 0:
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, _big(0), 1, one)])
        work.wait()
    elif rank == 1:
        dist.recv(_big(0), 0, group=one)


@pytest.mark.parametrize(
    ("plan", "order", "buffering", "words"),
    [
        (ring, "pair", "none", ()),
        (ring, "communicator", "none", ("rank 1 has its recv behind",)),
        (ring, "communicator", "full", ()),
        (waited, "pair", "none", ("rank 1 has no such recv",)),
        (waited, "pair", "full", ()),
        (crossed, "pair", "full", ("has not called it",)),
        (differing, "pair", "full", ("all_reduce", "broadcast")),
        (batched, "pair", "none", ("rank 0 has no such send",)),
    ],
)
def test_planted_order_faults_are_named_within_seconds_and_large_buffers_hide_some(
    plan: Plan, order: str, buffering: str, words: tuple[str, ...]
) -> None:
    def fn(rank: int, world_size: int) -> tuple[str, float]:
        register_nccl_rules(NcclRules(buffering=buffering, order=order))
        groups = [dist.new_group(backend="nccl_rules") for _ in range(2)]
        dist.barrier()
        began = time.monotonic()
        try:
            plan(rank, world_size, *groups)
            dist.barrier(groups[0])
        except NcclRuleError as error:
            return str(error), time.monotonic() - began
        return "", time.monotonic() - began

    for told, seconds in run_ranks(fn, 3):
        assert bool(told) == bool(words)
        assert all(word in told for word in words), told
        assert seconds < 20


def test_what_nccl_refuses_is_refused_and_waits_with_a_limit_are_noted() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        register_nccl_rules(NcclRules(buffering="full"))
        group, refused = dist.new_group(backend="nccl_rules"), []
        for call in (
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group),
            lambda: dist.all_reduce(torch.ones(2).int(), dist.ReduceOp.BXOR, group=group),
            lambda: dist.send(torch.ones(4, 4).t(), 1 - rank, group=group),
            lambda: dist.recv(torch.ones(4), group=group),
            lambda: group.monitored_barrier(),
        ):
            with pytest.raises(NcclRuleError) as error:
                call()
            refused.append(str(error.value))
        if rank == 1:
            dist.barrier()
            dist.send(torch.ones(3), 0, group=group)
            return refused
        waiting = dist.irecv(x := torch.zeros(3), 1, group=group)
        with pytest.raises(NcclRuleError, match="timed out"):
            waiting.wait(timedelta(seconds=0.05))
        dist.barrier()
        waiting.wait()
        assert x.tolist() == [1, 1, 1]
        assert len(group.timed_waits) == 1 and "test_group.py" in group.timed_waits[0]
        return refused

    for refused in run_ranks(fn, 2):
        for told, word in zip(
            refused, ("int16", "BXOR", "contiguous", "any rank", "monitored"), strict=True
        ):
            assert word in told


def test_a_rank_that_is_gone_is_named_on_those_that_wait_for_it() -> None:
    def fn(rank: int, world_size: int) -> str:
        register_nccl_rules()
        group = dist.new_group(backend="nccl_rules")
        dist.barrier()
        if rank == 1:
            raise SystemExit("this rank ends")
        with pytest.raises(NcclRuleError) as error:
            dist.recv(torch.zeros(3), 1, group=group)
        return str(error.value)

    first, gone, _ = collect_ranks(fn, 3)
    assert not gone.ok
    assert "rank 1 is gone" in str(first.value) or "has ended" in str(first.value)


def test_a_watchdog_says_nothing_and_kills_at_the_limit() -> None:
    def fn(rank: int, world_size: int) -> None:
        register_nccl_rules(NcclRules(watchdog=True))
        group = dist.new_group(backend="nccl_rules", timeout=timedelta(seconds=2))
        if rank == 0:  # the other rank does something else
            dist.all_reduce(torch.zeros(3), group=group)
        elif rank == 1:
            dist.broadcast(torch.zeros(3), 0, group=group)

    *killed, alive = collect_ranks(fn, 3)
    assert [each.exitcode for each in killed] == [-signal.SIGABRT] * 2 and alive.ok


def test_an_aborted_communicator_lets_go_of_who_waits_and_takes_no_more_calls() -> None:
    def fn(rank: int, world_size: int) -> None:
        register_nccl_rules(NcclRules(watchdog=True))
        group = dist.new_group(backend="nccl_rules", timeout=timedelta(seconds=60))
        if rank == 0:
            threading.Timer(0.3, group._get_backend(torch.device("cuda")).abort).start()
            dist.all_reduce(torch.zeros(3), group=group)
            with pytest.raises(NcclRuleError, match="aborted"):
                dist.all_reduce(torch.zeros(3), group=group)

    run_ranks(fn, 2)
