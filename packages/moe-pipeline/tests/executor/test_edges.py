import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from comm_collectives import PeerFailedError
from moe_pipeline.errors import StageTransferError
from moe_pipeline.executor import edges
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.schedules.generators.basic import forward_then_backward, one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from ranktest import collect_ranks, run_ranks

WIDTH = 8


def stages_of(schedule, rank, before_call):
    """Stages that multiply by a weight and call `before_call(calls so far on this rank)` first."""
    weight = torch.ones(WIDTH, requires_grad=True)
    calls = []

    def make(index):
        def stage(x, *, target):
            before_call(len(calls))
            calls.append(1)
            y = x * weight
            if index == schedule.num_stages - 1:
                return StageOutput(loss=y.sum())
            return StageOutput(tensors=(y,))

        return stage

    mine = {stage for (stage, _), place in schedule.places().items() if place == rank}
    return {index: make(index) for index in mine}


def outcomes_of(schedule, num_ranks, culprit, act, **options):
    """What becomes of each rank when `culprit` does `act()` before its third forward."""

    def fn(rank, world_size):
        def before_call(calls):
            if rank == culprit and calls == 2:
                act()

        executor = PipelineExecutor(
            stages_of(schedule, rank, before_call),
            schedule,
            rank=rank,
            backward_group=dist.new_group(list(range(world_size))),
            **options,
        )
        started = time.monotonic()
        try:
            executor.step([(torch.ones(WIDTH),)] * schedule.num_microbatches)
        except StageTransferError as error:
            # Fails again at once, and by the same words.
            with pytest.raises(StageTransferError, match="an earlier step of schedule") as again:
                executor.step([(torch.ones(WIDTH),)] * schedule.num_microbatches)
            cause = str(error).split("failed: ", 1)[1]
            assert cause in str(again.value)
            print(f"after {time.monotonic() - started:.1f} s: {error}")
            raise

    return collect_ranks(fn, num_ranks, timeout_s=100)


def causes_of(outcomes, schedule, culprit):
    """The reasons that all but one rank give, each after its own name."""
    causes = set()
    for outcome in outcomes:
        if outcome.rank == culprit:
            continue
        assert outcome.error_type == StageTransferError.__name__, outcome.error
        last = outcome.error.strip().splitlines()[-1]
        own = rf"rank {outcome.rank}, stage \d+: (\S+|the last sends) of schedule {schedule.name}"
        match = re.fullmatch(rf".*Error: {own} failed: (.*)", last)
        assert match, last
        causes.add(match[2])
    return causes


@pytest.mark.parametrize(
    ("name", "culprit", "stages"),
    [
        ("forward_then_backward", 2, "stage 2"),
        ("1f1b", 0, "stage 0"),
        ("1f1b", 3, "stage 3"),
        ("interleaved_1f1b", 1, "stages 1, 5"),
        ("dualpipe", 2, "stages 1, 2"),
        ("forward_only", 2, "stage 2"),
    ],
)
def test_a_rank_killed_mid_step_gives_the_same_named_error_on_all_others(name, culprit, stages):
    schedule = SCHEDULES[name](4, 8)
    outcomes = outcomes_of(schedule, 4, culprit, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert outcomes[culprit].error_type == "Died"
    causes = causes_of(outcomes, schedule, culprit)
    assert causes == {f"rank {culprit} ({stages}) died or closed its connections"}
    assert max(outcome.elapsed_s for outcome in outcomes) < 40


@pytest.mark.parametrize(("name", "culprit"), [("1f1b", 1), ("forward_only", 3)])
def test_a_rank_that_raises_mid_step_is_named_by_all_others(name, culprit):
    schedule = SCHEDULES[name](4, 8)

    def act():
        raise KeyError("mine")

    outcomes = outcomes_of(schedule, 4, culprit, act)
    assert outcomes[culprit].error_type == "KeyError"
    where = f"rank {culprit}, stage {culprit}: {culprit}F2 of schedule {name}"
    assert where in outcomes[culprit].error  # its note
    causes = causes_of(outcomes, schedule, culprit)
    assert causes == {f"rank {culprit} (stage {culprit}) failed in {culprit}F2: KeyError: 'mine'"}


def test_wrong_inputs_on_one_rank_hold_up_no_other():
    def fn(rank, world_size):
        schedule = one_f_one_b(3, 4)
        executor = PipelineExecutor(
            stages_of(schedule, rank, lambda calls: None), schedule, rank=rank
        )
        with pytest.raises(StageTransferError if rank else ValueError) as caught:
            executor.step([(torch.ones(WIDTH),)] * 3)
        return str(caught.value)

    texts = run_ranks(fn, 3)
    assert texts[0] == "schedule 1f1b has 4 microbatches, but 3 inputs are given"
    cause = f"failed: rank 0 (stage 0) failed in the inputs: MoEValueError: {texts[0]}"
    assert texts[1].endswith(cause) and texts[2].endswith(cause)


def test_a_peer_that_is_gone_before_the_first_receive_is_named(monkeypatch):
    def fails(*, src, group):
        raise PeerFailedError("gone")

    def fn(rank, world_size):
        schedule = one_f_one_b(2, 2)
        executor = PipelineExecutor(
            stages_of(schedule, rank, lambda calls: None), schedule, rank=rank
        )
        if rank == 0:
            monkeypatch.setattr(edges, "expect_tensors", fails)
        with pytest.raises(StageTransferError) as caught:
            executor.step([(torch.ones(WIDTH),)] * 2)
        return str(caught.value)

    texts = run_ranks(fn, 2)
    cause = "failed: rank 1 (stage 1) died or closed its connections"
    assert texts[0] == f"rank 0, stage 0: the first receives of schedule 1f1b {cause}"
    assert texts[1].endswith(cause)


def test_a_passed_limit_names_rank_stage_action_and_peer_on_all_ranks():
    schedule = forward_then_backward(3, 4)
    outcomes = outcomes_of(
        schedule, 3, 1, lambda: time.sleep(5), options=ExecutorOptions(timeout_s=2)
    )
    # Both neighbours give up on the rank that sleeps, each for a message of its own.
    lasts = [outcome.error.strip().splitlines()[-1] for outcome in outcomes]
    assert all(outcome.error_type == "StageTransferError" for outcome in outcomes)
    assert "rank 2, stage 2: 2RECV_F2" in lasts[2]
    assert (
        "rank 2 (stage 2) gave up in 2RECV_F2: nothing from rank 1 (stage 1) within 2 s" in lasts[2]
    )
    assert "rank 0, stage 0: 0RECV_B0" in lasts[0] or "the last sends" in lasts[0], lasts[0]


def test_ranks_with_different_schedules_are_told():
    def fn(rank, world_size):
        schedule = (one_f_one_b if rank else forward_then_backward)(2, 3)
        executor = PipelineExecutor(
            stages_of(schedule, rank, lambda calls: None), schedule, rank=rank
        )
        if rank == 0:  # sends F0 F1 F2; then expects B0 and gets B0, so this rank sees no fault
            executor.step([(torch.ones(WIDTH),)] * 3)
        else:
            executor.step()

    run_ranks(fn, 2)  # the same messages on each edge: no harm

    def other(rank, world_size):
        schedule = one_f_one_b(2, 3) if rank else SCHEDULES["interleaved_1f1b"](2, 4)
        executor = PipelineExecutor(
            stages_of(schedule, rank, lambda calls: None),
            schedule,
            rank=rank,
            options=ExecutorOptions(timeout_s=20),
        )
        with pytest.raises(StageTransferError) as caught:
            executor.step([(torch.ones(WIDTH),)] * schedule.num_microbatches)
        return str(caught.value)

    texts = run_ranks(other, 2)
    assert "do both run schedule" in texts[0] + texts[1]
    assert texts[0].split("failed: ")[1] == texts[1].split("failed: ")[1]


def test_forward_and_backward_may_share_a_group(seed):
    """V placements send both ways between the same two ranks, in an order of their own."""

    def fn(rank, world_size):
        total = 0.0
        for name in ("zbv", "dualpipe_v", "interleaved_1f1b"):
            schedule = SCHEDULES[name](2, 5)
            stages = stages_of(schedule, rank, lambda calls: None)
            losses = PipelineExecutor(stages, schedule, rank=rank).step([(torch.ones(WIDTH),)] * 5)
            total += sum(float(loss) for loss in losses if loss is not None)
        return total

    assert sum(run_ranks(fn, 2)) == 3 * 5 * WIDTH
