import copy
import pickle
import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
import torch._dynamo  # slicing a DeviceMesh imports it: once here, not in each forked rank
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_spmd import MeshSpmdError, MeshStateError, MeshTypeError, MeshValueError, ProcessMesh
from ranktest import run_ranks


def on_ranks(fn: Callable[[int, int], object], world_size: int) -> list[object]:
    """As `run_ranks`, but no rank ends while another still connects the sockets of a new group."""

    def and_wait(rank: int, world_size: int) -> object:
        value = fn(rank, world_size)
        dist.barrier()
        return value

    return run_ranks(and_wait, world_size)


@st.composite
def meshes(draw: st.DrawFn) -> ProcessMesh:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    names = tuple("abcd"[: len(shape)])
    size = int(np.prod(shape))
    ranks = draw(
        st.one_of(st.none(), st.permutations(range(3, 3 + size)), st.permutations(range(size)))
    )
    return ProcessMesh(shape, names, ranks)


@st.composite
def meshes_and_axes(draw: st.DrawFn) -> tuple[ProcessMesh, tuple[str, ...]]:
    mesh = draw(meshes())
    axes = draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    return mesh, tuple(axes)


@given(meshes())
def test_coordinates_are_those_of_a_numpy_array(mesh: ProcessMesh) -> None:
    array = np.array(mesh.ranks).reshape(mesh.shape)
    for index in np.ndindex(*mesh.shape):
        rank = int(array[index])
        coordinate = dict(zip(mesh.axis_names, index, strict=True))
        assert mesh.coordinate(rank) == coordinate
        assert mesh.rank_at(**coordinate) == rank


@given(meshes_and_axes())
def test_groups_are_the_slices_of_a_numpy_array(case: tuple[ProcessMesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    array = np.array(mesh.ranks).reshape(mesh.shape)
    index_of = {axis: i for i, axis in enumerate(mesh.axis_names)}
    last = sorted(index_of[axis] for axis in axes)
    rest = [i for i in range(array.ndim) if i not in last]
    expected = array.transpose(*rest, *last).reshape(
        -1, int(np.prod([array.shape[i] for i in last]))
    )
    assert mesh.groups(*axes) == [tuple(row) for row in expected.tolist()]


@given(meshes_and_axes(), st.randoms())
def test_a_submesh_is_the_slice_through_a_rank(
    case: tuple[ProcessMesh, tuple[str, ...]], chance: random.Random
) -> None:
    mesh, axes = case
    rank = chance.choice(mesh.ranks)
    here = mesh.coordinate(rank)
    fixed = {axis: index for axis, index in here.items() if axis not in axes}
    sub = mesh.submesh(*axes, of=rank)
    assert sub == mesh.submesh(*axes, of=fixed)
    assert sub.axis_names == axes
    assert rank in sub.ranks
    for moving in product(*(range(mesh.axis_size(axis)) for axis in axes)):
        at = dict(zip(axes, moving, strict=True))
        assert sub.rank_at(**at) == mesh.rank_at(**at, **fixed)


def test_ranks_default_to_row_major_order() -> None:
    mesh = ProcessMesh((2, 3), ("dp", "ep"))
    assert mesh.ranks == (0, 1, 2, 3, 4, 5)
    assert mesh.size == 6
    assert mesh.axis_size("ep") == 3
    assert list(mesh.coordinate(5).items()) == [("dp", 1), ("ep", 2)]


def test_equal_meshes_hash_alike_and_survive_copies() -> None:
    mesh = ProcessMesh([2, np.int64(3)], ["dp", "ep"])
    assert mesh == ProcessMesh((2, 3), ("dp", "ep"), range(6))
    assert hash(mesh) == hash(ProcessMesh((2, 3), ("dp", "ep")))
    assert mesh != ProcessMesh((2, 3), ("dp", "tp"))
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh
    assert pickle.loads(pickle.dumps(mesh)).coordinate(5) == {"dp": 1, "ep": 2}


def test_a_mesh_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ProcessMesh((2,), ("ep",)).shape = (3,)  # type: ignore[misc]


def test_repr_names_axes_and_only_unusual_ranks() -> None:
    assert repr(ProcessMesh((2, 4), ("pp", "ep"))) == "ProcessMesh(pp=2, ep=4)"
    assert repr(ProcessMesh((2,), ("ep",), (1, 0))) == "ProcessMesh(ep=2, ranks=(1, 0))"


@pytest.mark.parametrize(
    ("shape", "names", "ranks", "error", "match"),
    [
        ((2, 2), ("dp",), None, MeshValueError, "has 2 axes, but axis_names .* has 1"),
        ((), (), None, MeshValueError, "at least one axis"),
        ((2, 0), ("dp", "ep"), None, MeshValueError, r"mesh shape\[1\] is 0"),
        ((2, -1), ("dp", "ep"), None, MeshValueError, "at least 1"),
        ((2, 2), ("ep", "ep"), None, MeshValueError, "name each axis differently"),
        ((2,), ("",), None, MeshTypeError, "non-empty strings"),
        ((2,), "ep", None, MeshTypeError, r"write \('ep',\) for one axis"),
        ((2,), (3,), None, MeshTypeError, "non-empty strings"),
        ((2.0,), ("ep",), None, MeshTypeError, "integers only"),
        (2, ("ep",), None, MeshTypeError, "sequence of integers"),
        ("2", ("ep",), None, MeshTypeError, "sequence of integers"),
        ((2,), ("ep",), (0,), MeshValueError, "give 2 different ranks"),
        ((2,), ("ep",), (1, 1), MeshValueError, "1 of them different"),
        ((2,), ("ep",), (0, -1), MeshValueError, "at least 0"),
    ],
)
def test_bad_meshes_are_refused(
    shape: object, names: object, ranks: object, error: type[MeshSpmdError], match: str
) -> None:
    with pytest.raises(error, match=match):
        ProcessMesh(shape, names, ranks)  # type: ignore[arg-type]


def test_bad_questions_name_what_the_mesh_has() -> None:
    mesh = ProcessMesh((2, 3), ("dp", "ep"))
    with pytest.raises(ValueError, match="unknown axis 'tp'; this mesh has dp, ep"):
        mesh.axis_size("tp")
    with pytest.raises(ValueError, match=r"rank 6 is not in .* ranks 0 to 5"):
        mesh.coordinate(6)
    with pytest.raises(ValueError, match=r"which holds ranks 1, 4"):
        ProcessMesh((2,), ("ep",), (4, 1)).coordinate(0)
    with pytest.raises(ValueError, match="ep missing"):
        mesh.rank_at(dp=1)
    with pytest.raises(ValueError, match="unknown axis 'tp'"):
        mesh.rank_at(dp=0, ep=0, tp=0)
    with pytest.raises(ValueError, match="index 3 is outside axis 'ep' of size 3; give 0 to 2"):
        mesh.rank_at(dp=0, ep=3)
    with pytest.raises(ValueError, match="index -1"):
        mesh.rank_at(dp=0, ep=-1)


def test_bad_axes_of_groups_and_submeshes_are_refused() -> None:
    mesh = ProcessMesh((2, 3), ("dp", "ep"))
    with pytest.raises(ValueError, match="name one or more of dp, ep"):
        mesh.groups()
    with pytest.raises(ValueError, match="each once"):
        mesh.groups("ep", "ep")
    with pytest.raises(ValueError, match=r"exactly the axes \(dp\), but \(\)"):
        mesh.submesh("ep", of={})
    with pytest.raises(ValueError, match=r"exactly the axes \(dp\), but \(dp, ep\)"):
        mesh.submesh("ep", of={"dp": 0, "ep": 1})
    with pytest.raises(ValueError, match="index 2 is outside axis 'dp'"):
        mesh.submesh("ep", of={"dp": 2})


def test_a_device_mesh_needs_a_process_group() -> None:
    with pytest.raises(MeshStateError, match="init_process_group"):
        ProcessMesh((1,), ("ep",)).to_device_mesh("cpu")
    assert not dist.is_initialized()


def test_a_device_mesh_goes_there_and_back_on_real_ranks() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = ProcessMesh((3, 2), ("dp", "ep"))
        device_mesh = mesh.to_device_mesh("cpu")
        assert device_mesh == init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "ep"))
        assert device_mesh.get_coordinate() == tuple(mesh.coordinate(rank).values())
        assert ProcessMesh.from_device_mesh(device_mesh) == mesh
        for axis in mesh.axis_names:
            part = ProcessMesh.from_device_mesh(device_mesh[axis])
            assert part == mesh.submesh(axis, of=rank)
            group = device_mesh.get_group(axis)
            assert tuple(dist.get_process_group_ranks(group)) == part.ranks
            assert dist.get_rank(group) == mesh.coordinate(rank)[axis]

    on_ranks(fn, 6)


def test_transposed_ranks_keep_the_index_along_each_axis() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = ProcessMesh((2, 2), ("dp", "ep"), (0, 2, 1, 3))
        device_mesh = mesh.to_device_mesh("cpu")
        assert ProcessMesh.from_device_mesh(device_mesh) == mesh
        for axis, index in mesh.coordinate(rank).items():
            assert dist.get_rank(device_mesh.get_group(axis)) == index
            total = torch.tensor(rank)
            dist.all_reduce(total, group=device_mesh.get_group(axis))
            assert total.item() == sum(mesh.submesh(axis, of=rank).ranks)

    on_ranks(fn, 4)


def test_ranks_outside_a_smaller_mesh_take_part_in_its_creation() -> None:
    def fn(rank: int, world_size: int) -> object:
        mesh = ProcessMesh((2,), ("ep",), (1, 2))
        device_mesh = mesh.to_device_mesh("cpu")
        assert ProcessMesh.from_device_mesh(device_mesh) == mesh
        return device_mesh.get_coordinate()

    assert on_ranks(fn, 3) == [None, (0,), (1,)]


def test_meshes_that_torch_would_misread_are_refused() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(MeshValueError, match=r"names rank 3, but .* has 2 ranks"):
            ProcessMesh((4,), ("ep",)).to_device_mesh("cpu")
        with pytest.raises(MeshValueError, match="do not ascend"):
            ProcessMesh((2,), ("ep",), (1, 0)).to_device_mesh("cpu")
        with pytest.raises(MeshValueError, match="no index"):
            ProcessMesh((2,), ("ep",)).to_device_mesh("cuda:0")
        nameless = DeviceMesh("cpu", [0, 1])
        with pytest.raises(MeshValueError, match="mesh_dim_names"):
            ProcessMesh.from_device_mesh(nameless)

    on_ranks(fn, 2)


def test_ranks_are_whole_numbers_of_any_kind_and_not_without_end() -> None:
    mesh = ProcessMesh((4,), ("ep",))
    assert mesh.coordinate(torch.tensor(3)) == {"ep": 3}
    with pytest.raises(MeshValueError, match="more than 16777216 ranks"):
        ProcessMesh((10**20,), ("ep",))
