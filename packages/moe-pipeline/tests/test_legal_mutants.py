"""Whatever order the checker accepts gives the gradients of one process."""

import random
from dataclasses import replace

import torch
from torch import nn

from moe_pipeline.executor.execution_plan import stage_holders
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.checker import check
from ranktest import run_ranks

WIDTH = 3


class Stage(nn.Module):
    def __init__(self, is_last):
        super().__init__()
        self.is_last = is_last
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x, *, target):
        y = torch.tanh(self.linear(x))
        loss = (y * target).sum() if self.is_last else 0.1 * y.square().sum()
        return StageOutput(tensors=(y,), loss=loss)


def stages_and_data(seed, num_stages, microbatches):
    """Other numbers of rows in each microbatch."""
    torch.manual_seed(seed)
    stages = [Stage(i == num_stages - 1) for i in range(num_stages)]
    data = [torch.randn(2, 1 + m % 3, WIDTH, dtype=torch.float64) for m in range(microbatches)]
    return stages, [(x,) for x, _ in data], [target for _, target in data]


def gradients(stages):
    return [[p.grad for p in stage.parameters()] for stage in stages]


def expected_gradients(seed, num_stages, microbatches):
    stages, inputs, targets = stages_and_data(seed, num_stages, microbatches)
    for tensors, target in zip(inputs, targets, strict=True):
        total = 0.0
        for stage in stages:
            out = stage(*tensors, target=target)
            tensors, total = out.tensors, total + out.loss
        total.backward()
    return gradients(stages)


def worst_difference(found, expected):
    """Relative to 1 or to the gradient, whichever is larger; over all stages and parameters."""
    pairs = [
        (f, e)
        for stage_f, stage_e in zip(found, expected, strict=True)
        for f, e in zip(stage_f, stage_e, strict=True)
    ]
    return max((f - e).abs().max().item() / max(1.0, e.abs().max().item()) for f, e in pairs)


def executed(seed, schedule):
    """Gradients of a schedule run in this process."""
    sizes = (schedule.num_stages, schedule.num_microbatches)
    stages, inputs, targets = stages_and_data(seed, *sizes)
    PipelineExecutor(dict(enumerate(stages)), schedule).step(inputs, targets)
    return gradients(stages)


def legal_mutants(schedule, draw, count, *, tries=60):
    """Accepted by the checker, other than the schedule: actions of a rank moved, several times."""
    found = []
    for _ in range(tries):
        if len(found) == count:
            break
        rows = [list(row) for row in schedule.ranks]
        for _ in range(draw.randint(1, 3)):
            row = draw.choice(rows)
            at = draw.randrange(len(row))
            to = min(len(row) - 1, max(0, at + draw.choice((-3, -2, -1, 1, 2, 3))))
            row.insert(to, row.pop(at))
        mutant = replace(schedule, ranks=tuple(map(tuple, rows)))
        if mutant.ranks != schedule.ranks and not check(mutant):
            found.append(mutant)
    return found


def with_backward():
    return [name for name, make in SCHEDULES.items() if make(1, 1).has_backward]


def test_legal_mutants_of_every_schedule_give_the_gradients_of_one_process(seed):
    draw, judged = random.Random(seed), 0
    for name in with_backward():
        schedule = SCHEDULES[name](draw.randint(2, 3), draw.randint(3, 5))
        expected = expected_gradients(seed, schedule.num_stages, schedule.num_microbatches)
        for mutant in legal_mutants(schedule, draw, 4):
            assert worst_difference(executed(seed, mutant), expected) <= 1e-12, mutant
            judged += 1
    assert judged >= 30


def test_legal_mutants_on_real_ranks_give_the_gradients_of_one_process(seed):
    names = ["1f1b", "interleaved_1f1b", "zbv", "interleaved_zero_bubble"]
    draw = random.Random(seed)
    schedules = [m for n in names for m in legal_mutants(SCHEDULES[n](2, 4), draw, 3)]

    def fn(rank, world_size):
        results = []
        for schedule in schedules:
            stages, inputs, targets = stages_and_data(seed, schedule.num_stages, 4)
            holders = stage_holders(schedule)
            mine = {i: stage for i, stage in enumerate(stages) if rank in holders[i]}
            executor = PipelineExecutor(
                mine, schedule, rank=rank, options=ExecutorOptions(timeout_s=30)
            )
            executor.step(inputs, targets)
            results.append({i: [p.grad.tolist() for p in mine[i].parameters()] for i in mine})
        return results

    ranks = run_ranks(fn, 2)
    assert len(schedules) >= 8
    for number, schedule in enumerate(schedules):
        held = {i: grads for results in ranks for i, grads in results[number].items()}
        found = [[torch.tensor(g, dtype=torch.float64) for g in held[i]] for i in sorted(held)]
        expected = expected_gradients(seed, schedule.num_stages, 4)
        assert worst_difference(found, expected) <= 1e-12, schedule
