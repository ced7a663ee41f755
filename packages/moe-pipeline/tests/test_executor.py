import os
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_pipeline.config import MoEConfig, RouterLosses
from moe_pipeline.errors import ScheduleError, StageTransferError
from moe_pipeline.executor import PipelineExecutor
from moe_pipeline.generators import forward_only, forward_then_backward, one_f_one_b
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer import MoELayer
from moe_pipeline.stage_io import StageOutput
from ranktest import collect_ranks, run_ranks

WIDTH = 8


class Block(nn.Module):
    """A stage: mixes in the position ids, and passes them on with a second floating tensor."""

    def __init__(self, index, last):
        super().__init__()
        self.index, self.last = index, last
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden, skip, positions, *, target):
        hidden = torch.tanh(self.linear(hidden)) + 0.1 * positions[:, None] + 0.5 * skip
        if self.last:
            return StageOutput(loss=(hidden - target).square().sum())
        # The skip has no gradient behind the first stage, where it was an input of the model.
        skip = skip + 0.1 * hidden.sum() if self.index else skip
        loss = hidden.pow(4).sum() if self.index == 1 else None
        return StageOutput(tensors=(hidden, skip, positions), loss=loss)


def model_of(seed, stages):
    torch.manual_seed(seed)
    return [Block(i, i == stages - 1) for i in range(stages)]


def data_of(seed, microbatches):
    """Another number of rows in each microbatch, one of them with none."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = [], []
    for m in range(microbatches):
        rows = [3, 1, 0, 5, 2][m % 5] + 4 * (m // 5)
        x, skip, target = torch.randn(3, rows, WIDTH, generator=generator, dtype=torch.float64)
        inputs.append((x, skip, torch.arange(rows)))
        targets.append(target)
    return inputs, targets


def one_process(blocks, inputs, targets):
    losses = [[] for _ in blocks]
    for tensors, target in zip(inputs, targets, strict=True):
        total = 0
        for i, block in enumerate(blocks):
            out = block(*tensors, target=target)
            tensors = out.tensors
            losses[i].append(None if out.loss is None else out.loss.item())
            total = total + (0 if out.loss is None else out.loss)
        total.backward()
    return losses, [[p.grad for p in block.parameters()] for block in blocks]


def close(a, b):
    return (a - b).abs().max().item() <= 1e-12 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("generate", [forward_then_backward, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 7), (4, 2), (3, 1)])
def test_ranks_equal_one_process(seed, generate, stages, microbatches):
    inputs, targets = data_of(seed, microbatches)

    def fn(rank, world_size):
        block = model_of(seed, stages)[rank]
        executor = PipelineExecutor(
            block,
            generate(stages, microbatches),
            stage_index=rank,
            forward_group=dist.group.WORLD,
            backward_group=dist.new_group(list(range(world_size))),
        )
        losses = executor.step(
            inputs if rank == 0 else None, targets if rank == stages - 1 else None
        )
        first = [p.grad.clone() for p in block.parameters()]
        block.zero_grad()
        # The same shapes in another order: nothing of the first step may remain.
        executor.step(inputs[::-1] if rank == 0 else None, targets[::-1])
        again = [p.grad for p in block.parameters()]
        losses = [None if loss is None else loss.item() for loss in losses]
        return losses, [g.numpy() for g in first], [g.numpy() for g in again]

    ranks = run_ranks(fn, stages)
    losses, grads = one_process(model_of(seed, stages), inputs, targets)
    for stage, (got_losses, first, again) in enumerate(ranks):
        for got, expected in zip(got_losses, losses[stage], strict=True):
            assert (got is None) == (expected is None)
            assert got is None or abs(got - expected) <= 1e-12 * max(1.0, abs(expected))
        for got, second, expected in zip(first, again, grads[stage], strict=True):
            assert close(torch.from_numpy(got), expected)
            assert close(torch.from_numpy(second), expected)


def test_one_stage_needs_no_process_group(seed):
    inputs, targets = data_of(seed, 3)
    inputs = [(x, skip.requires_grad_(), p) for x, skip, p in inputs]
    (block,) = model_of(seed, 1)
    losses = PipelineExecutor(block, one_f_one_b(1, 3), stage_index=0).step(inputs, targets)
    got = [p.grad for p in block.parameters()]
    expected, grads = one_process(model_of(seed, 1), inputs, targets)
    assert [loss.item() for loss in losses] == expected[0]
    assert not any(loss.requires_grad for loss in losses)
    assert all(torch.equal(a, b) for a, b in zip(got, grads[0], strict=True))


def test_forward_only_gives_losses_and_no_gradients(seed):
    inputs, targets = data_of(seed, 5)

    def fn(rank, world_size):
        block = model_of(seed, 2)[rank]
        executor = PipelineExecutor(block, forward_only(2, 5), stage_index=rank)
        losses = executor.step(inputs if rank == 0 else None, targets)
        assert all(p.grad is None for p in block.parameters())
        return [None if loss is None else loss.item() for loss in losses]

    ranks = run_ranks(fn, 2)
    losses, _ = one_process(model_of(seed, 2), inputs, targets)
    assert ranks[0] == losses[0]
    assert ranks[1] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("generate", [forward_then_backward, one_f_one_b])
def test_moe_layers_in_stages_equal_one_process(seed, generate):
    """pp=2 x ep=2: the auxiliary loss of every stage counts once."""
    config = MoEConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=4,
        num_experts=4,
        num_experts_per_tok=2,
        losses=RouterLosses(router_aux_loss_coef=0.2),
        initializer_range=0.4,
    )
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
            lambda x, *, target: run(layer, stage == 1, x),
            generate(2, 3),
            stage_index=stage,
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

        executor = PipelineExecutor(stage, one_f_one_b(3, 2), stage_index=rank)
        executor.step([(torch.ones(WIDTH),)] * 2 if rank == 0 else None)
        return kept, None if weight.grad is None else weight.grad.tolist()

    (_, none), (flags_1, grad_1), (flags_2, grad_2) = run_ranks(fn, 3)
    assert none is None
    assert flags_1 == [[False, False]] * 2
    assert flags_2 == [[True, True]] * 2
    assert grad_1 == grad_2 == [2.0] * WIDTH


def test_sent_outputs_and_unsaved_inputs_are_freed_before_the_backward():
    """Forward-then-backward on the middle of three stages: what is alive at the first backward."""

    def fn(rank, world_size):
        weight = torch.ones(1000, requires_grad=True)
        inputs, outputs, alive = [], [], []

        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                alive.append(
                    tuple(sum(r() is not None for r in refs) for refs in (inputs, outputs))
                )
                return grad

        def stage(x, *, target):
            inputs.append(weakref.ref(x.untyped_storage()))
            y = Look.apply(x + weight) * 2  # saves neither its input nor its output
            outputs.append(weakref.ref(y.untyped_storage()))
            return StageOutput(loss=y.sum()) if rank == 2 else StageOutput(tensors=(y,))

        executor = PipelineExecutor(stage, forward_then_backward(3, 6), stage_index=rank)
        executor.step([(torch.ones(1000),) for _ in range(6)] if rank == 0 else None)
        return alive

    inputs_alive, outputs_alive = run_ranks(fn, 3)[1][0]
    assert inputs_alive == 0
    # The gradient of microbatch 0 proves that its output arrived; up to four later sends may be
    # under way, whose memory the transport still reads.
    assert outputs_alive <= 4


@pytest.mark.parametrize("generate", [forward_then_backward, one_f_one_b])
def test_a_rank_killed_mid_step_gives_named_errors_in_seconds(generate):
    def fn(rank, world_size):
        weight = torch.ones(WIDTH, requires_grad=True)
        calls = []

        def stage(x, *, target):
            calls.append(1)
            if rank == 2 and len(calls) == 3:
                os.kill(os.getpid(), 9)
            y = x * weight
            return StageOutput(loss=y.sum()) if rank == 3 else StageOutput(tensors=(y,))

        executor = PipelineExecutor(stage, generate(4, 8), stage_index=rank)
        # The error ends this rank's process, upon which its other neighbour fails in turn.
        executor.step([(torch.ones(WIDTH),)] * 8 if rank == 0 else None)

    outcomes = collect_ranks(fn, 4, timeout_s=60)
    assert outcomes[2].error_type == "Died"
    for rank in (0, 1, 3):
        assert outcomes[rank].error_type == StageTransferError.__name__, outcomes[rank].error
        last = outcomes[rank].error.strip().splitlines()[-1]
        assert f"StageTransferError: rank {rank}, stage {rank}: " in last
        assert "of schedule" in last and "failed: " in last
        assert outcomes[rank].elapsed_s < 20


def test_an_error_inside_a_stage_keeps_its_type_and_names_the_action():
    def stage(x, *, target):
        raise KeyError("mine")

    executor = PipelineExecutor(stage, one_f_one_b(1, 2), stage_index=0)
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
    executor = PipelineExecutor(constant(output), one_f_one_b(1, 1), stage_index=0)
    with pytest.raises(error, match=words):
        executor.step([()])


def test_wrong_numbers_of_inputs_and_targets_are_refused():
    executor = PipelineExecutor(constant(StageOutput()), one_f_one_b(1, 3), stage_index=0)
    with pytest.raises(ValueError, match="has 3 microbatches; the first stage got none inputs"):
        executor.step()
    with pytest.raises(ValueError, match="the first stage got 2 inputs"):
        executor.step([(), ()])
    with pytest.raises(ValueError, match="stage 0 got 1 targets"):
        executor.step([(), (), ()], [None])


def test_schedules_that_fail_the_check_are_refused():
    schedule = one_f_one_b(1, 2)
    wrong = replace(schedule, ranks=(schedule.ranks[0][1:],))
    with pytest.raises(ScheduleError, match="0F0 occurs 0 times"):
        PipelineExecutor(constant(StageOutput()), wrong, stage_index=0)


def test_stage_index_must_fit_schedule_and_groups():
    with pytest.raises(ValueError, match=r"stage_index=3 is not in schedule 1f1b.*stages 0\.\.0"):
        PipelineExecutor(constant(StageOutput()), one_f_one_b(1, 2), stage_index=3)

    def fn(rank, world_size):
        with pytest.raises(ValueError, match="forward_group has 2 ranks and this is rank"):
            PipelineExecutor(constant(StageOutput()), one_f_one_b(2, 2), stage_index=1 - rank)
        with pytest.raises(ValueError, match="the schedule has 3 stages"):
            PipelineExecutor(constant(StageOutput()), one_f_one_b(3, 2), stage_index=rank)

    run_ranks(fn, 2)
