import itertools
import random
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from ranktest import run_ranks
from unified_ckpt import load, read_index, save, verify_checkpoint
from unified_ckpt.errors import SaveArgumentError
from unified_ckpt.geometry.layouts.dtensor import dtensor_shards
from unified_ckpt.geometry.tensors.memory import narrow_box


def test_boxes_of_random_dtensors_are_what_they_hold(tmp_path: Path) -> None:
    """Oracle: torch's own distribute_tensor of a tensor that names its elements."""
    seed = random.randrange(2**32)

    def fn(rank: int, world_size: int) -> None:
        rng = random.Random(seed)
        for mesh_shape in [(4,), (2, 2), (1, 4)]:
            mesh = init_device_mesh("cpu", mesh_shape)
            for _ in range(12):
                shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 3)))
                whole = torch.arange(torch.Size(shape).numel()).view(shape)
                kinds = [Replicate(), *(Shard(d) for d in range(len(shape)))]
                placements = [rng.choice(kinds) for _ in mesh_shape]
                distributed = distribute_tensor(whole, mesh, placements)
                case = f"seed {seed}: {shape} {placements} on {mesh_shape}"
                for shard in dtensor_shards("w", distributed):
                    held = narrow_box(whole, shard.box.offset, tuple(shard.tensor.shape))
                    assert torch.equal(shard.tensor, held), case
                held_numel = sum(s.tensor.numel() for s in dtensor_shards("w", distributed))
                assert held_numel == distributed.to_local().numel(), case

    run_ranks(fn, 4)


def test_strided_shards_are_boxes_of_several_runs() -> None:
    """Uneven too: rows of tensor-parallel parts, cut again by FSDP, by hand."""

    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_coordinate()
        for length in (8, 7, 5, 3, 1):
            parts = torch.arange(length).chunk(2)
            mine = parts[tp].chunk(2) if tp < len(parts) else ()
            rows = mine[dp] if dp < len(mine) else torch.zeros(0, dtype=torch.int64)
            tensor = DTensor.from_local(
                rows, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False,
                shape=torch.Size([length]), stride=(1,),
            )  # fmt: skip
            found = [
                n
                for s in dtensor_shards("w", tensor)
                for n in range(s.box.offset[0], s.box.offset[0] + len(s.tensor))
            ]
            assert found == rows.tolist(), (length, dp, tp)
        lone = DTensor.from_local(
            torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]][dp]), mesh,
            [_StridedShard(0, split_factor=2), Replicate()], run_check=False,
            shape=torch.Size([8]), stride=(1,),
        )  # fmt: skip
        shards = dtensor_shards("w", lone)
        assert [s.box.offset for s in shards] == [(2 * dp,), (4 + 2 * dp,)]
        assert [s.tensor.tolist() for s in shards] == lone.to_local().view(2, 2).tolist()

    run_ranks(fn, 4)


def test_partial_values_and_wrong_local_shapes_are_refused(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"'w': DTensor .*Partial.*redistribute\(\)"):
            save({"model": {"w": partial}}, checkpoint_id=tmp_path / "c")
        lying = DTensor.from_local(
            torch.ones(3), mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,), run_check=False
        )
        with pytest.raises(ValueError, match=r"local tensor has shape \(3,\).*give this rank \(2,"):
            dtensor_shards("w", lying)

    run_ranks(fn, 2)


def test_ranks_off_the_mesh_hold_nothing(tmp_path: Path) -> None:
    whole = torch.arange(6.0)

    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
        sub = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 2])
        held = distribute_tensor(whole, sub, [Shard(0)])
        save({"model": {"w": held}}, checkpoint_id=tmp_path / "c")
        back = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
        load({"model": {"w": back}}, checkpoint_id=tmp_path / "c")
        assert torch.equal(back.full_tensor(), whole)

    run_ranks(fn, 3)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def test_fsdp_states_move_between_meshes_and_to_one_rank(tmp_path: Path) -> None:
    """Stage 3 with AdamW: uneven rows, moments included, against the unsharded run."""
    plain = _model()
    reference = torch.optim.AdamW(plain.named_parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()

    train(plain, reference, 2)

    def fn(rank: int, world_size: int) -> None:
        model = _model()
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        if world_size == 3:
            train(model, optimizer, 2)
            save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
            return
        load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
        for name, parameter in model.named_parameters():
            moments = optimizer.state[parameter]
            stored = {}
            for key, tensor in {"": parameter, "/moment1": moments["exp_avg"]}.items():
                stored[key] = tensor.detach().full_tensor()
            part = {
                "model": {name: stored[""] * 0},
                "optimizer": {f"{name}/moment1": stored[""] * 0},
            }
            load(part, checkpoint_id=tmp_path / "c")
            assert torch.equal(stored[""], part["model"][name])
            assert torch.equal(stored["/moment1"], part["optimizer"][f"{name}/moment1"])
            assert moments["step"].item() == 2
        dist.barrier()

    run_ranks(fn, 3)
    assert verify_checkpoint(tmp_path / "c").problems == ()
    run_ranks(fn, 2)
    names = [f"{layer}.{name}" for layer, name in itertools.product("01", ("weight", "bias"))]
    assert set(read_index(tmp_path / "c")) == set(names)
    fresh = _model()
    optimizer = torch.optim.AdamW(fresh.named_parameters(), lr=0.5)
    load({"model": fresh, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    assert optimizer.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(fresh.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    train(fresh, optimizer, 1)
    train(plain, reference, 1)
    for mine, theirs in zip(fresh.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_local_tensors_that_are_made_of_others_are_right_under_another_layout(
    tmp_path: Path,
) -> None:
    a, b = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(6, 4) * -1

    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))

        def distributed(scale: float, dim: int) -> DTensor:
            halves = [(t * scale).chunk(2, dim)[rank].contiguous() for t in (a, b)]
            return DTensor.from_local(TwoTensor(*halves), mesh, [Shard(dim)], run_check=False)

        save({"model": {"w": distributed(1, 0)}}, checkpoint_id=tmp_path / "c")
        back = distributed(0, 1)
        load({"model": {"w": back}}, checkpoint_id=tmp_path / "c")
        for found, want in ((back.to_local().a, a), (back.to_local().b, b)):
            assert torch.equal(found, want.chunk(2, 1)[rank])

    run_ranks(fn, 2)
    assert set(read_index(tmp_path / "c")) == {"w.a", "w.b"}


def test_local_tensors_with_parts_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    class Scaled(torch.Tensor):
        @staticmethod
        def __new__(cls, data, scale):
            return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

        def __init__(self, data, scale):
            self.data_, self.scale = data, scale

        def __tensor_flatten__(self):
            return ["data_", "scale"], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, stride):
            return Scaled(**inner)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return cls(args[0].data_, args[0].scale)

    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        local = Scaled(torch.zeros(2, 4), torch.ones(2))
        w = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 4]), stride=(4, 1)
        )
        with pytest.raises(SaveArgumentError, match=r"'w': .* Scaled .* 'scale' of shape \(2,\)"):
            save({"model": {"w": w}}, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
