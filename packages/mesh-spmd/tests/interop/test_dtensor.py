"""DTensors of torch, FSDP2 and tensor parallelism: whole tensors are the oracle."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_spmd import FlatSpec, MeshTypeError, MeshValueError, ProcessMesh, Spec, TensorSpec
from mesh_spmd.interop.dtensor import from_dtensor, redistribute, tensor_spec_of, to_dtensor
from ranktest import run_ranks

SQUARE = ProcessMesh((2, 2), ("dp", "tp"))
KINDS = (Replicate(), Shard(0), Shard(1))


def whole_of(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)


def test_parameters_of_fsdp2_over_tensor_parallelism_are_boxes_and_move_to_any_layout() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[str, ...]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12)).double()
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        mesh = SQUARE.to_device_mesh("cpu")
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        for name, parameter in model.named_parameters():
            local, spec = from_dtensor(parameter)  # type: ignore[arg-type]
            box = spec.box(rank)
            assert torch.equal(local, whole[name][box.slices()]), name
            again = to_dtensor(local, spec, mesh)
            assert again.placements == parameter.placements, name  # type: ignore[attr-defined]
            moved = redistribute(again, Spec.from_axes(SQUARE, {"tp": Shard(0)}))
            assert torch.equal(moved.full_tensor(), whole[name]), name
        strided = tensor_spec_of(model[0].weight).spec  # type: ignore[arg-type]
        assert isinstance(strided, Spec)
        return [strided.order]

    assert run_ranks(fn, 4) == [[("tp", "dp")]] * 4


def test_every_layout_goes_to_a_dtensor_and_back_and_to_every_other_one() -> None:
    """3 axes of 2 ranks; even dims with every nesting of two axes, uneven dims without."""
    mesh = ProcessMesh((2, 1, 2), ("dp", "one", "tp"))

    def layouts(rows: int) -> list[Spec]:
        found = []
        for dp, tp in product(KINDS, KINDS):
            placements = {"dp": dp, "tp": tp, "one": Shard(0)}
            found.append(Spec.from_axes(mesh, placements))
            if dp == tp == Shard(1) or (dp == tp == Shard(0) and rows % 4 == 0):
                found.append(Spec.from_axes(mesh, placements, order=("tp", "dp")))
        return found

    def fn(rank: int, world_size: int) -> None:
        device_mesh = mesh.to_device_mesh("cpu")
        for rows in (8, 7, 1):
            whole = whole_of(rows, 12)
            specs = layouts(rows)
            for number, layout in enumerate(specs):
                spec = TensorSpec((rows, 12), torch.float64, layout)
                local = whole[spec.box(rank).slices()].clone()
                dtensor = to_dtensor(local, spec, device_mesh)
                assert torch.equal(dtensor.full_tensor(), whole), layout
                back, found = from_dtensor(dtensor)
                assert torch.equal(back, local)
                assert found.box(rank) == spec.box(rank), layout
                target = specs[(number + 3) % len(specs)]
                assert torch.equal(redistribute(dtensor, target).full_tensor(), whole)

    run_ranks(fn, 4)


def test_torchs_own_distribution_is_read_as_what_it_holds() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = SQUARE.to_device_mesh("cpu")
        for rows in (8, 5):
            whole = whole_of(rows, 6)
            for placements in product(KINDS, KINDS):
                dtensor = distribute_tensor(whole, mesh, list(placements))
                local, spec = from_dtensor(dtensor)
                assert torch.equal(local, whole[spec.box(rank).slices()]), (rows, placements)
        columns = distribute_tensor(whole_of(8, 6), mesh["tp"], [Shard(1)])
        assert tensor_spec_of(columns).mesh == SQUARE.submesh("tp", of=rank)

    run_ranks(fn, 4)


def test_gradients_of_a_redistribution_are_torchs() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = SQUARE.to_device_mesh("cpu")
        weight = whole_of(8, 6).sin()

        def gradient(move: Any, placements: list[Any]) -> torch.Tensor:
            torch.manual_seed(rank)
            local = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
            moved = move(DTensor.from_local(local, mesh, placements, run_check=False))
            (moved * distribute_tensor(weight, mesh, moved.placements)).sum().backward()
            assert local.grad is not None
            return local.grad

        target = Spec.from_axes(SQUARE, {"dp": Shard(1), "tp": Shard(0)})
        for placements in ([Shard(0), Replicate()], [Shard(0), Partial()]):
            ours = gradient(lambda x: redistribute(x, target), placements)
            torchs = gradient(lambda x: x.redistribute(mesh, target.placements), placements)
            assert torch.allclose(ours, torchs)

    run_ranks(fn, 4)


def test_ranks_outside_a_smaller_mesh_are_not_waited_for() -> None:
    """One pipeline stage moves a tensor, the other one has none."""
    whole = whole_of(8, 6)
    mesh = ProcessMesh((2, 1, 2), ("pp", "dp", "tp"))

    def fn(rank: int, world_size: int) -> None:
        device_mesh = mesh.to_device_mesh("cpu")
        if rank // 2:
            return
        columns = distribute_tensor(whole, device_mesh["tp"], [Shard(1)])
        rows = redistribute(columns, Spec(mesh.submesh("tp", of=rank), (Shard(0),)))
        assert torch.equal(rows.to_local(), whole[4 * rank : 4 * rank + 4])
        stage, spec = (
            device_mesh["dp", "tp"],
            Spec.from_axes(mesh.submesh("dp", "tp", of=rank), {"tp": Shard(0)}),
        )
        held = to_dtensor(rows.to_local(), TensorSpec((8, 6), torch.float64, spec), stage)
        target = Spec.from_axes(spec.mesh, {})
        with pytest.raises(MeshValueError, match=r"holds 2 of the 4 ranks .* give group="):
            redistribute(held, target)
        moved = redistribute(held, target, group=device_mesh.get_group("tp"))
        assert torch.equal(moved.to_local(), whole)

    run_ranks(fn, 4)


def test_strides_are_those_of_the_part() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = ProcessMesh((2,), ("dp",))
        device_mesh = mesh.to_device_mesh("cpu")
        spec = TensorSpec((8, 3, 2), torch.float32, Spec(mesh, (Shard(0),)))
        for dims in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            there = [dims.index(dim) for dim in range(3)]
            whole = torch.arange(48.0).view([(8, 3, 2)[d] for d in dims]).permute(there)
            local = whole[4 * rank : 4 * rank + 4].permute(dims).contiguous().permute(there)
            found = to_dtensor(local, spec, device_mesh)
            assert found.stride() == whole.stride(), dims
            assert torch.equal(found.flatten().full_tensor(), whole.flatten()), dims

    run_ranks(fn, 2)


def test_what_has_no_dtensor_is_refused_before_anything_moves() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = SQUARE.to_device_mesh("cpu")
        rows = Spec.from_axes(SQUARE, {"dp": Shard(0)})
        good = TensorSpec((8, 6), torch.float64, rows)
        local = torch.zeros(4, 6, dtype=torch.float64)
        ragged = Spec.from_axes(SQUARE, {"dp": Shard(0)}, sizes={"dp": (4, 4)})
        nested = Spec.from_axes(SQUARE, {"dp": Shard(0), "tp": Shard(0)}, order=("tp", "dp"))
        with pytest.raises(MeshValueError, match=r"ragged parts \(along dp\)"):
            to_dtensor(local, TensorSpec((8, 6), torch.float64, ragged), mesh)
        with pytest.raises(MeshTypeError, match="FlatSpec has no DTensor"):
            to_dtensor(local, TensorSpec((8, 6), torch.float64, FlatSpec(rows, ("tp",))), mesh)
        with pytest.raises(MeshValueError, match=r"dim 0 of 6 .* into 4 equal parts"):
            to_dtensor(local, TensorSpec((6, 6), torch.float64, nested), mesh)
        with pytest.raises(MeshValueError, match=r"holds torch.float64 of shape \(4, 6\)"):
            to_dtensor(local[:3], good, mesh)
        with pytest.raises(MeshValueError, match="give the DeviceMesh of the same axes"):
            to_dtensor(local, good, mesh["dp"])
        with pytest.raises(MeshTypeError, match="tensor_spec_of needs torch's DTensor"):
            tensor_spec_of(local)  # type: ignore[arg-type]
        odd = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=3), Shard(0)])
        with pytest.raises(MeshValueError, match=r"no order of the axes dp, tp .* \[3, 1\]"):
            tensor_spec_of(odd)
        held = to_dtensor(local, good, mesh)
        half = SQUARE.submesh("tp", of={"dp": 0})
        with pytest.raises(MeshValueError, match="give the DeviceMesh of the same axes"):
            redistribute(held, Spec(half, (Replicate(),)))
        unnamed = DTensor.from_local(local, DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)])
        with pytest.raises(MeshValueError, match="without axis names"):
            tensor_spec_of(unnamed)

    run_ranks(fn, 4)
