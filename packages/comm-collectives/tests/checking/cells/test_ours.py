"""Cells on real ranks: a spoiled result, a touched input and a wrong value are noticed."""

import dataclasses

import pytest
import torch

from comm_collectives.checking.cells import moe_cells as check_moe
from comm_collectives.checking.cells import ours as check_ours
from comm_collectives.checking.cells.cases import canaries
from comm_collectives.checking.cells.moe_cells import MOE_COLLECTIVES, run_moe
from comm_collectives.checking.cells.ours import run_ours
from comm_collectives.checking.cells.problems import SHAPES, STRIDED, Case
from ranktest import run_ranks


def test_canaries_are_noticed_and_their_unspoiled_twins_are_right() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[str, str]]:
        return [
            (run_ours(case), run_ours(dataclasses.replace(case, spoiled=""))) for case in canaries()
        ]

    for results in run_ranks(fn, 2):
        assert all(twin == "" for _, twin in results)
        result, _, touched, _ = (spoiled for spoiled, _ in results)
        assert result == "the result holds other values than it should"
        assert touched == "the memory of the input holds other values than it should"


@pytest.mark.parametrize("shape", ["even", "strided"])
def test_collective_that_touches_its_input_is_noticed(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_ours.all_to_all

    def touching(x: torch.Tensor, **kwargs: object) -> torch.Tensor:
        y = real(x, **kwargs)  # type: ignore[call-overload]
        x += 1
        return y  # type: ignore[no-any-return]

    monkeypatch.setattr(check_ours, "all_to_all", touching)
    case = Case(collective="all_to_all", dtype=torch.int32, shape=shape)
    for problem in run_ranks(lambda rank, world_size: run_ours(case), 2):
        assert problem == "the memory of the input holds other values than it should"


@pytest.mark.parametrize("collective", MOE_COLLECTIVES)
def test_token_that_is_lost_on_the_way_is_noticed(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_moe.combine

    def losing(y: torch.Tensor, handle: object) -> torch.Tensor:
        out = real(y, handle)  # type: ignore[arg-type]
        out[-1:] = 0
        return out

    case = Case(collective=collective, dtype=torch.float32, shape=STRIDED)

    def fn(rank: int, world_size: int) -> tuple[str, str]:
        right = run_moe(case)
        monkeypatch.setattr(check_moe, "combine", losing)
        return right, run_moe(case)

    lost = "the result holds other values than it should"
    assert run_ranks(fn, 2) == [("", lost)] * 2


def test_every_shape_is_somewhere_in_the_matrix() -> None:
    from comm_collectives.checking.cells.cases import all_cases, torch_cases

    cases = [*all_cases(), *torch_cases()]
    assert {case.shape for case in cases} == {*SHAPES, check_moe.NO_EXPERT}
