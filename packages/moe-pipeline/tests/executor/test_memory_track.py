import pytest
import torch
from torch import nn

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.executor.measuring import measure_costs
from moe_pipeline.executor.memory_track import MemoryTrack
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.layer.local_experts import Experts
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.schedule import Kind
from moe_pipeline.schedules.table.simulator import simulate
from ranktest import run_ranks

WIDTH, ROWS = 16, 5


class Mixed(nn.Module):
    """Unequal stages: linear layers, a saved result, and one saved twice through a view."""

    def __init__(self, index, last):
        super().__init__()
        self.last = last
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(1 + index % 3))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x, *, target):
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale))
            x = x.t().exp().t() * 0.3
        if self.last:
            return StageOutput(loss=(x - target).square().sum())
        return StageOutput(tensors=(x,))


def stages_of(schedule):
    torch.manual_seed(0)
    last = schedule.num_stages - 1
    return [Mixed(i, i == last) for i in range(schedule.num_stages)]


def costs_of(schedule):
    """Measured on each stage alone."""
    split_backwards = {
        a.stage for row in schedule.ranks for a in row if a.kind is Kind.INPUT_GRADIENT
    }
    return [
        measure_costs(
            stage,
            (torch.randn(ROWS, WIDTH),),
            target=torch.zeros(ROWS, WIDTH),
            is_first=index == 0,
            split=index in split_backwards,
        )
        for index, stage in enumerate(stages_of(schedule))
    ]


def expected_timeline(row, costs):
    held, timeline = 0, []
    for action in row:
        cost = costs[action.stage]
        held += {
            Kind.FORWARD: cost.activation_bytes,
            Kind.BACKWARD: -cost.activation_bytes,
            Kind.INPUT_GRADIENT: cost.left_for_weights - cost.activation_bytes,
            Kind.WEIGHT_GRADIENT: -cost.left_for_weights,
        }.get(action.kind, 0)
        timeline.append((str(action), held))
    return timeline


@pytest.mark.parametrize("fusion", [False, True])
def test_tracked_bytes_are_those_that_the_simulator_predicts(fusion):
    names = ("forward_then_backward", "1f1b", "interleaved_1f1b", "zb_1p", "zb_2p", "zbv", "v_half")
    schedules = [SCHEDULES[name](2, 5) for name in names]

    def fn(rank, world_size):
        found = []
        for schedule in schedules:
            stages = stages_of(schedule)
            mine = {s for (s, _), place in schedule.places().items() if place == rank}
            executor = PipelineExecutor(
                {s: stages[s] for s in mine},
                schedule,
                rank=rank,
                options=ExecutorOptions(gradient_accumulation_fusion=fusion),
            )
            track = MemoryTrack()
            inputs = [(torch.randn(ROWS, WIDTH),) for _ in range(5)]
            targets = [torch.zeros(ROWS, WIDTH) for _ in range(5)]
            executor.step(inputs, targets, track=track)
            timeline = [(str(action), held) for action, held in track.timeline]
            found.append((track.peak_bytes, timeline))
        return found

    ranks = run_ranks(fn, 2)
    for number, schedule in enumerate(schedules):
        costs = costs_of(schedule)
        predicted = simulate(schedule, costs).peak_bytes
        for rank, found in enumerate(ranks):
            peak, timeline = found[number]
            assert timeline == expected_timeline(schedule.ranks[rank], costs), schedule.name
            assert peak == predicted[rank] > 0, schedule.name


def test_measured_bytes_are_what_the_stage_keeps():
    """tanh keeps its result; exp keeps its result, of which `.t()` is a view; linear its input."""
    size = 4 * ROWS * WIDTH
    stage = Mixed(0, last=False)
    assert measure_costs(stage, (torch.randn(ROWS, WIDTH),), is_first=True).activation_bytes == (
        3 * size
    )
    split = measure_costs(stage, (torch.randn(ROWS, WIDTH),), split=True)
    assert (split.activation_bytes, split.weight_gradient_bytes) == (3 * size, size)
    assert all(parameter.grad is None for parameter in stage.parameters())


def test_measuring_puts_gradients_and_random_state_back():
    class Noisy(nn.Linear):
        def forward(self, x, *, target):
            return StageOutput(tensors=(nn.functional.dropout(super().forward(x), 0.5),))

    stage = Noisy(WIDTH, WIDTH)
    stage.weight.grad = torch.ones(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH)
    state = torch.get_rng_state()
    costs = measure_costs(stage, (x,))
    # The input, and dropout's mask (of bytes or of floats).
    assert costs.activation_bytes > 4 * 3 * WIDTH
    assert stage.weight.grad.eq(1).all() and stage.bias.grad is None
    assert torch.equal(state, torch.get_rng_state())


def test_measuring_puts_back_gradients_in_memory_that_experts_keep():
    config = MoEConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=3,
        num_experts=2,
        num_experts_per_tok=1,
        experts=ExpertsOptions(gradient_accumulation_fusion=True),
    )
    experts, counts = Experts(config), (2, 3)

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = experts

        def forward(self, x, *, target):
            return StageOutput(tensors=(self.experts(x, counts, torch.ones(5)),))

    torch.manual_seed(0)
    experts(torch.randn(5, WIDTH), counts, torch.ones(5)).sum().backward()
    before = [parameter.grad.clone() for parameter in experts.parameters()]
    measure_costs(Stage(), (torch.randn(5, WIDTH),))
    after = [parameter.grad for parameter in experts.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_stage_that_fails_while_it_is_measured_keeps_its_gradients():
    class Failing(nn.Linear):
        def forward(self, x, *, target):
            raise RuntimeError("no")

    stage = Failing(WIDTH, WIDTH)
    stage.weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match="no"):
        measure_costs(stage, (torch.randn(3, WIDTH),))
    assert stage.weight.grad.eq(1).all()
