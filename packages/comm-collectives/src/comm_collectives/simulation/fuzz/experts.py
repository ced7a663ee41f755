"""The fuzzer's MoE layer: dispatch, experts that scale by their number, combine, and backward.

Legend: T tokens of all ranks, D hidden size, K choices per token, E experts.
"""

from itertools import pairwise
from typing import final

import torch

from comm_collectives.moe import MoeOptions, combine, dispatch
from comm_collectives.simulation import SimRank
from comm_collectives.simulation.fuzz.cases import Case, Draw, Results

_HIDDEN = 4


@final
class Experts(Case):
    """A token's result is its row times the sum of weight * (expert + 1) over its choices."""

    name = "dispatch, combine"

    def __init__(self, draw: Draw) -> None:
        chance, size = draw.chance, draw.size
        self._size = size
        self._per_rank = chance.choice((1, 2))
        self._alignment = chance.choice((1, 4))
        self._grad = chance.random() < 0.5
        self._options = _draw_options(draw)
        self._counts = draw.counts(5)
        tokens, choices = sum(self._counts), chance.choice((1, 3))
        self._x_TD = draw.numbers(-20, 20, tokens, _HIDDEN).float()
        self._weights_TK = draw.numbers(1, 4, tokens, choices).float()
        # Often few experts, so that many get nothing; now and then no expert for a choice.
        popular = chance.choice((1, self.num_experts))
        self._idx_TK = draw.numbers(-1 if chance.random() < 0.3 else 0, popular, tokens, choices)
        starts = torch.tensor([0, *self._counts]).cumsum(0).tolist()
        self._slices = [slice(a, b) for a, b in pairwise(starts)]

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self._size * self._per_rank

    def call(self, rank: SimRank) -> Results:
        """One layer on one rank."""
        mine = self._slices[rank.rank]
        x_TD = self._x_TD[mine].clone().requires_grad_(self._grad)
        weights_TK = self._weights_TK[mine].clone().requires_grad_(self._grad)
        sent = dispatch(
            x_TD,
            self._idx_TK[mine],
            weights_TK,
            num_experts=self.num_experts,
            group=rank.group,
            expert_alignment=self._alignment,
            options=self._options,
        )
        counts = torch.tensor(sent.num_tokens_per_expert)
        first = rank.rank * self._per_rank + 1
        scale_R = torch.arange(first, first + self._per_rank).repeat_interleave(counts)
        y_RD = sent.x * (sent.topk_weights * scale_R)[:, None]
        out_TD = combine(y_RD, sent.handle)
        results = [sent.x.detach(), sent.topk_weights.detach(), counts, out_TD.detach()]
        if self._grad:
            out_TD.sum().backward()
            results += [x for x in (x_TD.grad, weights_TK.grad) if x is not None]
        return results

    def expected(self) -> list[Results]:
        """Everything for all ranks at once, then cut by rank."""
        x_RD, weights_R, counts_E = self._received()
        scale_TK = (self._idx_TK + 1).float()  # 0 for no expert
        factor_T = (self._weights_TK * scale_TK).sum(1)
        out_TD = self._x_TD * factor_T[:, None]
        grad_x_TD = factor_T[:, None].expand_as(self._x_TD)
        grad_weights_TK = scale_TK * self._x_TD.sum(1)[:, None]
        counts_WL = counts_E.view(self._size, self._per_rank)
        rows_W = counts_WL.sum(1).tolist()
        received = zip(x_RD.split(rows_W), weights_R.split(rows_W), counts_WL, strict=True)
        results: list[Results] = []
        for mine, at_experts in zip(self._slices, received, strict=True):
            values = [*at_experts, out_TD[mine]]
            if self._grad:
                values += [grad_x_TD[mine], grad_weights_TK[mine]]
            results.append(values)
        return results

    def _received(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and weights of all experts one after another, padded, and how many each has."""
        flat = self._idx_TK.reshape(-1)
        chosen = (flat >= 0).nonzero().view(-1)
        order = chosen[torch.argsort(flat[chosen], stable=True)]
        expert = flat[order]
        counts_E = torch.bincount(expert, minlength=self.num_experts)
        padded_E = -(-counts_E // self._alignment) * self._alignment
        shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
        place = torch.arange(len(order)) + shift_E[expert]
        x_RD = torch.zeros(int(padded_E.sum()), _HIDDEN)
        weights_R = torch.zeros(len(x_RD))
        x_RD[place] = self._x_TD[order // self._idx_TK.shape[1]]
        weights_R[place] = self._weights_TK.reshape(-1)[order]
        return x_RD, weights_R, padded_E


def _draw_options(draw: Draw) -> MoeOptions:
    route = draw.chance.choice(("flat", "flat", "dedup", "hierarchical"))
    if route == "hierarchical":
        nodes = [n for n in range(1, draw.size + 1) if draw.size % n == 0]
        return MoeOptions(route="hierarchical", ranks_per_node=draw.chance.choice(nodes))
    return MoeOptions(route="dedup") if route == "dedup" else MoeOptions()
