"""The load-balancing loss over all microbatches of a step (scope "global_batch").

Its factors are the load of the whole step, known after the stage's last forward, while the loss of
a microbatch is handed to the schedule right after its own forward. So a microbatch brings a term
of value 0 whose gradient is looked up when its backward runs; the last forward of the step counts
the loads, over all ranks with tokens, and fills the factors in. The schedule must run no backward
before the last forward; `check_aux_scope` refuses other schedules.

    deferred = DeferredBalance(config, groups, num_microbatches=4)
    for ... :                                    # each microbatch
        term = deferred.add({3: routed.balance})             # layer -> terms
        (loss + term).backward()                             # after the last add
    deferred.take_loss()                                     # this rank's share, for the record

Dims: E experts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline import MoEConfig, MoEGroups
from moe_pipeline.router import BalanceTerms, global_batch_shares
from moe_train.errors import TrainValueError


@final
class DeferredBalance:
    """Collects a step's terms and gives them their gradients; one for each stage.

    Args:
        config: coefficient of the loss, above 0.
        groups: who shares the tokens.
        num_microbatches: how many calls of `add` make a step.
    """

    def __init__(self, config: MoEConfig, groups: MoEGroups, *, num_microbatches: int) -> None:
        self._config = config
        self._groups = groups
        self._num_microbatches = num_microbatches
        self._terms: list[Mapping[int, BalanceTerms]] = []
        self._factors: list[dict[int, Tensor]] = []
        self._loss: Tensor | None = None

    def add(self, terms: Mapping[int, BalanceTerms]) -> Tensor:
        """The next microbatch's term: 0-d, value 0, with the gradient of its share.

        With the last microbatch of a step collective over `groups.tokens`, once for each layer.

        Args:
            terms: of each layer; the same layers in every microbatch and on every rank.
        """
        if not terms:
            raise TrainValueError("no terms: give those of at least one layer with experts")
        factors: dict[int, Tensor] = {}
        self._terms.append(_detached(terms))
        self._factors.append(factors)
        sums = [term.prob_sum_E for term in terms.values()]
        later: Tensor = _Later.apply(factors, tuple(terms), *sums)
        if len(self._terms) == self._num_microbatches:
            self._fill_in()
        return later

    def take_loss(self) -> Tensor | None:
        """This rank's share of the loss of the step that ended last; None if there is none."""
        loss, self._loss = self._loss, None
        return loss

    def _fill_in(self) -> None:
        shares: list[Tensor] = []
        with torch.enable_grad():
            for layer in self._terms[0]:
                of_layer = [terms[layer] for terms in self._terms]
                parts = global_batch_shares(of_layer, self._config, self._groups)
                shares += parts
                for factors, part, term in zip(self._factors, parts, of_layer, strict=True):
                    # A share is linear in the probabilities: its gradient is the factor.
                    (factors[layer],) = torch.autograd.grad(part, term.prob_sum_E)
        self._loss = torch.stack(shares).detach().sum()
        self._terms, self._factors = [], []


def _detached(terms: Mapping[int, BalanceTerms]) -> dict[int, BalanceTerms]:
    """The same numbers as leaves, so that factors are found without the graph behind them."""
    return {
        layer: replace(term, prob_sum_E=term.prob_sum_E.detach().requires_grad_())
        for layer, term in terms.items()
    }


class _Later(torch.autograd.Function):
    """0; its gradients are looked up in a dictionary, which is filled before the backward."""

    @staticmethod
    def forward(
        ctx: Any, factors: dict[int, Tensor], layers: tuple[int, ...], *prob_sums_E: Tensor
    ) -> Tensor:
        ctx.factors, ctx.layers = factors, layers
        return prob_sums_E[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.factors:
            raise RuntimeError(
                "a backward began before the last forward of its step, when the load of the "
                "global batch is not known; use a schedule that check_aux_scope accepts"
            )
        return None, None, *(grad * ctx.factors[layer] for layer in ctx.layers)
