"""Our MoE layer against transformers' Qwen3-MoE block: same state dict, same numbers."""

import pytest
import torch

from moe_pipeline.config import ExpertsOptions, MoEConfig, RouterOptions
from moe_pipeline.layer import MoELayer
from moe_pipeline.router import TopKRouter

qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
transformers = pytest.importorskip("transformers")


def pair(
    experts: int, k: int, norm: bool, implementation: str = "auto"
) -> tuple[torch.nn.Module, MoELayer]:
    """Their block in its plain implementation and our layer, with the same weights."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=k,
        norm_topk_prob=norm,
    )
    config._experts_implementation = "eager"
    theirs = qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    ours = MoELayer(
        MoEConfig(
            hidden_size=64,
            moe_intermediate_size=32,
            num_experts=experts,
            num_experts_per_tok=k,
            router=RouterOptions(norm_topk_prob=norm),
            experts=ExpertsOptions(experts_implementation=implementation),
        )
    )
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize(
    ("experts", "k", "norm"),
    [(8, 2, True), (60, 8, False), (60, 7, True), (5, 1, False), (4, 4, True)],
)
@pytest.mark.parametrize("implementation", ["loop", "fused", "grouped_mm"])
@pytest.mark.parametrize("balanced", [True, False])
def test_values_and_gradients_equal_transformers(
    seed: int, implementation: str, experts: int, k: int, norm: bool, balanced: bool
) -> None:
    theirs, ours = pair(experts, k, norm, implementation)
    x = torch.randn(3, 20, 64)
    if not balanced:
        x[..., 0] = 1.0
        with torch.no_grad():  # expert 0 is always chosen; with k < E the last one never
            for block in (theirs, ours):
                block.gate.weight[0, 0] += 30
                block.gate.weight[-1, 0] -= 30
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, got = theirs(x_theirs), ours(x_ours)
    if not balanced:
        assert got.load_E[0] == 60
        assert got.load_E[-1] == (60 if k == experts else 0)
    assert relative(got.hidden, expected) < 1e-6
    factors = torch.randn_like(x)
    (expected * factors).sum().backward()
    (got.hidden * factors).sum().backward()
    assert relative(x_ours.grad, x_theirs.grad) < 1e-6
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = named[name].grad
        # A saturated router leaves next to no gradient; then rounding is all there is to compare.
        floor = 1e-6 * factors.norm()
        limit = 2e-6 if name == "gate.weight" else 1e-6
        assert (parameter.grad - wanted).norm() <= limit * wanted.norm() + floor, name


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (128, 8), (60, 4)])
@pytest.mark.parametrize("norm", [True, False])
def test_router_equals_transformers(seed: int, experts: int, k: int, norm: bool) -> None:
    theirs, ours = pair(experts, k, norm)
    x = torch.randn(100, 64)
    _, weights, idx = theirs.gate(x)
    routed = TopKRouter.forward(ours.gate, x)
    assert torch.equal(routed.plan.topk_idx_TK, idx)
    torch.testing.assert_close(routed.topk_weights_TK, weights, rtol=1e-6, atol=1e-7)


def test_state_dicts_fit_both_ways(seed: int) -> None:
    theirs, ours = pair(8, 2, True)
    theirs.load_state_dict(ours.state_dict())
    shapes = [{key: value.shape for key, value in m.state_dict().items()} for m in (theirs, ours)]
    assert shapes[0] == shapes[1]


def test_auxiliary_loss_is_that_of_transformers_over_k(seed: int) -> None:
    theirs, ours = pair(8, 3, True)
    x = torch.randn(2, 30, 64)
    logits, _, _ = theirs.gate(x.reshape(-1, 64))
    expected = qwen3_moe.load_balancing_loss_func((logits,), 8, 3) / 3
    coefficient = ours.config.losses.router_aux_loss_coef
    torch.testing.assert_close(ours(x).aux_loss, coefficient * expected)


def test_auxiliary_loss_without_padding_is_that_of_transformers_with_its_mask(seed: int) -> None:
    theirs, ours = pair(8, 3, True)
    x = torch.randn(3, 10, 64)
    is_token = torch.rand(3, 10) < 0.6
    logits, _, _ = theirs.gate(x.reshape(-1, 64))
    expected = qwen3_moe.load_balancing_loss_func((logits,), 8, 3, is_token.long()) / 3
    coefficient = ours.config.losses.router_aux_loss_coef
    out = ours(x, token_idx_N=is_token.flatten().nonzero().flatten())
    torch.testing.assert_close(out.aux_loss, coefficient * expected)
    assert int(out.load_E.sum()) == 3 * int(is_token.sum())
