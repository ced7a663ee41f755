"""Simulated ranks: the results of real ones, in virtual time, the same at every run."""

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.agreement.agreement import AgreementPolicy
from comm_collectives.errors import CollectiveTimeoutError, LostGradientWarning, PeerFailedError
from comm_collectives.simulation import run as simulation
from comm_collectives.simulation.faults.schedule import (
    Delay,
    Fault,
    FaultSchedule,
    Kill,
    Reorder,
    Skip,
    Truncate,
    ZeroTokens,
)
from comm_collectives.simulation.run import SimRank, SimulationResult, simulate
from comm_collectives.simulation.scheduler import SimulationStuckError
from ranktest import run_ranks

_PLACES = pytest.mark.parametrize("shared_memory", [True, False])


def _tour(rank: int, size: int, group: object) -> list[torch.Tensor]:
    """Every collective once, with gradients; values differ between ranks."""
    x = (torch.arange(float(2 * size)).view(-1, 1) + 100 * rank).requires_grad_()
    y = cc.all_to_all(x, input_splits=[2] * size, group=group)
    (y * (rank + 1)).sum().backward()
    total = cc.all_reduce(torch.full((300,), float(rank)), group=group)
    rows = cc.all_gather(torch.full((rank, 2), rank), group=group)
    mine = cc.reduce_scatter(torch.arange(float(size)) * (rank + 1), group=group)
    parts = cc.gather(torch.full((3,), rank), dst=1, group=group)
    back = cc.scatter(parts, src=1, group=group)
    told = cc.broadcast_nested({"x": torch.ones(2)} if rank == 0 else None, src=0, group=group)
    tokens = torch.full((rank + 1, 4), float(rank), requires_grad=True)
    idx = torch.arange(2 * (rank + 1)).view(-1, 2) % size
    weights = torch.full((rank + 1, 2), 0.5, requires_grad=True)
    sent = cc.dispatch(tokens, idx, weights, num_experts=size, group=group)
    out = cc.combine(sent.x * sent.topk_weights[:, None] * (rank + 1), sent.handle)
    out.sum().backward()
    later = cc.all_reduce(torch.ones(2), group=group, async_op=True)
    assert isinstance(told, dict)
    grads = [t.grad for t in (x, tokens, weights)]
    found = [y, total, rows, mine, back, told["x"], out, later.wait(), *grads]
    return [t.detach() for t in found if t is not None]


def _endings(result: SimulationResult) -> list[str]:
    return [type(o.error).__name__ if o.error else o.ending for o in result.outcomes]


def _one(x: float = 1.0) -> Callable[[SimRank], torch.Tensor]:
    return lambda rank: cc.all_reduce(torch.full((2,), x), group=rank.group)


def test_a_call_in_the_callback_of_another_can_be_waited_for_there() -> None:
    def program(rank: SimRank) -> list[float]:
        found: list[float] = []

        def again() -> None:
            later = cc.all_reduce(torch.ones(1), group=rank.group, async_op=True)
            found.append(later.wait().item())

        handle = cc.all_reduce(torch.ones(2), group=rank.group, async_op=True)
        handle.when_done(again)
        cc.all_reduce(torch.ones(1), group=rank.group)  # behind that of the callback
        return found

    result = simulate(program, 2)
    assert [outcome.values for outcome in result.outcomes] == [([2.0],), ([2.0],)]


@_PLACES
def test_simulated_ranks_get_what_real_ranks_get(shared_memory: bool) -> None:
    def real(rank: int, world_size: int) -> list[torch.Tensor]:
        return _tour(rank, world_size, dist.group.WORLD)

    got = simulate(lambda r: _tour(r.rank, r.size, r.group), 4, shared_memory=shared_memory)
    for outcome, wanted in zip(got.outcomes, run_ranks(real, 4), strict=True):
        assert outcome.error is None
        for mine, theirs in zip(outcome.values[0], wanted, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


@_PLACES
def test_same_arguments_give_the_same_run(shared_memory: bool) -> None:
    faults = FaultSchedule(
        (Kill(rank=5, call=2, operation=1, reached=3), Delay(rank=2, call=1, delay_s=0.3))
    )

    def run(seed: int) -> tuple[list[int], float, list[str]]:
        order: list[int] = []

        def begin(rank: SimRank) -> None:
            order.append(rank.rank)

        program = [begin, lambda r: _tour(r.rank, r.size, r.group), _one()]
        result = simulate(program, 8, faults=faults, seed=seed, shared_memory=shared_memory)
        return order, result.elapsed_s, [f"{o.ending} {o.error}" for o in result.outcomes]

    assert run(3) == run(3)
    assert run(3)[0] != run(4)[0]


@_PLACES
def test_killed_rank_costs_no_real_time_and_is_named_on_all_others(shared_memory: bool) -> None:
    started = time.monotonic()
    result = simulate(
        [_one(), _one()],
        64,
        faults=FaultSchedule((Kill(rank=7, call=1),)),
        limit_s=3600.0,
        shared_memory=shared_memory,
    )
    assert time.monotonic() - started < 30
    assert result.outcomes[7].ending == "killed"
    for rank, outcome in enumerate(result.outcomes):
        if rank != 7:
            assert isinstance(outcome.error, PeerFailedError)
            assert f"rank {rank}: all_reduce call 2" in str(outcome.error)
            assert "rank 7" in str(outcome.error)
            assert torch.equal(outcome.values[0], torch.full((2,), 64.0))
            assert outcome.values[1] is None


@_PLACES
def test_rank_that_comes_too_late_ends_the_call_alike_on_every_rank(shared_memory: bool) -> None:
    def call(rank: SimRank) -> torch.Tensor:
        if rank.rank == 2:
            rank.sleep(1000.0)
        return cc.all_reduce(torch.ones(2), group=rank.group)

    result = simulate(call, 4, limit_s=5.0, shared_memory=shared_memory)
    assert _endings(result) == ["CollectiveTimeoutError"] * 4
    assert "did not arrive: rank 2" in str(result.outcomes[0].error)
    assert 1000.0 <= result.elapsed_s < 1010.0


def test_late_rank_is_no_failure() -> None:
    result = simulate(_one(), 8, faults=FaultSchedule((Delay(rank=1, call=0, delay_s=1.9),)))
    assert _endings(result) == ["returned"] * 8
    assert result.elapsed_s == pytest.approx(1.9)


@_PLACES
@pytest.mark.parametrize("fault", [Skip(rank=3, call=0), Reorder(rank=3, call=0)])
def test_calls_out_of_step_are_a_mismatch_everywhere(fault: Skip, shared_memory: bool) -> None:
    program = [
        lambda r: cc.all_reduce(torch.ones(400), group=r.group),
        lambda r: cc.all_gather(torch.ones(3), group=r.group),
        lambda r: cc.all_reduce(torch.ones(500), group=r.group),
    ]
    result = simulate(program, 8, faults=FaultSchedule((fault,)), shared_memory=shared_memory)
    assert _endings(result) == ["MismatchError"] * 8


def test_rank_without_tokens_is_told_so_in_that_call_only() -> None:
    result = simulate(
        [lambda r: r.has_tokens] * 2, 3, faults=FaultSchedule((ZeroTokens(rank=1, call=0),))
    )
    assert [o.values for o in result.outcomes] == [(True, True), (False, True), (True, True)]


@_PLACES
def test_group_goes_on_after_refused_and_differing_arguments(shared_memory: bool) -> None:
    def call(rank: SimRank) -> tuple[list[str], torch.Tensor]:
        seen = []
        for splits, dtype in (([1, 1, 1], torch.float32), (None, torch.int32)):
            odd = rank.rank == 1
            x = torch.ones(6, dtype=dtype if odd else torch.float32)
            try:
                cc.all_to_all(x, input_splits=splits if odd else None, group=rank.group)
            except cc.CommError as error:
                seen.append(type(error).__name__)
        return seen, cc.all_to_all(torch.full((3,), rank.rank), group=rank.group)

    for outcome in simulate(call, 3, shared_memory=shared_memory).outcomes:
        seen, rows = outcome.values[0]
        assert seen == ["RefusedError", "MismatchError"]
        assert rows.tolist() == [0, 1, 2]


def test_error_of_the_program_ends_that_rank_and_the_others_lose_a_peer() -> None:
    def call(rank: SimRank) -> None:
        if rank.rank == 1:
            raise KeyError("mine")
        cc.all_reduce(torch.ones(2), group=rank.group)

    result = simulate(call, 3)
    assert [o.ending for o in result.outcomes] == ["raised"] * 3
    assert _endings(result) == ["PeerFailedError", "KeyError", "PeerFailedError"]


def test_subgroups_have_their_own_numbers_and_members() -> None:
    def call(rank: SimRank) -> tuple[float, bool]:
        ranks = (1, 3) if rank.rank % 2 else (0, 2)
        with pytest.raises(ValueError, match="must hold rank"):
            rank.subgroup([(rank.rank + 1) % 4])
        with pytest.raises(ValueError, match=r"give ranks in 0\.\.3"):
            rank.subgroup([rank.rank, 4])
        group = rank.subgroup(ranks)
        total = cc.all_reduce(torch.tensor([float(rank.rank)]), group=group)
        return float(total), group is rank.subgroup(ranks)

    result = simulate(call, 4)
    assert [o.values[0] for o in result.outcomes] == [(2.0, True), (4.0, True)] * 2


def test_rank_killed_in_an_asynchronous_call_ends_as_a_whole() -> None:
    def call(rank: SimRank) -> torch.Tensor:
        return cc.all_reduce(torch.ones(400), group=rank.group, async_op=True).wait()

    result = simulate(
        call, 4, faults=FaultSchedule((Kill(rank=1, call=0, operation=1, reached=1),))
    )
    # Its frame for rank 2 was sent, and this rank hears behind the others' frames what they lack.
    assert [o.ending for o in result.outcomes] == ["raised", "killed", "raised", "raised"]
    assert set(_endings(result)) - {"killed"} == {"PeerFailedError"}


def test_handle_can_be_asked_within_a_limit_of_virtual_time() -> None:
    def call(rank: SimRank) -> tuple[bool, torch.Tensor]:
        if rank.rank == 1:
            rank.sleep(1.0)
        handle = cc.all_reduce(torch.ones(2), group=rank.group, async_op=True)
        if rank.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"still under way after 0\.5 s"):
                handle.wait(0.5)
        return handle.is_done(), handle.wait()

    for outcome in simulate(call, 2).outcomes:
        assert outcome.values[0][1].tolist() == [2.0, 2.0]


def test_lists_of_tensors_travel_between_two_simulated_ranks() -> None:
    def call(rank: SimRank) -> list[torch.Tensor]:
        right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
        handle = cc.isend_tensors([torch.full((3,), rank.rank)], dst=right, group=rank.group)
        got = cc.recv_tensors(src=left, group=rank.group)
        handle.wait()
        return got

    for rank, outcome in enumerate(simulate(call, 5).outcomes):
        assert outcome.error is None
        assert outcome.values[0][0].tolist() == [(rank - 1) % 5] * 3


def test_program_that_blocks_elsewhere_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_REAL_LIMIT_S", 0.5)
    never = threading.Event()

    def waits_elsewhere(rank: SimRank) -> None:
        never.wait()

    with pytest.raises(SimulationStuckError, match="wait only in calls of this package") as caught:
        simulate(
            waits_elsewhere, 2, seed=7, faults=FaultSchedule((Delay(rank=0, call=0, delay_s=1),))
        )
    never.set()
    for part in (
        "simulated rank ",
        "seed=7",
        "Delay(rank=0",
        "in waits_elsewhere\n",
        "never.wait()",
    ):
        assert part in str(caught.value)


def test_thread_of_the_program_cannot_call() -> None:
    def call(rank: SimRank) -> list[str]:
        seen: list[str] = []

        def beside() -> None:
            try:
                cc.all_reduce(torch.ones(1), group=rank.group)
            except RuntimeError as error:
                seen.append(str(error))

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return seen

    # Whoever comes first has to wait, which only a task can.
    told = [text for outcome in simulate(call, 2).outcomes for text in outcome.values[0]]
    assert "a thread that the program has started" in told[0]


def test_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="num_ranks=0"):
        simulate(_one(), 0)
    with pytest.raises(ValueError, match="limit_s=0"):
        simulate(_one(), 2, limit_s=0)
    wrong: dict[str, Any]
    for wrong in ({"faults": [Skip(rank=0, call=0)]}, {"agreement": 3}, {"limit_s": None}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} is a"):
            simulate(_one(), 2, **wrong)


@pytest.mark.parametrize(
    "fault",
    [
        Kill(rank=2, call=0),
        Kill(rank=-1, call=0),
        Skip(rank=0, call=1),
        Truncate(rank=0, call=0, peer=2),
    ],
)
def test_faults_that_would_strike_nobody_are_refused(fault: Fault) -> None:
    with pytest.raises(ValueError, match="strikes nobody: there are 2 ranks and 1 calls"):
        simulate(lambda rank: None, 2, faults=FaultSchedule((fault,)))


@pytest.mark.parametrize("every", [1, 3, 64])
@pytest.mark.parametrize("late", [(), (Delay(rank=0, call=0, operation=4, delay_s=2.2),)])
@_PLACES
def test_ranks_that_leave_a_result_unused_disturb_nobody(
    shared_memory: bool, late: tuple[Delay, ...], every: int
) -> None:
    """Found by fuzzing: the rank that takes part for zeros meets at its next call, so all do."""

    def share(rank: SimRank) -> torch.Tensor | None:
        x = torch.ones(2 * rank.size, 3, requires_grad=True)
        splits = [2] * rank.size
        y = cc.all_to_all(x, input_splits=splits, output_splits=splits, group=rank.group)
        if rank.rank % 3 == 1:
            return None
        y.sum().backward()
        return x.grad

    def sums(rank: SimRank) -> torch.Tensor:
        return cc.all_reduce(torch.full((500,), float(rank.rank)), group=rank.group)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostGradientWarning)
        result = simulate(
            [share, sums, share, share, sums],
            5,
            faults=FaultSchedule(late),
            shared_memory=shared_memory,
            limit_s=5.0,
            agreement=AgreementPolicy(every=every),
        )
    for outcome in result.outcomes:
        assert outcome.error is None
        assert all(torch.equal(outcome.values[i], torch.full((500,), 10.0)) for i in (1, 4))
    got = result.outcomes[0].values[0]
    assert got[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@_PLACES
def test_swapped_broadcasts_of_one_source_are_found_where_they_are_named(
    shared_memory: bool,
) -> None:
    """Found by fuzzing: a call that may stand in two lines is compared by the name it has."""

    def tell(name: str, value: float) -> Callable[[SimRank], torch.Tensor]:
        def call(rank: SimRank) -> torch.Tensor:
            with cc.call_site(name):
                x = torch.full((3,), value) if rank.rank == 0 else None
                return cc.broadcast(x, src=0, group=rank.group)

        return call

    result = simulate(
        [tell("weights", 1.0), tell("biases", 2.0)],
        3,
        faults=FaultSchedule((Reorder(rank=2, call=0),)),
        shared_memory=shared_memory,
    )
    assert _endings(result) == ["MismatchError"] * 3
    assert "call site differs" in str(result.outcomes[0].error)
