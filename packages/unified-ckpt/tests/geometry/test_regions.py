import itertools
import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ckpt.geometry.regions import Region, box_region, check_tiling, split_box


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    offset = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    return tuple(shape), tuple(offset), tuple(size)


def expand(region: Region) -> list[int]:
    return [s + i for s in region.run_starts() for i in range(region.run_bytes)]


@settings(max_examples=200, deadline=None)
@given(boxes(), st.sampled_from([1, 2, 4, 8]))
def test_a_region_is_the_bytes_of_the_box_in_row_major_order(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], itemsize: int
) -> None:
    shape, offset, size = box
    region = box_region(shape, offset, size, itemsize_bytes=itemsize, start=100)
    number_of = torch.arange(math.prod(shape) * itemsize).view(*shape, itemsize) + 100
    for dim, (o, n) in enumerate(zip(offset, size, strict=True)):
        number_of = number_of.narrow(dim, o, n)
    assert expand(region) == number_of.flatten().tolist()
    assert region.num_bytes == number_of.numel()
    assert region.end == int(number_of.max()) + 1


def test_a_region_has_as_few_runs_as_possible() -> None:
    assert box_region((4, 6), (1, 0), (2, 6), itemsize_bytes=2, start=0) == Region(12, 24)
    assert box_region((4, 6), (0, 2), (4, 3), itemsize_bytes=2, start=0) == Region(
        4, 6, (4,), (12,)
    )
    assert box_region((2, 3, 4), (0, 0, 1), (2, 3, 2), itemsize_bytes=1, start=0) == Region(
        1, 2, (6,), (4,)
    )
    assert box_region((1, 9, 1), (0, 4, 0), (1, 5, 1), itemsize_bytes=4, start=8) == Region(24, 20)
    assert box_region((), (), (), itemsize_bytes=4, start=8) == Region(8, 4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=4), st.sampled_from([1, 4]), st.integers(1, 70))
def test_chunks_of_a_box_follow_each_other_and_stay_small(
    dims: list[int], itemsize: int, chunk_bytes: int
) -> None:
    shape = tuple(dims)
    numbers = torch.arange(math.prod(shape)).view(shape)
    seen: list[int] = []
    for offset, size in split_box(shape, itemsize, chunk_bytes):
        part = numbers
        for dim, (o, n) in enumerate(zip(offset, size, strict=True)):
            part = part.narrow(dim, o, n)
        seen += part.flatten().tolist()
        assert part.numel() * itemsize <= max(chunk_bytes, itemsize)
    assert seen == list(range(math.prod(shape)))


def test_tilings_are_accepted_and_holes_and_overlaps_are_named() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(200):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
        cuts = [sorted({0, n, *(rng.randint(0, n) for _ in range(2))}) for n in shape]
        tiling: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for edges in cuts:
            tiling = [
                ((*o, a), (*s, b - a)) for o, s in tiling for a, b in itertools.pairwise(edges)
            ]
        rng.shuffle(tiling)
        assert check_tiling(shape, tiling) is None, seed
        dropped = tiling[1:]
        assert "no rank holds" in (check_tiling(shape, dropped) or ""), seed
        if len(tiling) > 1:
            grown = [*tiling, ((0,) * len(shape), shape)]
            assert "overlap" in (check_tiling(shape, grown) or ""), seed


def test_an_overlap_that_makes_up_for_a_hole_is_found() -> None:
    boxes = [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((3, 0), (1, 4)), ((0, 3), (2, 2))]
    assert "overlap" in (check_tiling((4, 4), boxes) or "")
