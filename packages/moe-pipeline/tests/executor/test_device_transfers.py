"""The executor on process groups with NCCL's rules: devicetest's, on the CPU's memory.

That the message of a stage is announced on the host and its tensors move in the schedule's order
holds there as on a device; streams are left to `gpu` machines.
"""

import functools
import itertools
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm_collectives import PeerFailedError
from comm_collectives.call.groups.groups import group_state
from devicetest.nccl import NcclRules, has_nccl_rules, register_nccl_rules
from moe_pipeline.errors import ScheduleError, StageTransferError
from moe_pipeline.executor.device_transfers import check_order, device_kinds, find_swaps
from moe_pipeline.executor.execution_plan import ExecutionPlan, other_end, stage_holders
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.schedule import Action, Schedule
from ranktest import collect_ranks, run_ranks

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
WIDTH, COUNT = 16, 4
GROUPS = [
    (NcclRules(buffering=buffering, order=order), count)
    for buffering, order, count in [
        ("none", "pair", 1),
        ("none", "communicator", 1),
        ("none", "communicator", 2),
        ("small", "communicator", 1),
        ("small", "pair", 2),
        ("full", "communicator", 1),
        ("full", "pair", 2),
    ]
]
# 1F1B with receives right before the computations that need them.
CROSSED = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


def rows_of(microbatch):
    return 40 if microbatch % 2 else 1  # over and under what a small buffer holds


def pipeline(num_stages, rows_of=rows_of):
    """A weight for each stage, and inputs; shapes change with every microbatch."""
    torch.manual_seed(0)
    weights = [
        (torch.randn(WIDTH, dtype=torch.float64) / 4 + 1).requires_grad_()
        for _ in range(num_stages)
    ]
    inputs = [(torch.randn(rows_of(m), WIDTH, dtype=torch.float64),) for m in range(COUNT)]
    return weights, inputs


def stages_of(weights, fail_at=None):
    def make(index):
        calls = []

        def stage(x, *, target):
            calls.append(1)
            if len(calls) == fail_at:
                raise KeyError("mine")
            y = torch.tanh(x * weights[index])
            if index == len(weights) - 1:
                return StageOutput(loss=y.sum())
            return StageOutput(tensors=(y,))

        return stage

    return [make(index) for index in range(len(weights))]


def steps_of(num_stages):
    """Weights, and the inputs of some steps: one that is announced, two alike more, one unlike."""
    weights, inputs = pipeline(num_stages)
    _, others = pipeline(num_stages, rows_of=lambda microbatch: 3 + microbatch // 2)
    return weights, [inputs, inputs, inputs, others]


@functools.cache
def expected(num_stages, num_steps=4):
    weights, steps = steps_of(num_stages)
    for (x,) in itertools.chain(*steps[:num_steps]):
        for stage in stages_of(weights):
            output = stage(x, target=None)
            x = output.tensors[0] if output.tensors else x
        output.loss.backward()
    return [w.grad for w in weights]


def groups_of(rules, count):
    register_nccl_rules()
    limit = timedelta(seconds=60)
    made = [
        dist.new_group(backend="nccl_rules", pg_options=rules, timeout=limit) for _ in range(count)
    ]
    for group in made:  # what a group of NCCL has that was made with a device_id
        is_bound = rules.order == "communicator"
        group.bound_device_id = torch.device("cuda", dist.get_rank()) if is_bound else None
    return made[0], made[-1] if count == 2 else None


def run_schedule(schedule, rank, forward, backward, num_steps=4):
    weights, steps = steps_of(schedule.num_stages)
    holders = stage_holders(schedule)
    mine = {i: s for i, s in enumerate(stages_of(weights)) if rank in holders[i]}
    executor = PipelineExecutor(
        mine,
        schedule,
        rank=rank,
        forward_group=forward,
        backward_group=backward,
        options=ExecutorOptions(timeout_s=60),
    )
    for inputs in steps[:num_steps]:
        executor.step(inputs)
    return {i: weights[i].grad for i in mine if weights[i].grad is not None}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule_ends_with_right_gradients_under_nccls_rules(num_ranks):
    settings = GROUPS if num_ranks == 2 else GROUPS[1:]  # one and two groups with every buffering
    steps = [4 if num_ranks == 2 or rules is settings[0][0] else 1 for rules, _ in settings]
    names = [name for name, make in SCHEDULES.items() if make(2, 2).has_backward]

    def fn(rank, world_size):
        found = []
        for (rules, count), num_steps in zip(settings, steps, strict=True):
            forward, backward = groups_of(rules, count)
            for name in names:
                schedule = SCHEDULES[name](world_size, COUNT)
                grads = run_schedule(schedule, rank, forward, backward, num_steps)
                found.append({i: g.tolist() for i, g in grads.items()})
            for group in filter(None, (forward, backward)):
                assert group.issued and group.timed_waits == []
                batches = [issued for issued in group.issued if " + " in issued]
                # Of two groups each moves one direction of most schedules.
                assert bool(batches) == (rules.order == "communicator"), (rules, count)
        return found

    ranks = run_ranks(fn, num_ranks, timeout_s=300)
    for number, (num_steps, name) in enumerate(itertools.product(steps, names)):
        schedule = SCHEDULES[name](num_ranks, COUNT)
        totals = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(schedule.num_stages)]
        for rank in ranks:
            for i, grad in rank[number].items():
                totals[i] += torch.tensor(grad, dtype=torch.float64)
        rights = expected(schedule.num_stages, num_steps)
        for total, right in zip(totals, rights, strict=True):
            assert torch.allclose(total, right, rtol=0, atol=1e-12), (name, number)


def every_dtype():
    """Of those that NCCL has not too, and of shapes and layouts that are special."""
    numbers = torch.arange(6).view(2, 3)
    kinds = ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bool")
    tensors = [numbers.to(getattr(torch, name)) for name in (*kinds, "bfloat16", "complex64")]
    conjugate = torch.complex(numbers.double(), numbers.double()).conj()
    return *tensors, numbers.t(), conjugate, conjugate.imag, numbers[0, 0], numbers[:0]


def as_bytes(tensor):
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("order", ["pair", "communicator"])
def test_tensors_of_every_dtype_travel_under_nccls_rules(order):
    def fn(rank, world_size):
        forward, _ = groups_of(NcclRules(order=order), 1)

        def first(x, *, target):
            return StageOutput(tensors=(x * 2, every_dtype()))

        def last(x, others, *, target):
            for found, expected in zip(others, every_dtype(), strict=True):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(as_bytes(found), as_bytes(expected)), found.dtype
            return StageOutput(loss=x.sum())

        x = torch.ones(3, requires_grad=True)
        schedule = SCHEDULES["1f1b"](2, COUNT)
        stage = {rank: last if rank else first}
        executor = PipelineExecutor(stage, schedule, rank=rank, forward_group=forward)
        for _ in range(3):  # in the third of known shape
            executor.step([(x,)] * COUNT)
        return None if rank else x.grad.tolist()

    assert run_ranks(fn, 2)[0] == [3 * COUNT * 2.0] * 3


@pytest.mark.parametrize("has_two", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_ends_find_the_same_swaps_side_by_side_in_one_order(num_ranks, has_two):
    for make in SCHEDULES.values():
        schedule = make(num_ranks, 2 * num_ranks)
        plans = [ExecutionPlan.of(schedule, rank) for rank in range(num_ranks)]
        found = [find_swaps(plan, rank, has_two=has_two) for rank, plan in enumerate(plans)]
        place = {action: i for row in schedule.ranks for i, action in enumerate(row)}
        for swaps, plan in zip(found, plans, strict=True):
            for action, partner in swaps.items():
                peer = found[plan.edges[action].peer]
                assert swaps[partner] == action
                assert peer[other_end(action)] == other_end(partner)
                distance = place[partner] - place[action]
                assert abs(distance) == 1
                assert place[other_end(partner)] - place[other_end(action)] == distance
                if has_two:
                    assert plan.edges[action].forward == plan.edges[partner].forward


def test_every_steady_step_of_1f1b_swaps_on_one_group_and_none_on_two():
    """Rank 0 of two sends microbatch 1 and 2 while it waits for gradients of those before."""
    plan = ExecutionPlan.of(SCHEDULES["1f1b"](2, 4), 0)
    one = find_swaps(plan, 0, has_two=False)
    assert {str(action) for action in one} == {
        *("0SEND_F1", "0RECV_B0", "0SEND_F2", "0RECV_B1", "0SEND_F3", "0RECV_B2")
    }
    assert find_swaps(plan, 0, has_two=True) == {}


def test_failures_are_named_and_disorder_is_refused_under_nccls_rules():
    rows = tuple(tuple(map(Action.parse, row.split())) for row in CROSSED)
    crossed = Schedule(name="mine", num_stages=2, num_microbatches=2, ranks=rows)

    def fn(rank, world_size):
        forward, backward = groups_of(GROUPS[0][0], 2)
        assert device_kinds(forward) == {"cpu", "cuda"} and not device_kinds(dist.group.WORLD)
        words = "mine would not end on 1 process group that transfer in order: deadlock: rank 0"
        weights, inputs = pipeline(2)
        stage = {rank: stages_of(weights, fail_at=3 if rank else None)[rank]}
        with pytest.raises(ScheduleError, match=words):
            PipelineExecutor(stage, crossed, rank=rank, forward_group=forward)
        PipelineExecutor(stage, crossed, rank=rank, forward_group=forward, backward_group=backward)
        executor = PipelineExecutor(
            stage, SCHEDULES["1f1b"](2, COUNT), rank=rank, forward_group=forward
        )
        with pytest.raises(KeyError if rank else StageTransferError) as caught:
            executor.step(inputs)
        return str(caught.value)

    told = run_ranks(fn, 2)
    assert told[0].endswith("failed: rank 1 (stage 1) failed in 1F2: KeyError: 'mine'")


def ahead_of(rank, before_last, *, fail=lambda: None, watchdog=False):
    """Two ranks whose third step receives a gradient long before the other rank sends it.

    In that step rank 0 calls `before_last` between the receive and the computation that needs it,
    and rank 1 `fail` between the two of its own.
    """
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1RECV_F2 1F2 1B1 1SEND_B1 1B2 1SEND_B2",
    )
    schedule = Schedule(
        name="early",
        num_stages=2,
        num_microbatches=3,
        ranks=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )
    forward, _ = groups_of(NcclRules(order="communicator", watchdog=watchdog), 1)
    weights, inputs = pipeline(2)
    calls = []

    def stage(x, *, target):
        calls.append(1)
        if rank == 0 and len(calls) == 9:
            before_last(forward)
        if rank == 1 and len(calls) == 8:
            fail()
        y = x * weights[rank]
        return StageOutput(loss=y.sum()) if rank else StageOutput(tensors=(y,))

    executor = PipelineExecutor(
        {rank: stage},
        schedule,
        rank=rank,
        forward_group=forward,
        options=ExecutorOptions(timeout_s=60),
    )
    for _ in range(3):
        executor.step(inputs[:3])
    return weights[rank].grad


def received(forward):
    """How many tensors a rank has asked its device for."""
    return sum("recv" in line for line in forward.issued)


def test_a_receive_of_known_shape_is_queued_before_its_send_is_announced():
    """Rank 1 sends the gradient only after rank 0 has gone past the receive."""

    def fn(rank, world_size):
        store = dist.distributed_c10d._get_default_store()

        def went_on(forward):
            store.set("received", str(received(forward)))

        def waits():
            assert int(store.get("received")) == 7  # three in each of two steps, and one

        return ahead_of(rank, went_on, fail=waits).tolist()

    assert len(run_ranks(fn, 2)) == 2


def raise_mine():
    raise KeyError("mine")


@pytest.mark.parametrize("watchdog", [False, True])
@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (raise_mine, "rank 1 (stage 1) failed in 1F1: KeyError: 'mine'"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 (stage 1) died or closed its"),
    ],
)
def test_who_fails_between_a_receive_and_its_send_is_named(fail, cause, watchdog):
    """With a watchdog nothing of the device's is named, and what it waits for is waited for."""

    def fn(rank, world_size):
        ahead_of(rank, lambda forward: None, fail=fail, watchdog=watchdog)

    survivor = collect_ranks(fn, 2, timeout_s=100)[0]
    assert survivor.error_type == StageTransferError.__name__, survivor.error
    assert f"of schedule early failed: {cause}" in survivor.error
    assert survivor.elapsed_s < 40  # the limits are 60 s


@pytest.mark.parametrize("at", ["1RECV_F0", "0RECV_B0"])
def test_a_transfer_that_the_device_gave_up_names_the_peer_in_a_post_and_in_a_receive(at):
    """Found before a post of known shape, and between a post whose message is there and its use."""
    rows = (
        "0F0 0SEND_F0 0RECV_B0 0F1 0B0 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule(name="mine", num_stages=2, num_microbatches=2, ranks=parsed)
    finder = int(at[0])

    def fn(rank, world_size):
        forward, _ = groups_of(GROUPS[0][0], 1)
        weights, inputs = pipeline(2, rows_of=lambda microbatch: 3)
        calls = []

        def break_device():
            launches = group_state(forward).launches
            launches.failure = PeerFailedError, "the other one is gone"

        def stage(x, *, target):
            calls.append(1)
            if rank == finder == 0 and len(calls) == 2:
                break_device()
            y = x * weights[rank]
            return StageOutput(loss=y.sum()) if rank else StageOutput(tensors=(y,))

        executor = PipelineExecutor({rank: stage}, schedule, rank=rank, forward_group=forward)
        with pytest.raises(StageTransferError) as caught:
            for turn in range(3):
                if rank == finder == 1 and turn == 2:
                    break_device()
                executor.step(inputs[:2])
        return str(caught.value)

    told = run_ranks(fn, 2)
    other = 1 - finder
    cause = f"failed: rank {other} (stage {other}) died or closed its connections"
    assert told[finder] == f"rank {finder}, stage {finder}: {at} of schedule mine {cause}"
    assert told[other].endswith(cause)


def test_pipelines_are_refused_where_a_device_has_one_queue(monkeypatch):
    schedule, kinds = SCHEDULES["1f1b"](2, 4), frozenset({"cuda"})
    check_order(schedule, kinds=kinds, has_two=True, is_bound=True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_order(schedule, kinds=frozenset(), has_two=True, is_bound=True)
    with pytest.raises(ScheduleError, match="1f1b can hang under CUDA_DEVICE_MAX_CONNECTIONS=1"):
        check_order(schedule, kinds=kinds, has_two=True, is_bound=True)
