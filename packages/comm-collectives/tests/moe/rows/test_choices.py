"""Sorted choices against loops over the choices."""

import random

import pytest
import torch

from comm_collectives.moe.rows.choices import bags_of, sort_choices


def test_choices_are_sorted_by_expert_then_token() -> None:
    choices = sort_choices(torch.tensor([[3, 0], [-1, 3], [0, 0]]), num_experts=4)
    assert choices.counts_E == (3, 0, 0, 2)
    assert choices.order_N.tolist() == [1, 4, 5, 0, 3]
    assert choices.token_N.tolist() == [0, 2, 2, 0, 1]


def test_bags_and_weights_equal_loops() -> None:
    seed = random.randrange(10**9)
    generator = torch.Generator().manual_seed(seed)
    for tokens, num_choices, lowest in ((5, 3, -1), (5, 3, 0), (0, 3, 0), (4, 0, 0), (3, 2, -1)):
        idx = torch.randint(lowest, 4, (tokens, num_choices), generator=generator)
        choices = sort_choices(idx, num_experts=4)
        rows = torch.randn(choices.order_N.numel() + 2, 3, generator=generator).double()
        position = torch.randperm(rows.shape[0], generator=generator)[:-2]
        row_of = {int(c): rows[p] for c, p in zip(choices.order_N, position, strict=True)}
        want = torch.zeros(tokens, 3, dtype=torch.float64)
        for choice in sorted(row_of):
            want[choice // num_choices] += row_of[choice]
        got = choices.bags(position).sum(rows)
        assert torch.equal(got, want), f"seed {seed}"
        weights = torch.rand(tokens, num_choices, generator=generator)
        back = choices.unsorted_weights(choices.sorted_weights(weights))
        assert torch.equal(back, weights.where(idx >= 0, 0)), f"seed {seed}"


def test_choices_know_themselves() -> None:
    seed = random.randrange(10**9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        idx = torch.randint(-1, 3, (4, 2), generator=generator)
        other = torch.randint(-1, 3, (4, 2), generator=generator)
        choices = sort_choices(idx, num_experts=3)
        assert choices.describes(idx.clone())
        assert choices.describes(other) == torch.equal(idx, other), f"seed {seed}"
        assert not choices.describes(idx.view(2, 4))


def test_bags_keep_the_order_of_their_rows() -> None:
    bags = bags_of(torch.tensor([2, 0, 2, 2]), torch.tensor([5, 1, 3, 4]), num_bags=4)
    assert bags.slots.tolist() == [1, 5, 3, 4]
    assert bags.offsets is not None
    assert bags.offsets.tolist() == [0, 1, 1, 4]


@pytest.mark.parametrize("choice", [-2, 4, 2**60, -(2**60)])
def test_choices_outside_are_refused_before_anything_is_allocated(choice: int) -> None:
    with pytest.raises(ValueError, match=f"topk_idx holds {choice} but num_experts=4"):
        sort_choices(torch.tensor([[0], [choice]]), num_experts=4)
