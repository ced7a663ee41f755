"""Two stages, each on two real ranks that hold it alike (DDP) or in shares (FSDP2)."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.torch_compat.data_parallel import check_wrapper, reduced_once
from moe_pipeline.torch_compat.schedules import PipelineScheduleSingle, get_schedule_class
from ranktest import run_ranks

WIDTH, ROWS = 4, 8
PLACES = {"1F1B": (0, 1), "ZBVZeroBubble": (0, 1, 1, 0), "InterleavedZeroBubble": (0, 1, 0, 1)}
needs_finalize = pytest.mark.skipif(
    "finalize_backward" not in dir(FSDPModule), reason="FSDP2 ends such a backward from torch 2.15"
)


class Block(nn.Module):
    """A stage with a parameter that is not a product's, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(x)))


def blocks(count):
    torch.manual_seed(5)
    return [Block().double() for _ in range(count)]


def ddp(module, mesh):
    return DistributedDataParallel(module, process_group=mesh.get_group("dp"))


def ddp_views(module, mesh):
    return DistributedDataParallel(
        module, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
    )


def ddp_unused(module, mesh):
    return DistributedDataParallel(
        module, process_group=mesh.get_group("dp"), find_unused_parameters=True
    )


def sharded(module, mesh):
    for part in (module.up, module.down):
        fully_shard(part, mesh=mesh["dp"])
    return fully_shard(module, mesh=mesh["dp"])


def batch(turn, dp):
    generator = torch.Generator().manual_seed(10 * turn + dp)
    return torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)


def expected(count, turns):
    """Gradients of all stages in one process, averaged over both shares of the data."""
    modules = blocks(count)
    for turn in range(turns):
        for dp in range(2):
            x, target = batch(turn, dp)
            (F.mse_loss(nn.Sequential(*modules)(x), target) / 2).backward()
    return modules


def gradient_of(parameter):
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def gradients_are_those_of_one_process(name, wrap, mesh, fuses=False, evaluates=False):
    places, pp, dp = PLACES[name], mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    modules = blocks(len(places))
    mine = {i: wrap(modules[i], mesh) for i, place in enumerate(places) if place == pp}
    stages = [
        PipelineStage(m, i, len(places), torch.device("cpu"), group=mesh.get_group("pp"))
        for i, m in mine.items()
    ]
    kind = get_schedule_class(name)
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    options = ExecutorOptions(gradient_accumulation_fusion=fuses)
    schedule = kind(given, 4, loss_fn=F.mse_loss, executor_options=options)
    for turn in range(2):  # the second step adds to the gradients of the first
        x, target = batch(turn, dp)
        last = len(places) - 1 in mine
        given = (x,) if pp == 0 else ()
        if evaluates:
            schedule.eval(*given, target=target if last else None)
        schedule.step(*given, target=target if last else None)
        wanted = expected(len(places), turn + 1)
        for i, module in mine.items():
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            for (what, p), q in zip(inner.named_parameters(), wanted[i].parameters(), strict=True):
                found = gradient_of(p)
                if what == "unused":
                    assert found is None or not found.any(), (name, wrap.__name__)
                else:
                    torch.testing.assert_close(found, q.grad, rtol=0, atol=1e-12)


def test_replicated_stages_have_the_averaged_gradients_of_one_process():
    def fn(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        for name in PLACES:
            for wrap in (ddp, ddp_views, ddp_unused):
                fuses = wrap is ddp_unused
                gradients_are_those_of_one_process(name, wrap, mesh, fuses)

    run_ranks(fn, 4)


@needs_finalize
def test_sharded_stages_have_the_averaged_gradients_of_one_process():
    def fn(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        for name in PLACES:
            for fuses in (False, True):
                gradients_are_those_of_one_process(name, sharded, mesh, fuses)

    run_ranks(fn, 4)


@needs_finalize
def test_an_evaluation_leaves_the_gradients_of_the_next_step_of_sharded_stages_right():
    """After a forward without backward FSDP2 keeps the parameters of its root whole."""

    def fn(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        gradients_are_those_of_one_process("1F1B", sharded, mesh, evaluates=True)

    run_ranks(fn, 4)


@needs_finalize
@pytest.mark.parametrize("fails_at", [1, 2])
def test_sharded_modules_work_on_as_before_after_a_failed_step(fails_at):
    """The first error comes before any forward; the second after a backward."""

    def fn(rank, world_size):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        (expected,), (module,) = blocks(1), blocks(1)
        module = sharded(module, mesh)
        x, target = batch(0, 0)
        params = [p for name, p in module.named_parameters() if name != "unused"]
        for turn in range(3):  # the first without gradients of before
            with pytest.raises(KeyError), reduced_once([module]):
                if fails_at == 2:
                    F.mse_loss(module(x), target).backward()
                raise KeyError("mine")
            if turn == 0:
                assert all(p.grad is None for p in params)
            F.mse_loss(module(x), target).backward()
            F.mse_loss(expected(x), target).backward()
            wanted = [q.grad for name, q in expected.named_parameters() if name != "unused"]
            for p, grad in zip(params, wanted, strict=True):
                torch.testing.assert_close(gradient_of(p), grad, rtol=0, atol=1e-12)

    run_ranks(fn, 2)


def test_wrappers_that_cannot_wait_for_the_end_of_a_step_are_refused():
    def fn(rank, world_size):
        def linear():
            return nn.Linear(2, 2)

        with pytest.raises(TypeError, match="stage 3 is wrapped in FullyShardedDataParallel"):
            check_wrapper(3, FullyShardedDataParallel.__new__(FullyShardedDataParallel))
        with pytest.raises(ValueError, match="leave static_graph out"):
            check_wrapper(0, DistributedDataParallel(linear(), static_graph=True))
        inner = nn.Sequential(DistributedDataParallel(linear()))
        with pytest.raises(TypeError, match="module '0' of stage 1 is wrapped in Distributed"):
            check_wrapper(1, inner)
        dist.barrier()

    run_ranks(fn, 1)
