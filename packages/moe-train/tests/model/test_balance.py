import pytest
import torch
from torch import Tensor

from moe_pipeline import MoEConfig, MoEGroups, RouterLosses
from moe_pipeline.router import BalanceTerms
from moe_train.model.balance import DeferredBalance

EXPERTS, COEF = 5, 0.3
CONFIG = MoEConfig(
    hidden_size=4,
    moe_intermediate_size=4,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    losses=RouterLosses(router_aux_loss_coef=COEF, moe_aux_loss_scope="global_batch"),
)


def random_step(count: int) -> list[dict[int, tuple[Tensor, Tensor]]]:
    """For each microbatch and layer the probabilities [T, E] and the counts [E]; T differs."""
    step = []
    for tokens in range(3, 3 + count):
        layers = {}
        for layer in (1, 4):
            logits = torch.randn(tokens, EXPERTS, dtype=torch.float64)
            probs = logits.softmax(-1).requires_grad_()
            counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=EXPERTS)
            layers[layer] = (probs, counts)
        step.append(layers)
    return step


def terms_of(layers: dict[int, tuple[Tensor, Tensor]]) -> dict[int, BalanceTerms]:
    return {
        layer: BalanceTerms(counts_E=counts, prob_sum_E=probs.sum(0), num_tokens=probs.shape[0])
        for layer, (probs, counts) in layers.items()
    }


def loss_by_definition(step: list[dict[int, tuple[Tensor, Tensor]]]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for layer in (1, 4):
        probs = torch.cat([layers[layer][0] for layers in step])
        counts = torch.stack([layers[layer][1] for layers in step]).sum(0)
        total = total + COEF * EXPERTS * ((counts.double() / counts.sum()) * probs.mean(0)).sum()
    return total


@pytest.mark.parametrize("count", [1, 3])
def test_loss_and_gradients_are_those_of_the_whole_batch(seed: int, count: int) -> None:
    deferred = DeferredBalance(CONFIG, MoEGroups(), num_microbatches=count)
    for _ in range(2):  # one step after the other
        step = random_step(count)
        leaves = [probs for layers in step for probs, _ in layers.values()]
        expected = loss_by_definition(step)
        wanted = torch.autograd.grad(expected, leaves)
        terms = [deferred.add(terms_of(layers)) for layers in step]
        assert all(term.item() == 0.0 for term in terms)
        for term in terms:
            term.backward()
        for leaf, gradient in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(deferred.take_loss(), expected.detach(), rtol=1e-12, atol=0)
        assert deferred.take_loss() is None


def test_a_backward_before_the_last_forward_is_an_error(seed: int) -> None:
    deferred = DeferredBalance(CONFIG, MoEGroups(), num_microbatches=2)
    term = deferred.add(terms_of(random_step(1)[0]))
    with pytest.raises(RuntimeError, match="before the last forward"):
        term.backward()


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no terms"):
        DeferredBalance(CONFIG, MoEGroups(), num_microbatches=1).add({})
