import pickle

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_spmd import MeshTypeError, MeshValueError, ProcessMesh, Spec

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
