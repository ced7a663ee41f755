import importlib.util
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_pipeline.config import MoEConfig, RouterLosses
from moe_pipeline.errors import ScheduleError
from moe_pipeline.executor.execution_plan import stage_holders
from moe_pipeline.executor.groups.tied import TiedParameters
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.schedules.generators.basic import one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.generators.zero_bubble import zb_1p
from ranktest import run_ranks

WIDTH = 4
CONFIG = MoEConfig(
    hidden_size=WIDTH,
    moe_intermediate_size=3,
    num_experts=4,
    num_experts_per_tok=2,
    losses=RouterLosses(router_aux_loss_coef=0.2),
    initializer_range=0.5,
)


class MoEStage(nn.Module):
    """Some with one block of experts, some with none; passes on a dict, and a skip beside it."""

    def __init__(self, index, last, num_microbatches):
        super().__init__()
        self.last, self.share = last, 1.0 / num_microbatches
        self.blocks = nn.ModuleList(
            MoELayer(CONFIG, dtype=torch.float64) for _ in range(1 - index % 2)
        )
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, state, skip, *, target):
        hidden, aux_loss = state["hidden"], skip.new_zeros(())
        for block in self.blocks:
            out = block(hidden)
            hidden, aux_loss = hidden + out.hidden, aux_loss + out.aux_loss * self.share
        hidden = torch.tanh(self.linear(hidden)) + 0.1 * state["positions"][:, None]
        if self.last:
            error = (hidden + 0.1 * skip - target).square().sum()
            return StageOutput(loss=error * self.share + aux_loss)
        state = {"hidden": hidden, "positions": state["positions"], "none": None}
        return StageOutput(tensors=(state, skip + 0.1 * hidden.sum()), loss=aux_loss)


def moe_stages(seed, schedule):
    torch.manual_seed(seed)
    count = schedule.num_stages
    return [MoEStage(i, i == count - 1, schedule.num_microbatches) for i in range(count)]


def moe_data(seed, microbatches):
    """Other numbers of rows in each microbatch, none in one."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = [], []
    for m in range(microbatches):
        rows = [3, 1, 0, 2][(m + seed) % 4]
        x, skip, target = torch.randn(3, rows, WIDTH, generator=generator, dtype=torch.float64)
        inputs.append(({"hidden": x, "positions": torch.arange(rows)}, skip))
        targets.append(target)
    return inputs, targets


def without_pipeline(stages, steps, *, backward):
    """Loss of each step; gradients add up in the stages."""
    losses = []
    for inputs, targets in steps:
        losses.append(0.0)
        for tensors, target in zip(inputs, targets, strict=True):
            total = 0.0
            for stage in stages:
                out = stage(*tensors, target=target)
                tensors = out.tensors
                total = total + out.loss
            losses[-1] += total.item()
            if backward:
                total.backward()
    return losses


def gradients_of(stage):
    return [None if p.grad is None else p.grad.numpy() for p in stage.parameters()]


def close(a, b):
    return (a - b).abs().max().item() <= 1e-12 * max(1.0, b.abs().max().item())


def assert_equal_one_process(seed, schedule, steps, losses, found, known):
    """`found`: of each stage, for each of its holders, its gradients. `known`: references."""
    kind = (schedule.num_stages, schedule.has_backward)
    if kind not in known:
        stages = moe_stages(seed, schedule)
        known[kind] = stages, without_pipeline(stages, steps, backward=schedule.has_backward)
    stages, expected = known[kind]
    assert losses == pytest.approx(expected, rel=1e-12, abs=1e-12), schedule.name
    for stage, held in zip(stages, found, strict=True):
        for got in held:
            for gradient, parameter in zip(got, stage.parameters(), strict=True):
                assert (gradient is None) == (parameter.grad is None), schedule.name
                if gradient is not None:
                    assert close(torch.from_numpy(gradient), parameter.grad), schedule.name


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule_on_real_ranks_equals_one_process(seed, num_ranks):
    """Two steps of other shapes; with an odd number of microbatches, more than ranks."""
    microbatches = num_ranks + 3
    schedules = [generate(num_ranks, microbatches) for generate in SCHEDULES.values()]
    steps = [moe_data(seed % 1000 + i, microbatches) for i in range(2)]

    def fn(rank, world_size):
        backward_group = dist.new_group(list(range(world_size)))
        holders = {ranks for s in schedules for ranks in stage_holders(s).values()}
        tied = {ranks: dist.new_group(ranks) for ranks in sorted(holders) if len(ranks) > 1}
        results = []
        for schedule in schedules:
            mine = {i: r for i, r in stage_holders(schedule).items() if rank in r}
            stages = moe_stages(seed, schedule)
            executor = PipelineExecutor(
                {i: stages[i] for i in mine},
                schedule,
                rank=rank,
                backward_group=backward_group,
                options=ExecutorOptions(timeout_s=60),
            )
            losses = []
            for inputs, targets in steps:
                values = executor.step(inputs, targets)
                losses.append(sum(value.item() for value in values if value is not None))
            for i, ranks in mine.items():
                if len(ranks) > 1:
                    shared = TiedParameters(list(stages[i].parameters()), group=tied[ranks])
                    shared.reduce_gradients()
            results.append((losses, {i: gradients_of(stages[i]) for i in mine}))
        return results

    ranks, known = run_ranks(fn, num_ranks, timeout_s=200), {}
    for number, schedule in enumerate(schedules):
        results = [results[number] for results in ranks]
        losses = [sum(step) for step in zip(*(losses for losses, _ in results), strict=True)]
        held = [
            [grads[stage] for _, grads in results if stage in grads]
            for stage in range(schedule.num_stages)
        ]
        assert_equal_one_process(seed, schedule, steps, losses, held, known)


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize(("num_ranks", "microbatches"), [(1, 2), (3, 7), (4, 2)])
def test_every_schedule_in_one_process_equals_no_pipeline(seed, num_ranks, microbatches, fusion):
    known = {}
    for generate in SCHEDULES.values():
        schedule = generate(num_ranks, microbatches)
        stages = moe_stages(seed, schedule)
        steps = [moe_data(seed % 1000, microbatches)]
        options = ExecutorOptions(gradient_accumulation_fusion=fusion)
        executor = PipelineExecutor(dict(enumerate(stages)), schedule, options=options)
        values = executor.step(*steps[0])
        losses = [sum(value.item() for value in values)]
        assert not any(value.requires_grad for value in values)
        held = [[gradients_of(stage)] for stage in stages]
        assert_equal_one_process(seed, schedule, steps, losses, held, known)


def test_stages_with_expert_parallel_groups_of_their_own_equal_one_process(seed):
    """pp=2 x ep=2: the auxiliary loss of every stage counts once."""
    config = CONFIG
    generator = torch.Generator().manual_seed(seed)
    rows = [(4, 2), (0, 5), (3, 3)]  # per microbatch, of the two ep ranks
    data = [torch.randn(sum(r), WIDTH, generator=generator, dtype=torch.float64) for r in rows]

    def layers():
        torch.manual_seed(seed)
        return [MoELayer(config, dtype=torch.float64) for _ in range(2)]

    def run(layer, last, x):
        out = layer(x)
        hidden = x + out.hidden
        if last:
            return StageOutput(loss=hidden.pow(2).sum() + out.aux_loss)
        return StageOutput(tensors=(hidden,), loss=out.aux_loss)

    def fn(rank, world_size):
        stage, part = divmod(rank, 2)
        ep_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ep_group = ep_groups[stage]
        groups = MoEGroups(ep=ep_group, tokens=ep_group)
        layer = MoELayer(config, groups=groups, dtype=torch.float64)
        source = layers()[stage]
        mine = slice(2 * part, 2 * part + 2)
        with torch.no_grad():
            layer.gate.weight.copy_(source.gate.weight)
            layer.experts.gate_up_proj.copy_(source.experts.gate_up_proj[mine])
            layer.experts.down_proj.copy_(source.experts.down_proj[mine])
        executor = PipelineExecutor(
            {stage: lambda x, *, target: run(layer, stage == 1, x)},
            zb_1p(2, 3),
            rank=stage,
            forward_group=pp_groups[part],
        )
        pieces = [(x.split(r)[part],) for x, r in zip(data, rows, strict=True)]
        losses = executor.step(pieces if stage == 0 else None)
        grads = [p.grad.numpy() for p in layer.parameters()]
        return sum(loss.item() for loss in losses), grads

    ranks = run_ranks(fn, 4)
    whole, total = layers(), 0.0
    for x in data:
        out = run(whole[0], False, x)
        loss = run(whole[1], True, out.tensors[0]).loss + out.loss
        loss.backward()
        total += loss.item()
    assert abs(sum(loss for loss, _ in ranks) - total) < 1e-12 * total
    for stage in range(2):
        (gate_a, *experts_a), (gate_b, *experts_b) = (
            [torch.from_numpy(g) for g in ranks[2 * stage + part][1]] for part in range(2)
        )
        gate, *experts = [p.grad for p in whole[stage].parameters()]
        assert close(gate_a + gate_b, gate)
        for a, b, expected in zip(experts_a, experts_b, experts, strict=True):
            assert close(torch.cat([a, b]), expected)


def test_a_frozen_first_stage_and_an_unused_output_are_fine():
    def fn(rank, world_size):
        weight = torch.ones(WIDTH, requires_grad=rank > 0)
        kept = []

        def stage(*inputs, target):
            kept.append([t.requires_grad for t in inputs])
            if rank == 0:
                return StageOutput(tensors=(inputs[0] * weight, inputs[0].sum()))
            if rank == 1:  # two outputs want a gradient, the next stage uses one
                return StageOutput(tensors=(inputs[0] * weight, weight * 2))
            return StageOutput(loss=(inputs[0] * weight).sum())

        executor = PipelineExecutor({rank: stage}, one_f_one_b(3, 2), rank=rank)
        executor.step([(torch.ones(WIDTH),)] * 2 if rank == 0 else None)
        return kept, None if weight.grad is None else weight.grad.tolist()

    (_, none), (flags_1, grad_1), (flags_2, grad_2) = run_ranks(fn, 3)
    assert none is None
    assert flags_1 == [[False, False]] * 2
    assert flags_2 == [[True, True]] * 2
    assert grad_1 == grad_2 == [2.0] * WIDTH


class Cell(nn.Module):
    """A small stage."""

    def __init__(self, last):
        super().__init__()
        self.last = last
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, *, target):
        x = torch.sin(self.linear(x))
        return StageOutput(loss=x.square().sum()) if self.last else StageOutput(tensors=(x,))


def test_every_legal_mutant_gives_the_gradients_of_one_process(seed):
    """Legal by the oracle of the checker's tests: actions swapped that do not depend."""
    path = Path(__file__).parents[1] / "schedules" / "table" / "test_checker.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    inputs = [(torch.randn(2, 3, dtype=torch.float64),) for _ in range(4)]
    count = 0
    for name in ("1f1b", "interleaved_1f1b", "zb_1p", "zbv", "dualpipe"):
        schedule = SCHEDULES[name](2, 4)
        legal = [mutant for mutant in oracle.mutants(schedule) if oracle.is_legal(mutant)]
        cells = [Cell(i == schedule.num_stages - 1) for i in range(schedule.num_stages)]
        for x in inputs:
            for cell in cells:
                out = cell(*x, target=None)
                x = out.tensors
            out.loss.backward()
        expected = [p.grad for cell in cells for p in cell.parameters()]
        for mutant in Random(seed).sample(legal, min(20, len(legal))):
            for cell in cells:
                cell.zero_grad()
            PipelineExecutor(dict(enumerate(cells)), mutant).step(inputs)
            got = [p.grad for cell in cells for p in cell.parameters()]
            assert all(close(a, b) for a, b in zip(got, expected, strict=True)), mutant
            count += 1
    assert count >= 40


def test_outputs_of_every_kind_go_between_ranks():
    """Strided, 0-dim, empty, bool, integer and low-precision tensors; some want a gradient."""
    values = {
        "strided": torch.arange(12.0).view(3, 4).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False]),
        "ids": torch.arange(3, dtype=torch.int16),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
    }

    def fn(rank, world_size):
        weight = torch.ones((), requires_grad=True)

        def first(x, *, target):
            floats = {k: v * weight.to(v.dtype) for k, v in values.items() if v.is_floating_point()}
            return StageOutput(tensors=({**values, **floats}, (weight, weight * 3), 7))

        def second(state, pair, number, *, target):
            assert number == 7 and list(state) == list(values)
            for key, value in values.items():
                assert torch.equal(state[key], value) and state[key].dtype == value.dtype, key
                assert state[key].requires_grad == value.is_floating_point(), key
            total = sum(v.double().sum() for v in state.values() if v.requires_grad)
            return StageOutput(loss=total + pair[0] + 2 * pair[1].double())

        schedule = zb_1p(2, 2)
        executor = PipelineExecutor({rank: (first, second)[rank]}, schedule, rank=rank)
        executor.step([(torch.ones(1),)] * 2)
        return None if weight.grad is None else weight.grad.item()

    assert run_ranks(fn, 2) == [2 * (66 + 2.5 + 1.5 + 1 + 6), None]


def test_frozen_stages_take_part_in_split_backwards(seed):
    """The first stage has nothing to differentiate, the linear of the second neither."""

    def fn(rank, world_size):
        cell = Cell(rank == 2).requires_grad_(rank == 2)
        scale = torch.ones(3, dtype=torch.float64, requires_grad=True)

        def stage(x, *, target):
            return cell(x * scale if rank == 1 else x, target=target)

        inputs = [(torch.ones(2, 3, dtype=torch.float64),)] * 4
        PipelineExecutor({rank: stage}, zb_1p(3, 4), rank=rank).step(inputs)
        return [p.grad is not None for p in (*cell.parameters(), scale)]

    assert run_ranks(fn, 3) == [[False] * 3, [False, False, True], [True, True, False]]


def test_an_error_inside_a_stage_keeps_its_type_and_names_the_action():
    def stage(x, *, target):
        raise KeyError("mine")

    executor = PipelineExecutor({0: stage}, one_f_one_b(1, 2), rank=0)
    with pytest.raises(KeyError) as caught:
        executor.step([(torch.ones(1),)] * 2)
    assert caught.value.__notes__ == ["rank 0, stage 0: 0F0 of schedule 1f1b"]


def constant(value):
    return lambda *inputs, target: value


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        (torch.ones(1), TypeError, "must return a StageOutput, got Tensor"),
        (StageOutput(), ValueError, "the last stage returned no loss for microbatch 0"),
        (StageOutput(loss=torch.ones(2)), ValueError, r"a loss of shape \(2,\) for microbatch 0"),
    ],
)
def test_stages_that_return_something_else_are_told(output, error, words):
    executor = PipelineExecutor({0: constant(output)}, one_f_one_b(1, 1), rank=0)
    with pytest.raises(error, match=words):
        executor.step([()])


def test_wrong_numbers_of_inputs_and_targets_are_refused():
    executor = PipelineExecutor({0: constant(StageOutput())}, one_f_one_b(1, 3), rank=0)
    with pytest.raises(
        ValueError, match=r"runs microbatch 0 of the first stage on this rank, but its inputs"
    ):
        executor.step()
    with pytest.raises(ValueError, match="has 3 microbatches, but 2 inputs are given"):
        executor.step([(), ()])
    with pytest.raises(ValueError, match="but 1 targets are given"):
        executor.step([(), (), ()], [None])
    with pytest.raises(
        TypeError, match=r"inputs\[1\] must be a tuple or list, such as \(x,\), got a Tensor"
    ):
        executor.step([(), torch.ones(1), ()])


def test_a_step_with_backwards_is_refused_without_gradients():
    executor = PipelineExecutor({0: constant(StageOutput())}, one_f_one_b(1, 1))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(ValueError, match="runs backwards, but step was called under"):
            executor.step([(torch.ones(2),)])


def test_schedules_that_fail_the_check_are_refused():
    schedule = one_f_one_b(1, 2)
    wrong = replace(schedule, ranks=(schedule.ranks[0][1:],))
    with pytest.raises(ScheduleError, match="0F0 occurs 0 times"):
        PipelineExecutor({0: constant(StageOutput())}, wrong, rank=0)


def test_rank_and_stages_must_fit_schedule_and_groups():
    stage = constant(StageOutput())
    with pytest.raises(ValueError, match=r"rank=3 is not in schedule 1f1b.*ranks 0\.\.0"):
        PipelineExecutor({0: stage}, one_f_one_b(1, 2), rank=3)
    with pytest.raises(ValueError, match=r"rank 1 runs stages \[1\] of schedule 1f1b, but stages"):
        PipelineExecutor({0: stage}, one_f_one_b(2, 2), rank=1)
    with pytest.raises(ValueError, match="forward_group=None is the default group, which does not"):
        PipelineExecutor({1: stage}, one_f_one_b(2, 2), rank=1)
    idle = replace(one_f_one_b(1, 2), ranks=(one_f_one_b(1, 2).ranks[0], ()))
    with pytest.raises(ValueError, match="rank 1 has nothing to do in schedule 1f1b"):
        PipelineExecutor({}, idle, rank=1)

    def fn(rank, world_size):
        with pytest.raises(ValueError, match="forward_group has 2 ranks and this is rank"):
            PipelineExecutor({1 - rank: stage}, one_f_one_b(2, 2), rank=1 - rank)
        with pytest.raises(ValueError, match="the schedule has 3 ranks"):
            PipelineExecutor({rank: stage}, one_f_one_b(3, 2), rank=rank)
        with pytest.raises(ValueError, match="groups need rank="):
            PipelineExecutor({0: stage}, one_f_one_b(1, 2), forward_group=dist.group.WORLD)

    run_ranks(fn, 2)
