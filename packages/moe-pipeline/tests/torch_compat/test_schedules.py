import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.torch_compat.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from ranktest import run_ranks

# Older ones run stages on the meta device, where tokens cannot be routed, and split batches again.
needs_torch_of_now = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="torch's own side of this comparison works as written from 2.15 on",
)
WIDTH = 4
CONFIG = MoEConfig(hidden_size=WIDTH, moe_intermediate_size=3, num_experts=4, num_experts_per_tok=2)
# Torch's names, and which of two ranks each of its stages is on.
LOOP, FOLD, PLAIN = (0, 1, 0, 1), (0, 1, 1, 0), (0, 1)
TORCHS = {
    "GPipe": PLAIN,
    "1F1B": PLAIN,
    "Interleaved1F1B": LOOP,
    "LoopedBFS": LOOP,
    "InterleavedZeroBubble": LOOP,
    "ZBVZeroBubble": FOLD,
    "DualPipeV": FOLD,
}
OURS = {"zb_1p": PLAIN, "ZB_2P": PLAIN, "v_half": FOLD, "v_min": FOLD, "looped_bfs": LOOP}


class Block(nn.Module):
    def __init__(self, has_experts):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.experts = MoELayer(CONFIG, dtype=torch.float64) if has_experts else None

    def forward(self, x, *, gain=None):
        if self.experts is not None:
            x = x + self.experts(x).hidden
        x = torch.tanh(self.linear(x))
        return x if gain is None else x * gain


class Routed(MoELayer):
    def forward(self, x):
        return super().forward(x).hidden


def blocks(seed, count):
    torch.manual_seed(seed)
    return [Block(has_experts=i % 2 == 0) for i in range(count)]


def data(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, target, torch.rand(rows, 1, generator=generator, dtype=torch.float64)


def loss_fn(output, target, weight=1.0):
    return weight * F.mse_loss(output, target)


def made(maker, name, places, rank, modules, *, microbatches, **options):
    """A schedule of torch's or ours on this rank; the stages are made anew."""
    stages = [
        PipelineStage(modules[i], i, len(places), torch.device("cpu"))
        for i, place in enumerate(places)
        if place == rank
    ]
    kind = maker(name)
    if issubclass(kind, PipelineScheduleSingle | torch_schedules.PipelineScheduleSingle):
        return kind(stages[0], microbatches, loss_fn=loss_fn, **options)
    return kind(stages, microbatches, loss_fn=loss_fn, **options)


def stepped(schedule, places, rank, batch, **options):
    """Losses of the microbatches and the merged output, as this rank has them."""
    x, target, _ = batch
    losses = []
    has_last = places[-1] == rank
    output = schedule.step(
        *((x,) if rank == 0 else ()),
        target=target if has_last else None,
        losses=losses if has_last else None,
        **options,
    )
    return [loss.item() for loss in losses], None if output is None else output.tolist()


def gradients(modules, places, rank):
    return [
        None if p.grad is None else p.grad.tolist()
        for module, place in zip(modules, places, strict=True)
        if place == rank
        for p in module.parameters()
    ]


def close(a, b):
    if a is None or b is None:
        return a is None and b is None
    a, b = torch.tensor(a), torch.tensor(b)
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)


def all_close(found, expected):
    return all(close(a, b) for a, b in zip(found, expected, strict=True))


@needs_torch_of_now
def test_every_schedule_of_torch_gives_its_losses_outputs_and_gradients(seed):
    """With and without scaling, and fusion; a mixture of experts in every second stage."""
    batch = data(seed, 16)

    def fn(rank, world_size):
        results = {}
        for number, (name, places) in enumerate(TORCHS.items()):
            sides = []
            for maker in (torch_schedules.get_schedule_class, get_schedule_class):
                modules = blocks(seed, len(places))
                options = {"scale_grads": number % 2 == 0}
                if maker is get_schedule_class:
                    options["executor_options"] = ExecutorOptions(
                        gradient_accumulation_fusion=number % 3 == 0
                    )
                schedule = made(maker, name, places, rank, modules, microbatches=4, **options)
                got = stepped(schedule, places, rank, batch, loss_kwargs={"weight": 2.0})
                sides.append((*got, gradients(modules, places, rank)))
            results[name] = sides
        return results

    for results in run_ranks(fn, 2, timeout_s=120):
        for name, (theirs, ours) in results.items():
            assert close(ours[0], theirs[0]), name
            assert close(ours[1], theirs[1]), name
            assert all_close(ours[2], theirs[2]), name


def without_pipeline(seed, count, batch, microbatches):
    x, target, _ = batch
    modules, losses = blocks(seed, count), []
    pieces = zip(x.tensor_split(microbatches), target.tensor_split(microbatches), strict=True)
    for hidden, want in pieces:
        for module in modules:
            hidden = module(hidden)
        losses.append(loss_fn(hidden, want))
        (losses[-1] / microbatches).backward()
    return [loss.item() for loss in losses], modules


def test_microbatches_that_torch_refuses_and_uneven_ones_equal_one_process(seed):
    """3 microbatches of 10 rows: of 4, 3 and 3. Torch refuses the count for some schedules."""
    batch = data(seed, 10)

    def fn(rank, world_size):
        results, refused = {}, []
        for name, places in (TORCHS | OURS).items():
            modules = blocks(seed, len(places))
            if name in TORCHS:
                try:
                    made(
                        torch_schedules.get_schedule_class,
                        name,
                        places,
                        rank,
                        modules,
                        microbatches=3,
                    )
                except ValueError:
                    refused.append(name)
            schedule = made(get_schedule_class, name, places, rank, modules, microbatches=3)
            got = stepped(schedule, places, rank, batch)
            results[name] = (*got, gradients(modules, places, rank))
        return results, refused

    ranks = run_ranks(fn, 2, timeout_s=120)
    assert "DualPipeV" in ranks[0][1]
    for name, places in (TORCHS | OURS).items():
        losses, modules = without_pipeline(seed, len(places), batch, 3)
        for rank, (results, _) in enumerate(ranks):
            got = results[name]
            if places[-1] == rank:
                assert close(got[0], losses), name
                assert len(got[1]) == 10
            else:
                assert got[:2] == ([], None)
            assert all_close(got[2], gradients(modules, places, rank)), name


@needs_torch_of_now
def test_eval_pre_split_batches_and_keywords_of_a_stage_work_as_in_torch(seed):
    x, target, gain = data(seed, 8)

    def fn(rank, world_size):
        sides = []
        for maker in (torch_schedules.get_schedule_class, get_schedule_class):
            modules = blocks(seed, 2)
            schedule = made(maker, "1F1B", PLAIN, rank, modules, microbatches=4)
            evaluated = []
            with torch.no_grad():
                if rank == 0:
                    none = schedule.eval(x, finalize_gradients=False)
                    schedule.eval(x)
                else:
                    none = schedule.eval(target=target, losses=evaluated, gain=gain)
                    named = {"losses": [], "loss_kwargs": {"weight": 3.0}, "return_outputs": False}
                    assert schedule.eval(target=target, gain=gain, **named) is None
                    evaluated += named["losses"]
            losses = []
            if rank == 0:
                schedule.step(arg_mbs=[(c,) for c in x.chunk(4)])
                output = None
            else:
                output = schedule.step(
                    kwarg_mbs=[{"gain": g} for g in gain.chunk(4)],
                    target_mbs=list(target.chunk(4)),
                    losses=losses,
                )
            sides.append(
                (
                    None if none is None else none.tolist(),
                    [loss.item() for loss in evaluated + losses],
                    None if output is None else output.tolist(),
                    gradients(modules, PLAIN, rank),
                )
            )
        return sides

    for theirs, ours in run_ranks(fn, 2):
        assert all_close(ours[:3], theirs[:3])
        assert all_close(ours[3], theirs[3])


def alone(module, name="1F1B", **options):
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    return get_schedule_class(name)(stage, 2, **options)


def test_steps_accumulate_and_only_the_new_gradients_are_scaled(seed):
    x, target, _ = data(seed, 6)

    def fn(rank, world_size):
        (module,) = blocks(seed, 1)
        expected = copy.deepcopy(module)
        schedule = alone(module, loss_fn=loss_fn)
        for _ in range(2):
            output = schedule.step(x, target=target)
            for x_m, target_m in zip(x.chunk(2), target.chunk(2), strict=True):
                (loss_fn(expected(x_m), target_m) / 2).backward()
        assert not output.requires_grad
        assert schedule.step(x, target=target, return_outputs=False) is None
        for x_m, target_m in zip(x.chunk(2), target.chunk(2), strict=True):
            (loss_fn(expected(x_m), target_m) / 2).backward()
        for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)

    run_ranks(fn, 1)


def test_steps_accumulate_where_experts_write_gradients_into_memory_that_they_keep(seed):
    """What a step puts aside lies in that memory."""
    options = ExpertsOptions(gradient_accumulation_fusion=True)
    x, target, _ = data(seed, 6)

    def fn(rank, world_size):
        torch.manual_seed(seed)
        module = Routed(dataclasses.replace(CONFIG, experts=options), dtype=torch.float64)
        expected = Routed(CONFIG, dtype=torch.float64)
        expected.load_state_dict(module.state_dict())
        schedule = alone(module, loss_fn=loss_fn)
        for _ in range(3):
            schedule.step(x, target=target)
            for x_m, target_m in zip(x.chunk(2), target.chunk(2), strict=True):
                (loss_fn(expected(x_m), target_m) / 2).backward()
            for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)

    run_ranks(fn, 1)


def test_a_failed_step_leaves_earlier_gradients_as_they_were():
    def fn(rank, world_size):
        module = nn.Linear(2, 2)
        schedule = alone(module, loss_fn=lambda output, target: output.sum())
        schedule.step(torch.ones(2, 2), target=torch.ones(2))
        before = [p.grad.clone() for p in module.parameters()]
        with pytest.raises(RuntimeError):
            schedule.step(torch.ones(2, 3), target=torch.ones(2))
        after = [p.grad for p in module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

    run_ranks(fn, 1)


def test_a_failed_step_leaves_no_gradients_where_there_were_none():
    def fn(rank, world_size):
        module, losses = nn.Linear(2, 2), []

        def fails_late(output, target):
            losses.append(output)
            if len(losses) == 2:
                raise KeyError("mine")
            return output.sum()

        schedule = alone(module, loss_fn=fails_late)
        with pytest.raises(KeyError):
            schedule.step(torch.ones(2, 2), target=torch.ones(2))
        assert [p.grad for p in module.parameters()] == [None, None]

    run_ranks(fn, 1)


def test_a_stage_may_add_an_auxiliary_loss():
    def fn(rank, world_size):
        weight = nn.Parameter(torch.ones(2))

        class WithLoss(nn.Module):
            def forward(self, x):
                return StageOutput(tensors=(x * weight,), loss=3 * weight.sum())

        losses = []
        schedule = alone(WithLoss(), loss_fn=lambda y, t: y.sum(), scale_grads=False)
        output = schedule.step(torch.ones(4, 2), target=torch.ones(4), losses=losses)
        assert output.shape == (4, 2)
        assert [loss.item() for loss in losses] == [4.0, 4.0]
        assert weight.grad.tolist() == [10.0, 10.0]

    run_ranks(fn, 1)


def test_losses_that_nothing_would_fill_are_refused_before_the_step():
    def fn(rank, world_size):
        with pytest.raises(ValueError, match=r"losses= has nothing .*loss_fn"):
            alone(nn.Linear(2, 2)).step(torch.ones(4, 2), losses=[])
        with pytest.raises(ValueError, match=r"losses= has nothing .*target="):
            alone(nn.Linear(2, 2), loss_fn=loss_fn).eval(torch.ones(4, 2), losses=[])

    run_ranks(fn, 1)


def test_names_are_found_in_any_case_and_tell_the_kind():
    for name, places in TORCHS.items():
        theirs = torch_schedules.get_schedule_class(name.upper())
        base = PipelineScheduleSingle if places is PLAIN else PipelineScheduleMulti
        assert issubclass(get_schedule_class(name.upper()), base), theirs
        assert issubclass(theirs, torch_schedules.PipelineScheduleSingle) == (places is PLAIN)
    assert get_schedule_class("gpipe") is get_schedule_class("GPipe")
    assert issubclass(get_schedule_class("1f1b"), PipelineScheduleSingle)
    assert issubclass(get_schedule_class("dualpipev"), PipelineScheduleMulti)
    assert get_schedule_class("PipelineScheduleMulti") is PipelineScheduleMulti
    with pytest.raises(ValueError, match=r"unknown schedule 'pipedream'; expected one of .*GPipe"):
        get_schedule_class("pipedream")


def test_builders_of_torch_find_the_classes_that_they_ask_for():
    """What torchtitan's builder asks, with get_schedule_class swapped and no more."""
    v_style = (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV)
    for name, places in TORCHS.items():
        kind = get_schedule_class(name)
        multi, single = (
            issubclass(kind, torch_schedules.PipelineScheduleMulti),
            issubclass(kind, torch_schedules.PipelineScheduleSingle),
        )
        assert (multi, single) == (places is not PLAIN, places is PLAIN), name
        assert (kind in v_style) == (places is FOLD), name
        assert len({kind, get_schedule_class(name.lower())}) == 1
    assert get_schedule_class("v_half") not in v_style
    runtime = get_schedule_class("_PipelineScheduleRuntime")
    assert runtime == torch_schedules._PipelineScheduleRuntime


def test_a_schedule_is_read_from_torchs_csv(tmp_path):
    """By the runtime class, as builders do it; each file gives the gradients of one process."""
    batch = data(1, 6)
    path = tmp_path / "mine.csv"

    def fn(rank, world_size):
        device, modules = torch.device("cpu"), blocks(3, 2)
        stages = [PipelineStage(modules[i], i, 2, device) for i in range(2)]
        kind = get_schedule_class("_PipelineScheduleRuntime")
        schedule = kind(stages, 3, loss_fn=loss_fn, backward_requires_autograd=True)
        with pytest.raises(ValueError, match="call _load_csv before step"):
            schedule.step(batch[0], target=batch[1])
        path.write_text("0F0,0B0\n", encoding="utf-8")
        with pytest.raises(ValueError, match="has 1 microbatches, 1 stages and 1 ranks; this"):
            schedule._load_csv(str(path))
        with pytest.raises(ValueError, match="format='comms' is neither compute_only nor"):
            schedule._load_csv(str(path), format="comms")
        row = "0F0,1F0,1B0,0F1,1F1,0B0,1B1,0B1,0F2,1F2,1B2,0B2"
        path.write_text(row + "\n", encoding="utf-8")
        schedule._load_csv(str(path))
        losses = []
        schedule.step(batch[0], target=batch[1], losses=losses)
        expected_losses, expected = without_pipeline(3, 2, batch, 3)
        assert close([loss.item() for loss in losses], expected_losses)
        assert all_close(gradients(modules, (0, 0), 0), gradients(expected, (0, 0), 0))

    run_ranks(fn, 1)


def test_mistakes_are_told_before_anything_runs():
    def fn(rank, world_size):
        module, device = nn.Linear(2, 2), torch.device("cpu")
        with pytest.raises(TypeError, match="no argument recompute; leave it out"):
            alone(module, recompute=True)
        with pytest.raises(ValueError, match="defer_pp_recv=True steers torch's own runtime"):
            alone(module, defer_pp_recv=True)
        with pytest.raises(TypeError, match="is a base class"):
            alone(module, "PipelineScheduleSingle")
        with pytest.raises(TypeError, match="a Linear has no submod"):
            get_schedule_class("GPipe")(module, 2)
        with pytest.raises(TypeError, match="give a list of this rank's stages"):
            get_schedule_class("DualPipeV")(PipelineStage(module, 0, 1, device), 2)
        with pytest.raises(ValueError, match=r"stage 0 is in Distributed.*static_graph out"):
            alone(DistributedDataParallel(module, static_graph=True))
        with pytest.raises(ValueError, match="has 2 stages on 1 ranks, but the pipeline has 1"):
            get_schedule_class("zbv")([PipelineStage(module, 0, 1, device)], 2)
        schedule = alone(module, loss_fn=loss_fn)
        x = torch.ones(2, 2)
        with pytest.raises(ValueError, match="give it target="):
            schedule.step(x)
        with pytest.raises(ValueError, match="call eval"), torch.no_grad():
            schedule.step(x, target=x)
        with pytest.raises(ValueError, match="the batch has 1 rows, which do not fill 2"):
            schedule.step(x[:1], target=x)
        with pytest.raises(ValueError, match="target has 1 rows"):
            schedule.step(x, target=x[:1])
        with pytest.raises(ValueError, match="both whole and in microbatches"):
            schedule.step(x, arg_mbs=[(x,), (x,)])
        with pytest.raises(ValueError, match="arg_mbs has 1 entries for 2"):
            schedule.step(arg_mbs=[(x,)])
        with pytest.raises(TypeError, match="arg_mbs must be a list of tuples"):
            schedule.step(arg_mbs=[x, x])

    run_ranks(fn, 1)


def test_stages_that_do_not_divide_over_the_ranks_are_refused():
    def fn(rank, world_size):
        stages = [PipelineStage(nn.Linear(2, 2), rank, 3, torch.device("cpu"))]
        with pytest.raises(ValueError, match="3 stages do not divide evenly over 2 ranks"):
            get_schedule_class("LoopedBFS")(stages, 2)
        dist.barrier()

    run_ranks(fn, 2)
