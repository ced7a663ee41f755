"""Three oracles that share no code with boxes.py: torch.chunk on real tensors, a count of how often
each element is held, and torch's own (private) arithmetic for DTensor."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from mesh_spmd import Box, MeshTypeError, MeshValueError, ProcessMesh, Spec, all_boxes, local_box

Case = tuple[tuple[int, ...], Spec]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor of 0 to 3 dims, zeros included, on a mesh of 1 to 4 axes, with any placements."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    mesh = ProcessMesh(mesh_shape, tuple("abcd"[: len(mesh_shape)]))
    sizes = tuple(draw(st.lists(st.integers(0, 14), max_size=3)))
    kinds: list[st.SearchStrategy[Placement]] = [
        st.just(Replicate()),
        st.sampled_from([Partial(), Partial("max")]),
    ]
    if sizes:
        # Twice, so that several axes on one dim are common.
        shards = st.integers(-len(sizes), len(sizes) - 1).map(Shard)
        kinds = [shards, shards, *kinds]
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    return sizes, Spec(mesh, placements)


def chunked(x: torch.Tensor, spec: Spec, coordinate: Sequence[int]) -> torch.Tensor:
    """Cut `x` with torch.chunk, axis by axis; ranks beyond the last chunk get an empty piece."""
    for placement, parts, index in zip(spec.placements, spec.mesh.shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            pieces = x.chunk(parts, dim=placement.dim)
            empty = x.narrow(placement.dim, 0, 0)
            x = pieces[index] if index < len(pieces) else empty
    return x


@given(cases())
def test_boxes_are_what_torch_chunk_cuts(case: Case) -> None:
    sizes, spec = case
    x = torch.arange(math.prod(sizes)).reshape(sizes)
    for rank, box in all_boxes(sizes, spec).items():
        expected = chunked(x, spec, tuple(spec.mesh.coordinate(rank).values()))
        assert box.shape == tuple(expected.shape)
        assert torch.equal(x[box.slices()], expected)


@given(cases())
def test_every_element_is_held_equally_often_and_shards_are_disjoint(case: Case) -> None:
    sizes, spec = case
    num_shards = math.prod(
        size
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True)
        if isinstance(placement, Shard)
    )
    held = np.zeros(sizes, dtype=np.int64)
    holders: dict[tuple[int, ...], set[Box]] = {}
    for rank, box in all_boxes(sizes, spec).items():
        held[box.slices()] += 1
        coordinate = spec.mesh.coordinate(rank).values()
        shard = tuple(
            index
            for index, placement in zip(coordinate, spec.placements, strict=True)
            if isinstance(placement, Shard)
        )
        holders.setdefault(shard, set()).add(box)
    # Held by every replica once, and by two shards never: otherwise the count would be higher.
    assert (held == spec.mesh.size // num_shards).all()
    assert all(len(boxes) == 1 for boxes in holders.values()), "replicas hold different boxes"


@given(cases())
def test_boxes_equal_torchs_own_arithmetic_with_offsets_of_empty_boxes(case: Case) -> None:
    sizes, spec = case
    placements = [
        Shard(placement.dim % len(sizes)) if isinstance(placement, Shard) else placement
        for placement in spec.placements
    ]
    for rank in spec.mesh.ranks:
        coordinate = list(spec.mesh.coordinate(rank).values())
        shape, offset = _compute_local_shape_and_global_offset(
            sizes, spec.mesh.shape, coordinate, placements
        )
        assert local_box(sizes, spec, rank) == Box(tuple(offset), tuple(shape))


@given(cases(), st.data())
def test_ranks_of_a_mesh_may_be_numbered_in_any_way(case: Case, data: st.DataObject) -> None:
    sizes, spec = case
    ranks = data.draw(st.permutations(range(7, 7 + spec.mesh.size)))
    renamed = ProcessMesh(spec.mesh.shape, spec.mesh.axis_names, ranks)
    boxes = all_boxes(sizes, Spec(renamed, spec.placements))
    assert list(boxes) == list(ranks)
    assert list(boxes.values()) == list(all_boxes(sizes, spec).values())
    assert all(local_box(sizes, Spec(renamed, spec.placements), r) == boxes[r] for r in ranks)


def test_trailing_ranks_of_an_uneven_dim_hold_nothing() -> None:
    spec = Spec(ProcessMesh((4,), ("ep",)), (Shard(0),))
    assert list(all_boxes((6, 3), spec).values()) == [
        Box((0, 0), (2, 3)),
        Box((2, 0), (2, 3)),
        Box((4, 0), (2, 3)),
        Box((6, 0), (0, 3)),
    ]


def test_axes_on_one_dim_nest_in_mesh_order_and_are_not_flattened() -> None:
    spec = Spec(ProcessMesh((2, 2), ("dp", "ep")), (Shard(0), Shard(0)))
    assert [box.shape for box in all_boxes((5,), spec).values()] == [(2,), (1,), (1,), (1,)]
    flat = Spec(ProcessMesh((4,), ("dp_ep",)), (Shard(0),))
    assert [box.shape for box in all_boxes((5,), flat).values()] == [(2,), (2,), (1,), (0,)]


def test_scalars_and_tensors_without_elements_have_boxes() -> None:
    mesh = ProcessMesh((2,), ("ep",))
    assert local_box((), Spec(mesh, (Replicate(),)), 1) == Box((), ())
    assert local_box((0, 3), Spec(mesh, (Shard(0),)), 1) == Box((0, 0), (0, 3))
    assert local_box((0, 3), Spec(mesh, (Shard(1),)), 1) == Box((0, 2), (0, 1))
    assert Box((), ()).numel == 1
    assert Box((6, 0), (0, 3)).numel == 0


def test_sizes_beyond_32_bits_are_exact() -> None:
    size = 2**40 + 1
    boxes = all_boxes((size,), Spec(ProcessMesh((3,), ("ep",)), (Shard(0),)))
    assert sum(box.numel for box in boxes.values()) == size


def test_a_torch_size_is_a_shape() -> None:
    spec = Spec(ProcessMesh((2,), ("ep",)), (Shard(0),))
    box = local_box(torch.empty(4, 2).shape, spec, 1)
    assert box == Box((2, 0), (2, 2))
    assert type(box.shape) is tuple


def test_bad_shapes_and_ranks_are_refused() -> None:
    spec = Spec(ProcessMesh((2,), ("ep",)), (Shard(0),))
    with pytest.raises(MeshValueError, match=r"global_shape\[1\] is -1"):
        local_box((4, -1), spec, 0)
    with pytest.raises(MeshTypeError, match="integers only"):
        all_boxes((4.5,), spec)  # type: ignore[arg-type]
    with pytest.raises(MeshValueError, match=r"rank 2 is not in .* ranks 0 to 1"):
        local_box((4,), spec, 2)
    with pytest.raises(MeshValueError, match="a scalar can only be replicated"):
        all_boxes((), spec)
    with pytest.raises(MeshValueError, match="2 dims, but box shape"):
        Box((0, 0), (1,))
    with pytest.raises(MeshValueError, match=r"box offset\[0\] is -1"):
        Box((-1,), (1,))
