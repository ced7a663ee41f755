import pytest
import torch

from moe_pipeline.config import MoEConfig, RouterOptions
from moe_pipeline.router.choice import choose_experts, topk_lowest_index_first


def best(row, k):
    return sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]


def config_for(experts, k, **router):
    return MoEConfig(
        hidden_size=4,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=k,
        router=RouterOptions(**router),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [24, 60])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_ties_go_to_the_lower_index(seed, dtype, columns, k):
    levels = (torch.randint(-2, 3, (200, columns)) / 3).to(dtype)
    got = topk_lowest_index_first(levels, k)
    for row, idx in zip(levels.tolist(), got.tolist(), strict=True):
        assert idx == best(row, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_any_sign_and_size_are_in_order(dtype):
    info = torch.finfo(dtype)
    row = torch.tensor(
        [-0.0, 0.0, info.tiny, -info.tiny, 1.0, -1.0, info.max, info.min, float("-inf"), 1e-3],
        dtype=dtype,
    )
    got = topk_lowest_index_first(row.unsqueeze(0), 10).tolist()[0]
    assert got == [6, 4, 9, 2, 0, 1, 3, 5, 7, 8]


def test_neighbouring_numbers_are_told_apart(seed):
    low = torch.randn(1000)
    high = torch.nextafter(low, torch.tensor(float("inf")))
    assert (topk_lowest_index_first(torch.stack([low, high], 1), 1) == 1).all()


def test_choice_of_non_contiguous_scores_is_right(seed):
    scores = torch.randn(9, 7).t()
    assert torch.equal(topk_lowest_index_first(scores, 2), scores.topk(2).indices)


def groups_then_experts(row, groups, topk_group, k, score):
    size = len(row) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    ranked = [sorted((row[e] for e in own), reverse=True) for own in members]
    scores = [r[0] if score == "max" else r[0] + r[1] for r in ranked]
    allowed = [e for g in best(scores, topk_group) for e in members[g]]
    return sorted(allowed, key=lambda e: (-row[e], e))[:k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["max", "top2_sum"])
@pytest.mark.parametrize(
    ("experts", "groups", "topk_group", "k"),
    [(60, 6, 2, 8), (60, 5, 1, 1), (16, 4, 4, 3), (8, 4, 2, 4), (12, 2, 1, 6)],
)
def test_group_limited_choice_equals_brute_force(
    seed, dtype, score, experts, groups, topk_group, k
):
    # Few levels, so that groups and experts are often equal, and halves, so that sums are exact.
    scores = torch.randint(-6, 7, (100, experts)).to(dtype) / 2
    config = config_for(
        experts, k, n_group=groups, topk_group=topk_group, moe_router_group_score=score
    )
    got = choose_experts(scores, config).tolist()
    for row, idx in zip(scores.tolist(), got, strict=True):
        assert idx == groups_then_experts(row, groups, topk_group, k, score)


def test_experts_without_score_are_chosen_rather_than_those_of_other_groups():
    scores = torch.tensor([[0.0, 0.9, 0.5, 0.4]])
    config = config_for(4, 2, n_group=2, topk_group=1)
    assert choose_experts(scores, config).tolist() == [[1, 0]]


def test_choices_without_tokens_are_empty():
    config = config_for(8, 2, n_group=4, topk_group=2, moe_router_group_score="top2_sum")
    assert choose_experts(torch.empty(0, 8), config).shape == (0, 2)
    assert topk_lowest_index_first(torch.empty(0, 8), 3).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gpu_chooses_as_the_cpu(seed, dtype):
    scores = (torch.randint(-3, 4, (500, 60)) / 3).to(dtype)
    config = config_for(60, 8, n_group=6, topk_group=3)
    assert torch.equal(choose_experts(scores.cuda(), config).cpu(), choose_experts(scores, config))
