"""What ranks disagree on is named on every rank; what one gets wrong ends the call on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.moe import Dispatched
from comm_collectives.moe.options import MoeOptions
from ranktest import collect_ranks

_DIFFERENT: dict[str, dict[str, Any]] = {
    "num_experts": {"num_experts": 8},
    "hidden size": {"x": torch.ones(2, 4)},
    "dtype": {"x": torch.ones(2, 3).double()},
    "dtype of topk_weights": {"topk_weights": torch.ones(2, 1).double()},
    "route": {"options": MoeOptions(route="dedup", timeout_s=10)},
    "payload": {"options": MoeOptions(payload="int8", timeout_s=10)},
}


def _call(different: dict[str, Any]) -> Dispatched:
    given = {
        "x": torch.ones(2, 3),
        "topk_idx": torch.tensor([[0], [1]]),
        "topk_weights": torch.ones(2, 1),
        "num_experts": 4,
        "options": MoeOptions(timeout_s=10),
    }
    return cc.dispatch(**{**given, **different}, group=dist.group.WORLD)


@pytest.mark.parametrize("name", _DIFFERENT)
def test_what_differs_is_named_on_every_rank(name: str) -> None:
    def fn(rank: int, world_size: int) -> None:
        _call(_DIFFERENT[name] if rank == 1 else {})

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2
    for outcome in outcomes:
        assert f"dispatch call 1 of group (0, 1): {name} differs" in str(outcome.error)


def test_other_nodes_on_one_rank_are_a_mismatch() -> None:
    def fn(rank: int, world_size: int) -> None:
        per_node = 1 + rank
        options = MoeOptions(route="hierarchical", ranks_per_node=per_node, timeout_s=10)
        _call({"options": options})

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2
    assert all("ranks_per_node differs" in str(o.error) for o in outcomes)


def test_quantised_gradients_on_one_rank_alone_are_a_mismatch() -> None:
    def fn(rank: int, world_size: int) -> None:
        options = MoeOptions(payload="int8", quantize_backward=rank == 1, timeout_s=10)
        _call({"options": options})

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2
    assert all("quantize_backward differs" in str(o.error) for o in outcomes)


@pytest.mark.parametrize(
    ("different", "kind", "text"),
    [
        ({"topk_idx": torch.tensor([[0], [9]])}, "RefusedError", "topk_idx holds 9"),
        ({"x": torch.ones(2, 3).int()}, "RefusedTypeError", "x is torch.int32"),
        ({"x": None}, "RefusedTypeError", "x is a NoneType; give a torch.Tensor"),
        ({"topk_weights": torch.ones(2, 2)}, "RefusedError", "make them equal"),
        ({"num_experts": 5}, "RefusedError", "choose a number of ranks that divides 5"),
        ({"expert_alignment": 0}, "RefusedError", "expert_alignment=0 must be at least 1"),
        ({"expert_alignment": 2.0}, "RefusedTypeError", "expert_alignment=2.0 is a float; give an"),
        ({"num_experts": 4.0}, "RefusedTypeError", "num_experts=4.0 is a float; give an int"),
        ({"options": None}, "RefusedTypeError", "options is a NoneType; give MoeOptions"),
    ],
)
def test_wrong_arguments_of_one_rank_end_the_call_on_every_rank(
    different: dict[str, Any], kind: str, text: str
) -> None:
    def fn(rank: int, world_size: int) -> None:
        _call(different if rank == 1 else {})

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == [kind] * 2
    for outcome in outcomes:
        assert "refused: rank 1: " in str(outcome.error)
        assert text in str(outcome.error)


def test_another_width_or_dtype_on_the_way_back_is_a_mismatch() -> None:
    def fn(rank: int, world_size: int) -> None:
        sent = _call({})
        y = sent.x[:, :2] if rank == 1 else sent.x
        cc.combine(y, sent.handle)

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["MismatchError"] * 2
    assert all(
        "combine call 2 of group (0, 1): hidden size differs" in str(o.error) for o in outcomes
    )


def test_rows_missing_on_one_rank_end_combine_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        sent = _call({})
        cc.combine(torch.ones(9, 3) if rank == 1 else sent.x, sent.handle)

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [o.error_type for o in outcomes] == ["RefusedError"] * 2
    assert all("rank 1: y has shape" in str(o.error) for o in outcomes)


def test_counts_of_rows_are_plain_integers_whatever_the_alignment_is() -> None:
    sent = cc.dispatch(
        torch.ones(2, 3),
        torch.tensor([[0], [1]]),
        torch.ones(2, 1),
        num_experts=2,
        expert_alignment=torch.tensor(4),  # type: ignore[arg-type]
    )
    assert [(type(n), n) for n in sent.num_tokens_per_expert] == [(int, 4)] * 2
