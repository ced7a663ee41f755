"""Numbers of experts for an exchange that gives every rank as many."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.layer import Experts
from moe_pipeline.layer.expert_slots import ExpertSlots


def test_each_expert_has_a_number_of_its_rank_in_its_order() -> None:
    slots = ExpertSlots.of((1, 3, 0))
    assert (slots.each, slots.total, slots.expert_numbers) == (3, 9, (0, 3, 4, 5))
    assert slots.numbers(torch.tensor([[0, 1, -1], [3, 2, 0]])).tolist() == [[0, 3, -1], [5, 4, 0]]
    assert slots.numbers(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2)


def test_numbers_are_real_before_and_after_fake_ones() -> None:
    chosen, slots = torch.tensor([[0, 1, -1], [3, 2, 0]]), ExpertSlots.of((1, 3, 0))
    for _ in range(2):
        with FakeTensorMode() as mode:
            found = slots.numbers(mode.from_tensor(chosen))
        assert isinstance(found, FakeTensor) and found.shape == (2, 3)
        assert slots.numbers(chosen).tolist() == [[0, 3, -1], [5, 4, 0]]


def test_numbers_rise_with_experts_and_name_their_ranks() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(200):
        parts = [chance.randrange(5) for _ in range(chance.randrange(1, 9))] + [1]
        slots = ExpertSlots.of(parts)
        ranks = [rank for rank, count in enumerate(parts) for _ in range(count)]
        assert [number // slots.each for number in slots.expert_numbers] == ranks, f"seed {seed}"
        assert list(slots.expert_numbers) == sorted(set(slots.expert_numbers)), f"seed {seed}"


@pytest.mark.parametrize("implementation", ["fused", "grouped_mm", "loop"])
def test_a_rank_without_experts_has_empty_gradients(implementation: str) -> None:
    config = MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        experts=ExpertsOptions(experts_implementation=implementation),
    )
    experts = Experts(config, num_local_experts=0)
    x = torch.empty(0, 16, requires_grad=True)
    y = experts(x, (), torch.empty(0))
    assert y.shape == (0, 16)
    y.sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
