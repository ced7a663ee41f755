import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # slicing a DeviceMesh imports it: once here, not in each forked rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mesh_spmd import MeshStateError, MeshValueError, ProcessMesh, axis_group
from ranktest import run_ranks


def on_ranks(fn: Callable[[int, int], object], world_size: int) -> list[object]:
    """As `run_ranks`, but no rank ends while another still connects the sockets of a new group."""

    def and_wait(rank: int, world_size: int) -> object:
        value = fn(rank, world_size)
        dist.barrier()
        return value

    return run_ranks(and_wait, world_size)


def test_groups_along_one_and_several_axes_are_those_of_the_plan() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = ProcessMesh((2, 2, 2), ("pp", "dp", "ep"))
        device_mesh = mesh.to_device_mesh("cpu")
        for axes in [("dp", "ep"), ("ep", "pp"), ("ep",), ("pp", "dp", "ep")]:
            group = axis_group(device_mesh, *axes)
            (ranks,) = [ranks for ranks in mesh.groups(*axes) if rank in ranks]
            assert tuple(dist.get_process_group_ranks(group)) == ranks, axes
            assert dist.get_rank(group) == ranks.index(rank), axes
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(ranks), axes
            assert axis_group(device_mesh, *axes) is group
            assert axis_group(device_mesh, *reversed(axes)) is group

    on_ranks(fn, 8)


def test_uneven_axes_and_axes_of_one_rank_have_groups() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = ProcessMesh((1, 3, 2), ("pp", "dp", "ep"))
        device_mesh = mesh.to_device_mesh("cpu")
        assert dist.get_world_size(axis_group(device_mesh, "pp")) == 1
        pair = axis_group(device_mesh, "pp", "ep")
        assert tuple(dist.get_process_group_ranks(pair)) == mesh.submesh("ep", of=rank).ranks
        assert dist.get_world_size(axis_group(device_mesh, "dp", "ep")) == 6

    on_ranks(fn, 6)


def test_a_slice_of_a_mesh_shares_the_groups_of_the_whole() -> None:
    def fn(rank: int, world_size: int) -> None:
        device_mesh = ProcessMesh((1, 2, 2), ("pp", "dp", "ep")).to_device_mesh("cpu")
        part = device_mesh["dp", "ep"]
        assert axis_group(part, "dp", "ep") is axis_group(device_mesh, "dp", "ep")
        assert axis_group(part, "ep") is axis_group(device_mesh, "ep")

    on_ranks(fn, 4)


def test_axis_names_that_flatten_to_the_same_name_keep_their_own_groups() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = ProcessMesh((2, 1, 2, 1), ("a", "b_c", "a_b", "c"))
        device_mesh = mesh.to_device_mesh("cpu")
        for axes in [("a", "b_c"), ("a_b", "c"), ("a", "b_c")]:
            group = axis_group(device_mesh, *axes)
            (ranks,) = [ranks for ranks in mesh.groups(*axes) if rank in ranks]
            assert tuple(dist.get_process_group_ranks(group)) == ranks
        # "x" and "y" flatten to the name of a third axis.
        taken = ProcessMesh((2, 1, 2), ("x", "y", "x_y")).to_device_mesh("cpu")
        assert dist.get_world_size(axis_group(taken, "x", "y")) == 2

    on_ranks(fn, 4)


def test_a_mesh_made_by_torch_is_accepted() -> None:
    def fn(rank: int, world_size: int) -> None:
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert dist.get_world_size(axis_group(device_mesh, "tp", "dp")) == 4

    on_ranks(fn, 4)


def test_questions_without_an_answer_raise_on_every_rank_and_hang_none() -> None:
    def fn(rank: int, world_size: int) -> None:
        whole = ProcessMesh((1, 3), ("dp", "ep")).to_device_mesh("cpu")
        with pytest.raises(MeshValueError, match="unknown axis 'tp'; this mesh has dp, ep"):
            axis_group(whole, "tp")
        with pytest.raises(MeshValueError, match="each once"):
            axis_group(whole, "ep", "ep")
        with pytest.raises(MeshValueError, match="name one or more"):
            axis_group(whole)
        smaller = ProcessMesh((1, 2), ("dp", "ep")).to_device_mesh("cpu")
        if rank == 2:
            with pytest.raises(MeshStateError, match="rank 2 is not in the device mesh"):
                axis_group(smaller, "ep")
        else:
            assert dist.get_world_size(axis_group(smaller, "ep")) == 2
        expected = "rank 2 is not in" if rank == 2 else "the mesh holds 2 of them"
        with pytest.raises(MeshStateError, match=expected):
            axis_group(smaller, "dp", "ep")

    on_ranks(fn, 3)


def test_several_axes_whose_ranks_do_not_ascend_are_refused() -> None:
    def fn(rank: int, world_size: int) -> None:
        device_mesh = ProcessMesh((2, 2), ("dp", "ep"), (0, 2, 1, 3)).to_device_mesh("cpu")
        with pytest.raises(MeshValueError, match=r"\(0, 2, 1, 3\) along dp, ep do not ascend"):
            axis_group(device_mesh, "dp", "ep")

    on_ranks(fn, 4)


def test_groups_over_several_axes_do_not_import_dynamo() -> None:
    code = """
import sys
import torch.distributed as dist
from mesh_spmd import ProcessMesh, axis_group
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device_mesh = ProcessMesh((1, 1), ("dp", "ep")).to_device_mesh("cpu")
assert dist.get_world_size(axis_group(device_mesh, "dp", "ep")) == 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
