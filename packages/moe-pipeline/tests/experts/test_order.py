import pytest
import torch

from moe_pipeline.experts.order import ExpertOrder


def test_rows_are_sorted_by_expert_and_then_by_token():
    order = ExpertOrder.of(torch.tensor([[1, 3], [-1, 1], [0, 1]]), num_experts=5)
    assert order.choice_R.tolist() == [4, 0, 3, 5, 1]
    assert order.num_tokens_per_expert == (1, 3, 0, 1, 0)


def test_every_choice_of_an_expert_is_there_once(seed):
    idx = torch.randint(-1, 60, (50, 7))
    order = ExpertOrder.of(idx, num_experts=60)
    chosen = idx.flatten()[order.choice_R]
    assert order.choice_R.unique().numel() == (idx >= 0).sum().item()
    assert torch.equal(chosen, chosen.sort().values)
    assert order.num_tokens_per_expert == tuple((idx == e).sum().item() for e in range(60))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_choices_give_no_rows(shape):
    order = ExpertOrder.of(torch.zeros(shape, dtype=torch.int64), num_experts=3)
    assert (order.choice_R.tolist(), order.num_tokens_per_expert) == ([], (0, 0, 0))


def test_an_expert_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"names expert 4, but there are 4 experts; use 0\.\.3"):
        ExpertOrder.of(torch.tensor([[4]]), num_experts=4)
    with pytest.raises(ValueError, match=r"names expert -3, but there are 4 experts"):
        ExpertOrder.of(torch.tensor([[1, -2], [-1, -3]]), num_experts=4)
