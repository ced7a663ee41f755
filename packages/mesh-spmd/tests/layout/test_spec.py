import itertools
import pickle

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_spmd import (
    FlatSpec,
    MeshTypeError,
    MeshValueError,
    ProcessMesh,
    Spec,
    TensorSpec,
    all_boxes,
    local_box,
)

MESH = ProcessMesh((2, 4), ("dp", "ep"))


def test_axes_that_are_not_named_replicate() -> None:
    spec = Spec.from_axes(MESH, {"ep": Shard(0)})
    assert spec == Spec(MESH, (Replicate(), Shard(0)))
    assert hash(spec) == hash(Spec(MESH, (Replicate(), Shard(0))))
    assert spec.placement("ep") == Shard(0)
    assert spec.placement("dp") == Replicate()


def test_a_list_of_placements_becomes_a_tuple() -> None:
    spec = Spec(MESH, [Shard(1), Partial("max")])  # type: ignore[arg-type]
    assert spec.placements == (Shard(1), Partial("max"))
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_sharded_dims_count_negative_dims_from_the_end() -> None:
    assert Spec(MESH, (Shard(-1), Shard(1))).sharded_dims(3) == (2, 1)
    assert Spec(MESH, (Partial(), Replicate())).sharded_dims(0) == (None, None)


@pytest.mark.parametrize(
    "placement", ["Shard(0)", 0, None, Shard, _StridedShard(0, split_factor=2)]
)
def test_what_is_not_a_box_placement_is_refused(placement: Placement) -> None:
    with pytest.raises(MeshTypeError, match=r"give Shard\(dim\), Replicate\(\) or Partial\(\)"):
        Spec(MESH, (Replicate(), placement))


def test_the_number_of_placements_is_the_number_of_axes() -> None:
    with pytest.raises(MeshValueError, match=r"1 placements .* each of its 2 axes"):
        Spec(MESH, (Shard(0),))


def test_unknown_axes_are_refused() -> None:
    with pytest.raises(MeshValueError, match="unknown axis 'tp'; this mesh has dp, ep"):
        Spec.from_axes(MESH, {"tp": Shard(0)})
    with pytest.raises(MeshValueError, match="unknown axis 'tp'"):
        Spec.from_axes(MESH, {}).placement("tp")


@pytest.mark.parametrize("dim", [2, -3])
def test_dims_that_the_tensor_lacks_are_refused(dim: int) -> None:
    with pytest.raises(MeshValueError, match=f"'ep' shards dim {dim}, but the tensor has 2 dims"):
        Spec.from_axes(MESH, {"ep": Shard(dim)}).sharded_dims(2)


def test_a_scalar_can_only_be_replicated() -> None:
    with pytest.raises(MeshValueError, match="a scalar can only be replicated"):
        Spec.from_axes(MESH, {"ep": Shard(0)}).sharded_dims(0)


def test_order_says_which_axis_on_a_dim_is_outermost() -> None:
    spec = Spec.from_axes(MESH, {"dp": Shard(0), "ep": Shard(0)}, order=("ep", "dp"))
    # ep cuts 10 elements into 3, 3, 3, 1; dp cuts each of these.
    assert [b.slices()[0] for b in all_boxes((10,), spec).values()] == [
        slice(0, 2),
        slice(3, 5),
        slice(6, 8),
        slice(9, 10),
        slice(2, 3),
        slice(5, 6),
        slice(8, 9),
        slice(10, 10),
    ]
    assert Spec.from_dims(MESH, [("ep", "dp")]) == spec
    assert spec.dims_mapping(2) == (("ep", "dp"), ())
    assert Spec.from_axes(MESH, {}, order=("dp", "ep")) == Spec.from_axes(MESH, {})


def test_specs_are_equal_where_axes_nest_alike_on_every_dim() -> None:
    """All placements and orders of three axes; what nests is worked out from the order itself."""
    mesh = ProcessMesh((2, 2, 2), ("a", "b", "c"))
    kinds = (Replicate(), Shard(0), Shard(1), Shard(-1))
    for placements in itertools.product(kinds, repeat=3):
        found: dict[tuple[tuple[str, ...], ...], set[Spec]] = {}
        for order in itertools.permutations(mesh.axis_names):
            spec = Spec(mesh, placements, order)
            dims = dict(zip(mesh.axis_names, spec.sharded_dims(2), strict=True))
            nested = tuple(tuple(axis for axis in order if dims[axis] == dim) for dim in (0, 1))
            assert spec.dims_mapping(2) == nested, spec
            found.setdefault(nested, set()).add(spec)
        if Shard(-1) not in placements or not {Shard(0), Shard(1)} & set(placements):
            assert all(len(alike) == 1 for alike in found.values()), found
    assert Spec.from_dims(mesh, ["b", "a"]) == Spec(mesh, (Shard(1), Shard(0), Replicate()))


def test_sizes_cut_a_dim_into_ragged_parts_and_zeros() -> None:
    spec = Spec.from_axes(MESH, {"ep": Shard(0), "dp": Shard(1)}, sizes={"ep": (3, 0, 6, 1)})
    boxes = list(all_boxes((10, 3), spec).values())
    assert [b.shape for b in boxes] == [(n, m) for m in (2, 1) for n in (3, 0, 6, 1)]
    assert [b.offset[0] for b in boxes[:4]] == [0, 10, 3, 9]
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Spec.from_axes(MESH, {"ep": Shard(0)}, sizes={"ep": (1, 2)}),
            "2 sizes were given",
        ),
        (lambda: Spec.from_axes(MESH, {}, sizes={"ep": (1, 2, 3, 4)}), "only an axis that shards"),
        (lambda: Spec.from_axes(MESH, {}, sizes={"tp": (1,)}), "unknown axis 'tp'"),
        (lambda: Spec.from_axes(MESH, {}, order=("ep", "ep")), "each once"),
        (lambda: Spec(MESH, (Partial("median"), Replicate())), "unknown kind"),
        (lambda: Spec.from_dims(MESH, ["ep", "ep"]), "each once"),
        (
            lambda: local_box(
                (9,), Spec.from_axes(MESH, {"ep": Shard(0)}, sizes={"ep": (3, 0, 6, 1)}), 0
            ),
            "add up to 10, but cut a piece of 9",
        ),
        (
            lambda: FlatSpec(Spec.from_axes(MESH, {"ep": Shard(0)}), ("ep",)),
            "must replicate the box",
        ),
        (lambda: FlatSpec(Spec.from_axes(MESH, {}), ("ep",), (1, 2)), "2 sizes were given for 4"),
        (
            lambda: TensorSpec(
                (4, 2), torch.int8, FlatSpec(Spec.from_axes(MESH, {}), ("dp",), (1, 2))
            ),
            "add up to 3, but cut a piece of 8",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(make, message: str) -> None:
    with pytest.raises(MeshValueError, match=message):
        make()


def test_flat_ranges_cut_the_elements_of_each_box() -> None:
    flat = FlatSpec(Spec.from_axes(MESH, {"ep": Shard(0)}), ("dp",))
    tensor = TensorSpec((6, 3), torch.float32, flat)  # boxes of 2, 2, 2 and 0 rows
    assert [tensor.flat_range(rank) for rank in (0, 4, 3)] == [(0, 3), (3, 6), (0, 0)]
    assert tensor.local_shape(4) == (3,)
    assert tensor.box(4) == local_box((6, 3), flat.spec, 4)


@pytest.mark.parametrize(
    "sizes", [(("ep", (1, 1)), ("ep", (2, 0))), ((1, 2, 3),), (1, 2), (("ep", (1, 1)), None)]
)
def test_sizes_that_are_no_pairs_or_stand_twice_are_refused(sizes: tuple) -> None:
    with pytest.raises(MeshValueError, match="each axis once, got"):
        Spec(ProcessMesh((2,), ("ep",)), (Shard(0),), (), sizes)
