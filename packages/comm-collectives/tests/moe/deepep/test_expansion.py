"""Rows of received tokens spread over experts and summed again, against loops in plain Python."""

import random

import pytest
import torch
from torch import Tensor

from comm_collectives.moe.deepep.expansion import Expansion, plan_expansion

_K, _L, _D = 4, 3, 5


def _received(rng: random.Random, tokens: int, experts: tuple[int, ...]) -> Tensor:
    """Local experts of each choice; each token has at least one here, as delivered ones have."""
    rows = [[rng.choice((-1, *experts)) for _ in range(_K)] for _ in range(tokens)]
    for row in rows:
        row[rng.randrange(_K)] = rng.choice(experts)
    return torch.tensor(rows, dtype=torch.int64).reshape(tokens, _K)


def _places(expert_UK: list[list[int]], alignment: int) -> tuple[dict[tuple[int, int], int], int]:
    """Row of each (token, choice): expert by expert, inside by token and choice, each padded."""
    place: dict[tuple[int, int], int] = {}
    row = 0
    for expert in range(_L):
        for token, choices in enumerate(expert_UK):
            for choice, wanted in enumerate(choices):
                if wanted == expert:
                    place[token, choice] = row
                    row += 1
        row = -(-row // alignment) * alignment
    return place, row


def _plan(expert_UK: Tensor, alignment: int) -> Expansion:
    counts = [int((expert_UK == e).sum()) for e in range(_L)]
    return plan_expansion(expert_UK, counts, alignment)


def _rows(plan: Expansion) -> int:
    return sum(plan.placing.num_tokens_per_expert)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_and_weights_stand_where_a_loop_puts_them(alignment: int, dtype: torch.dtype) -> None:
    rng = random.Random(alignment)
    for tokens, experts in ((7, (0, 1, 2)), (9, (1,)), (5, (0, 2)), (0, (0, 1, 2))):
        expert_UK = _received(rng, tokens, experts)
        place, num_rows = _places(expert_UK.tolist(), alignment)
        plan = _plan(expert_UK, alignment)
        assert _rows(plan) == num_rows
        x = torch.randn(tokens, _D, dtype=torch.float64).to(dtype)
        weight = torch.rand(tokens, _K)
        want_x, want_w = torch.zeros(num_rows, _D, dtype=dtype), torch.zeros(num_rows)
        for (token, choice), row in place.items():
            want_x[row] = x[token]
            want_w[row] = weight[token, choice]
        assert torch.equal(plan.expand(x), want_x)
        assert torch.equal(plan.expand_weights(weight), want_w)


@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_are_summed_in_the_order_of_choices_and_weights_return(alignment: int) -> None:
    rng = random.Random(10 + alignment)
    for tokens, experts in ((7, (0, 1, 2)), (9, (1,)), (0, (0, 1, 2))):
        expert_UK = _received(rng, tokens, experts)
        place, num_rows = _places(expert_UK.tolist(), alignment)
        plan = _plan(expert_UK, alignment)
        y, weight = torch.randn(num_rows, _D), torch.rand(num_rows)
        is_padding = torch.ones(num_rows, dtype=torch.bool)
        is_padding[list(place.values())] = False
        y[is_padding] = torch.nan
        weight[is_padding] = torch.nan
        want_y, want_w = torch.zeros(tokens, _D), torch.zeros(tokens, _K)
        for token in range(tokens):
            for choice in range(_K):
                if (token, choice) in place:
                    want_y[token] += y[place[token, choice]]
                    want_w[token, choice] = weight[place[token, choice]]
        assert torch.equal(plan.fold(y), want_y)  # the same additions in the same order: same bits
        assert torch.equal(plan.fold_weights(weight), want_w)


def test_tokens_that_come_in_any_order_give_the_rows_of_the_sorted_ones() -> None:
    rng = random.Random(5)
    expert_UK = _received(rng, 9, (0, 1, 2))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    counts = [int((expert_UK == e).sum()) for e in range(_L)]
    plan = plan_expansion(expert_UK, counts, 4)
    mixed = plan_expansion(expert_UK[order], counts, 4, source_U=order * 10)
    x, weight, y = torch.randn(9, _D), torch.rand(9, _K), torch.randn(_rows(plan), _D)
    assert torch.equal(mixed.expand(x[order]), plan.expand(x))
    assert torch.equal(mixed.expand_weights(weight[order]), plan.expand_weights(weight))
    assert torch.equal(mixed.fold(y), plan.fold(y)[order])
    assert torch.equal(mixed.fold_weights(y[:, 0]), plan.fold_weights(y[:, 0])[order])


def test_tokens_that_nobody_here_wants_are_kept_and_get_zeros() -> None:
    # DeepEP fills up with such rows where the number of received tokens is fixed beforehand.
    expert_UK = torch.tensor([[-1, 1], [-1, -1], [0, 1]], dtype=torch.int32)
    plan = plan_expansion(expert_UK, [1, 2], 1)
    x = torch.tensor([[1.0], [2.0], [4.0]])
    assert plan.expand(x).flatten().tolist() == [4.0, 1.0, 4.0]
    assert plan.fold(plan.expand(x)).flatten().tolist() == [1.0, 0.0, 8.0]


def test_folding_is_the_transpose_of_expanding() -> None:
    rng = random.Random(3)
    expert_UK = _received(rng, 8, (0, 1, 2))
    plan = _plan(expert_UK, 4)
    x = torch.randn(8, _D, dtype=torch.float64)
    y = torch.randn(_rows(plan), _D, dtype=torch.float64)
    torch.testing.assert_close((plan.expand(x) * y).sum(), (x * plan.fold(y)).sum())
    w = torch.randn(8, _K, dtype=torch.float64)
    v = torch.randn(_rows(plan), dtype=torch.float64)
    torch.testing.assert_close((plan.expand_weights(w) * v).sum(), (w * plan.fold_weights(v)).sum())
