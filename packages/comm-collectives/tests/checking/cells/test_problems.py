"""The problems of the matrix: ranks want what others are given, and the shapes are ugly."""

import pytest
import torch

from comm_collectives.checking.cells.problems import (
    ALIASED,
    EMPTY,
    EVEN,
    ONE_EMPTY,
    SHAPES,
    UNEVEN,
    Case,
    num_rows,
    problem_of,
)

_ROWS = [shape for shape in SHAPES if shape != "no dims"]


def _problems(collective: str, shape: str, size: int, op: str = "") -> list:  # type: ignore[type-arg]
    case = Case(collective=collective, dtype=torch.int32, shape=shape, op=op)
    return [problem_of(case, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", _ROWS)
def test_exchange_transposes_pieces(shape: str, size: int) -> None:
    problems = _problems("all_to_all", shape, size)
    for dst, problem in enumerate(problems):
        pieces = problem.want.split(problem.received)
        for src, piece in enumerate(pieces):
            assert torch.equal(problems[src].x.split(problems[src].sent)[dst], piece)


@pytest.mark.parametrize("collective", ["all_gather", "torch.all_gather_into_tensor"])
@pytest.mark.parametrize("shape", _ROWS)
def test_gather_joins_what_all_have(collective: str, shape: str) -> None:
    problems = _problems(collective, shape, 3)
    whole = torch.cat([problem.x for problem in problems])
    assert all(torch.equal(problem.want, whole) for problem in problems)


@pytest.mark.parametrize("shape", _ROWS)
def test_scatter_cuts_and_only_the_root_gives(shape: str) -> None:
    problems = _problems("scatter", shape, 3)
    assert [problem.x is None for problem in problems] == [True, True, False]
    assert torch.equal(torch.cat([problem.want for problem in problems]), problems[2].x)


@pytest.mark.parametrize("shape", _ROWS)
def test_pieces_of_a_reduction_make_up_the_whole(shape: str) -> None:
    problems = _problems("reduce_scatter", shape, 4, op="sum")
    want = torch.cat([problem.want for problem in problems])
    assert torch.equal(want, sum((p.x for p in problems[1:]), problems[0].x))


def test_ring_and_broadcast() -> None:
    ring = _problems("send and recv", UNEVEN, 4)
    assert all(torch.equal(ring[r].want, ring[r - 1].x) for r in range(4))
    cast = _problems("broadcast", EVEN, 3)
    assert all(torch.equal(problem.want, cast[2].x) for problem in cast)


def test_shapes_are_what_they_are_called() -> None:
    def counts(shape: str) -> list[list[int]]:
        return [[num_rows(shape, src, dst) for dst in range(4)] for src in range(4)]

    assert counts(EVEN) == counts(ALIASED) == [[2] * 4] * 4
    assert counts(EMPTY) == [[0] * 4] * 4
    assert counts(ONE_EMPTY)[0] == [row[0] for row in counts(ONE_EMPTY)] == [0] * 4
    assert all(n > 0 for row in counts(ONE_EMPTY)[1:] for n in row[1:])
    uneven = counts(UNEVEN)
    assert {n for row in uneven for n in row} == {0, 1, 2, 3}
    assert uneven != [list(column) for column in zip(*uneven, strict=True)]
