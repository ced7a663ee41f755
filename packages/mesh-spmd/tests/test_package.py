from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import mesh_spmd
from mesh_spmd import MeshSpmdError, MeshTypeError, ProcessMesh, Spec, Topology, choose_placements
from mesh_spmd.creation import infer_tensor_spec
from package_facts import (
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(mesh_spmd)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(mesh_spmd, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_the_readme_has_a_line_for_each_file_and_a_row_for_each_name() -> None:
    check_tour(mesh_spmd, README)
    check_name_table(mesh_spmd, README)


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"global_shape": (8, 8)},
        {"global_shape": (8, 8), "mesh": ProcessMesh((2,), ("ep",))},
        {"global_shape": (8, 8), "spec": Spec(ProcessMesh((2,), ("ep",)), (Shard(0),))},
        {"shape": (2,), "offset": (2,), "mesh": ProcessMesh((2,), ("ep",))},
    ],
)
def test_arguments_of_a_wrong_type_are_named_by_an_error_of_the_package(right: dict) -> None:
    takes = {
        "Box": ("shape",),
        "ProcessMesh": ("shape",),
        "Spec": ("mesh",),
        "all_boxes": ("global_shape",),
        "choose_layouts": ("mesh",),
        "choose_placements": ("global_shape", "mesh"),
        "local_box": ("global_shape", "spec"),
        "FlatSpec": ("spec",),
        "TensorSpec": ("shape", "spec"),
        "Plan": (),
        "execute": (),
        "plan_reshard": (),
        "join_tensors": (),
        "reshard_tensor": (),
        "split_tensor": (),
    }
    given = {name: {a: right[a] for a in of if a in right} for name, of in takes.items()}
    assert check_wrong_types(mesh_spmd, MeshSpmdError, given=given, not_called=["Topology"]) == 16


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.coordinate([0]),
        lambda mesh: mesh.rank_at(dp="first", ep=0),
        lambda mesh: mesh.groups(["dp", "ep"]),
        lambda mesh: mesh.submesh("dp", of=[0]),
        lambda mesh: mesh.to_device_mesh(0),
        lambda mesh: ProcessMesh.from_device_mesh(mesh),
        lambda mesh: Spec.from_axes(mesh, Shard(0)),
        lambda mesh: Spec.from_axes((2, 4), {"ep": Shard(0)}),
        lambda mesh: choose_placements((8,), mesh, shard={"ep": "0"}),
        lambda mesh: Topology(ranks_per_node="8"),
        lambda mesh: Topology(ranks_per_node=2.5),
        lambda mesh: Spec.from_dims((2, 4), ["ep"]),
        lambda mesh: Spec.from_dims(mesh, None),
        lambda mesh: Spec.from_dims(mesh, [0]),
        lambda mesh: infer_tensor_spec(dict.fromkeys(range(8), (1,)), torch.int8, mesh, None),
        lambda mesh: Spec.from_axes(mesh, {}, order=3),
    ],
)
def test_methods_name_an_argument_of_a_wrong_type(call) -> None:
    assert not dist.is_initialized()
    with pytest.raises(MeshTypeError):
        call(ProcessMesh((2, 4), ("dp", "ep")))
