"""A routing plan: who goes where, made once for a layer and microbatch, and never changed.

Recompute replays plans, so tokens are never routed twice (`moe_pipeline.recompute`).

Dims: T tokens of this rank, E experts of the layer, K choices per token.
"""

from dataclasses import dataclass

from torch import Tensor

from comm_collectives.moe import DispatchHandle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingPlan:
    """The choice, and the permutation of the rows that follows from it. Holds no gradient.

    Attributes:
        topk_idx_TK: int64 [T, K], chosen experts, best first; -1: none (dropped, or not chosen).
        counts_E: int64 [E], routed rows per expert of this rank's tokens, before any is dropped.
        logits_TE: [T, E] router logits, fp32 or fp64, from which weights and losses follow.
        load_E: int64 [E], `counts_E` of the global microbatch; None before it is known.
        num_parts: tokens of the global microbatch, or sequences under scope "sequence".
        num_tokens: tokens of the global microbatch; None before it is known.
        sequence_load_BX: int64 [B, E + 1], routed rows per expert of each whole sequence, of which
            this rank may hold a part, then the sequence's tokens; only under scope "sequence".
        undropped_idx_TK: int64 [T, K], `topk_idx_TK` before rows were dropped; None: none was.
        handle: permutation, split sizes and receive layout of the dispatch; None before it.
    """

    topk_idx_TK: Tensor
    counts_E: Tensor
    logits_TE: Tensor
    load_E: Tensor | None = None
    num_parts: int | None = None
    num_tokens: int | None = None
    sequence_load_BX: Tensor | None = None
    undropped_idx_TK: Tensor | None = None
    handle: DispatchHandle | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts_E.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """What a router returns.

    Attributes:
        plan: the choice; holds no gradient.
        topk_weights_TK: final weights of the chosen experts, differentiable, in the dtype of the
            scores (fp32, or fp64 for an fp64 model); 0 where nothing is chosen.
        probs_TE: scores over all experts that sum to 1 for a token, differentiable: what the
            balancing loss takes.
        logits_TE: differentiable: what the z-loss takes.
    """

    plan: RoutingPlan
    topk_weights_TK: Tensor
    probs_TE: Tensor
    logits_TE: Tensor
