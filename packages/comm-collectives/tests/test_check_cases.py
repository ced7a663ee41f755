"""The matrix at 2 and 4 real ranks, and the canary: a check that cannot fail proves nothing."""

import dataclasses

import pytest
import torch

from comm_collectives.check_cases import (
    RIGHT,
    WRONG,
    Case,
    all_cases,
    expected_verdict,
    run_case,
    run_matrix,
)
from comm_collectives.wire import DTYPES
from ranktest import run_ranks


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_cell_ends_as_it_must_on_every_rank(world_size: int) -> None:
    cases = all_cases()

    def fn(rank: int, world_size: int) -> list[tuple[str, str]]:
        return [(r.verdict, r.detail) for r in run_matrix(cases)]

    for rank, results in enumerate(run_ranks(fn, world_size)):
        for case, (verdict, detail) in zip(cases, results, strict=True):
            assert verdict == expected_verdict(case), f"rank {rank}: {case}: {detail}"


def test_matrix_holds_every_collective_dtype_and_shape() -> None:
    cases = [case for case in all_cases() if not case.spoiled]
    cells = {(case.collective, case.dtype, case.shape) for case in cases}
    assert len(cells) == len(cases) == 4 * (4 * len(DTYPES) + 4)


def test_canary_is_noticed_and_its_unspoiled_twin_is_right() -> None:
    canary = all_cases()[0]
    assert canary.spoiled

    def fn(rank: int, world_size: int) -> tuple[str, str]:
        twin = dataclasses.replace(canary, spoiled=False)
        return run_case(canary).verdict, run_case(twin).verdict

    assert run_ranks(fn, 2) == [(WRONG, RIGHT)] * 2


def test_touched_input_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from comm_collectives import check_cases

    real = check_cases.all_to_all

    def touching(x: torch.Tensor, **kwargs: object) -> torch.Tensor:
        y = real(x, **kwargs)  # type: ignore[arg-type]
        x += 1
        return y

    monkeypatch.setattr(check_cases, "all_to_all", touching)

    def fn(rank: int, world_size: int) -> list[str]:
        return [
            run_case(Case(collective="all_to_all", dtype=torch.int32, shape=shape)).detail
            for shape in ("even", "strided")
        ]

    for even, strided in run_ranks(fn, 2):
        assert even == "the input holds other values than it should"
        assert strided == "the memory around the input holds other values than it should"
