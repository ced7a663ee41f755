import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from mesh_spmd import MeshValueError, ProcessMesh, Spec, all_boxes, choose_placements

R = Replicate()


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], ProcessMesh, dict[str, int]]:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    mesh = ProcessMesh(mesh_shape, tuple("abcd"[: len(mesh_shape)]))
    sizes = tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=3)))
    dims = st.integers(-len(sizes), len(sizes) - 1)
    return sizes, mesh, draw(st.dictionaries(st.sampled_from(mesh.axis_names), dims))


@given(cases())
def test_all_shards_are_alike_and_no_other_choice_has_more(
    case: tuple[tuple[int, ...], ProcessMesh, dict[str, int]],
) -> None:
    sizes, mesh, wanted = case
    placements = choose_placements(sizes, mesh, shard=wanted)
    boxes = all_boxes(sizes, Spec(mesh, placements))
    assert len({box.shape for box in boxes.values()}) == 1
    chosen = {
        axis: placement.dim
        for axis, placement in zip(mesh.axis_names, placements, strict=True)
        if isinstance(placement, Shard)
    }
    assert all(chosen[axis] == wanted[axis] % len(sizes) for axis in chosen)
    for dim, size in enumerate(sizes):
        axes = [axis for axis in wanted if wanted[axis] % len(sizes) == dim]
        products = [
            math.prod(map(mesh.axis_size, subset))
            for count in range(len(axes) + 1)
            for subset in combinations(axes, count)
        ]
        best = max(parts for parts in products if size % parts == 0)
        assert math.prod(mesh.axis_size(axis) for axis in chosen if chosen[axis] == dim) == best


def test_all_wanted_axes_shard_when_their_product_divides() -> None:
    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    assert choose_placements((64, 512), mesh, shard={"dp": 0, "ep": 0}) == (Shard(0), Shard(0))
    assert choose_placements((64, 6), mesh, shard={"dp": -1, "ep": 0}) == (Shard(1), Shard(0))
    assert choose_placements((), mesh, shard={}) == (R, R)


def test_the_largest_axis_that_divides_is_the_fallback() -> None:
    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    assert choose_placements((60, 512), mesh, shard={"dp": 0, "ep": 0}) == (R, Shard(0))
    assert choose_placements((6, 512), mesh, shard={"dp": 0, "ep": 0}) == (Shard(0), R)
    assert choose_placements((7, 512), mesh, shard={"dp": 0, "ep": 0}) == (R, R)


def test_a_combination_of_axes_beats_a_single_larger_one() -> None:
    mesh = ProcessMesh((2, 3, 4), ("a", "b", "c"))
    wanted = {"a": 0, "b": 0, "c": 0}
    assert choose_placements((18,), mesh, shard=wanted) == (Shard(0), Shard(0), R)


def test_of_equal_products_the_innermost_axis_and_then_fewest_axes_win() -> None:
    assert choose_placements((6,), ProcessMesh((2, 2), ("a", "b")), shard={"a": 0, "b": 0}) == (
        R,
        Shard(0),
    )
    mesh = ProcessMesh((4, 2, 2), ("a", "b", "c"))
    assert choose_placements((4,), mesh, shard={"a": 0, "b": 0, "c": 0}) == (Shard(0), R, R)


def test_empty_dims_and_axes_of_one_rank_always_shard() -> None:
    mesh = ProcessMesh((1, 4), ("dp", "ep"))
    assert choose_placements((0, 3), mesh, shard={"dp": 1, "ep": 0}) == (Shard(1), Shard(0))
    assert choose_placements((7,), mesh, shard={"dp": 0, "ep": 0}) == (Shard(0), R)


def test_strict_raises_with_the_numbers_and_the_remedy() -> None:
    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    with pytest.raises(
        MeshValueError,
        match=r"dim 0 of global_shape=\(60, 512\) is 60, which does not divide by dp=2 x ep=4 = 8; "
        r"make it a multiple of 8 \(for example 64\), or shard over ep only",
    ):
        choose_placements((60, 512), mesh, shard={"dp": 0, "ep": 0}, strict=True)
    with pytest.raises(MeshValueError, match="replicate it"):
        choose_placements((7,), mesh, shard={"ep": 0}, strict=True)
    assert choose_placements((64, 6), mesh, shard={"dp": 1, "ep": 0}, strict=True) == (
        Shard(1),
        Shard(0),
    )


def test_unknown_axes_and_dims_are_refused() -> None:
    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    with pytest.raises(MeshValueError, match="unknown axis 'tp'"):
        choose_placements((8,), mesh, shard={"tp": 0})
    with pytest.raises(MeshValueError, match="'ep' shards dim 1, but the tensor has 1 dims"):
        choose_placements((8,), mesh, shard={"ep": 1})
