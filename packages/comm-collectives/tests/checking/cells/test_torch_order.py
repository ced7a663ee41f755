"""Cells of raw torch.distributed on gloo: what is known to be broken there is found broken."""

import pytest
import torch
import torch.distributed as dist

from comm_collectives.checking.cells.cases import torch_cases
from comm_collectives.checking.cells.problems import ALIASED, EVEN, STRIDED, Case
from comm_collectives.checking.cells.torch_order import run_torch_order
from comm_collectives.checking.results.results import (
    judge,
    run_case,
)
from comm_collectives.collectives.drop_in import torch_order
from ranktest import run_ranks


def _verdict(case: Case) -> tuple[str, str]:
    def fn(rank: int, world_size: int) -> object:
        return run_case(lambda: run_torch_order(case, dist))

    return judge(run_ranks(fn, 2))  # type: ignore[arg-type]


def test_plain_cells_of_every_function_are_right() -> None:
    cases = [
        case
        for case in torch_cases(dtypes=[torch.float32], columns=[3])
        if case.shape == EVEN and case.op in ("", "sum")
    ]

    def found(case: Case) -> str:
        try:
            return run_torch_order(case, dist)
        except RuntimeError as error:
            if case.collective == "torch.all_to_all" and "does not support alltoall" in str(error):
                return ""  # gloo of torch 2.11
            raise

    assert len(cases) == 12
    assert run_ranks(lambda *_: [found(case) for case in cases], 2) == [[""] * 12] * 2


@pytest.mark.parametrize(
    ("function", "shape", "op"),
    [
        ("broadcast", STRIDED, ""),
        ("all_reduce", STRIDED, "sum"),
        ("all_to_all_single", ALIASED, ""),
    ],
)
def test_silent_errors_of_gloo_are_found(function: str, shape: str, op: str) -> None:
    case = Case(collective=f"torch.{function}", dtype=torch.float32, shape=shape, op=op)
    verdict, detail = _verdict(case)
    assert verdict == "silently wrong"
    assert "other values than it should" in detail


def test_functions_of_this_package_get_right_what_gloo_gets_wrong() -> None:
    cases = [
        Case(collective=f"torch_order.{name}", dtype=torch.float8_e4m3fn, shape=shape)
        for name, shape in (
            ("broadcast", STRIDED),
            ("all_to_all_single", ALIASED),
            ("all_gather_into_tensor", ALIASED),
        )
    ]

    def fn(rank: int, world_size: int) -> list[str]:
        return [run_torch_order(case, torch_order) for case in cases]

    assert run_ranks(fn, 2) == [[""] * 3] * 2


def test_result_that_touches_its_surroundings_is_noticed() -> None:
    class Careless:
        @staticmethod
        def broadcast(tensor: torch.Tensor, src: int) -> None:
            torch_order.broadcast(tensor, src)
            tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.shape[1]).fill_(7)

    case = Case(collective="torch_order.broadcast", dtype=torch.int16, shape=STRIDED)
    around = "the memory around the result holds other values than it should"
    assert run_ranks(lambda rank, world_size: run_torch_order(case, Careless), 2) == [around] * 2


def test_refused_dtype_is_told_from_a_wrong_result() -> None:
    case = Case(collective="torch.all_gather", dtype=torch.float8_e4m3fn, shape=EVEN)
    verdict, detail = _verdict(case)
    assert verdict == "refused"
    assert "Invalid scalar type" in detail
