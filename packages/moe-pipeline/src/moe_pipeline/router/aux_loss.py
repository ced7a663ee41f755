"""The losses that keep a router in order, the same numbers in every layout.

The balancing loss of a layer is `coef * E * sum_e f_e * P_e` with `f_e` the fraction of routed rows
that the router sent to expert e, before any is dropped, and `P_e` the mean probability of expert e
(Switch Transformer, arXiv 2101.03961, eq. 4; GShard). `f` sums to 1 and is not differentiated.
transformers' `load_balancing_loss_func` counts rows per token instead of per routed row, so it is k
times this one. Its scope (`moe_aux_loss_scope`) says over what f and P are taken:

- `microbatch`: all tokens of the global microbatch, wherever they are.
- `sequence`: each sequence, then the mean over the sequences of the global microbatch
  (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), whole or split over `groups.sequence`.
- `global_batch`: all microbatches of a step (Qwen, arXiv 2501.11873). f is only known after the
  last forward, so a microbatch has no share of its own: see `global_batch_loss`, and
  `check_aux_scope` for the schedules that allow it.

The z-loss is `coef * mean_t logsumexp(logits_t)^2` over the tokens of the global microbatch
(ST-MoE, arXiv 2202.08906, eq. 5).

Invariant: each rank computes its *share*. The shares of all ranks that hold tokens of the
microbatch sum to the loss, and so do their gradients; nothing is ever scaled by a number of ranks,
microbatches or recomputes. Only integers are reduced, in forward; nothing in backward. A plan that
knows the counts (recompute) communicates nothing.

    shares = router_losses(router(x_TD), config, sequence_shape=(B, S), groups=groups)
    (task_loss + shares.aux_loss + shares.z_loss).backward()

Dims: T tokens of this rank without padding (N where their places matter), E experts, X = E + 1
(counts per expert, then tokens), B sequences, S their places on this rank, K choices per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from comm_collectives import all_reduce
from moe_pipeline._checks import check_type
from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoEValueError
from moe_pipeline.groups import ALONE, MoEGroups
from moe_pipeline.routing_plan import Routed, RoutingPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalanceTerms:
    """What one microbatch on one rank brings to the balancing loss of a whole step.

    Attributes:
        counts_E: int64 [E], routed rows per expert of this rank's tokens.
        prob_sum_E: [E], fp32 or fp64, sum of the tokens' probabilities; differentiable.
        num_tokens: tokens of this rank.
    """

    counts_E: Tensor
    prob_sum_E: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossShares:
    """This rank's shares of a router's losses, coefficients included."""

    aux_loss: Tensor  # 0-d, fp32 or fp64, the balancing loss; 0 under scope "global_batch"
    z_loss: Tensor  # 0-d, likewise
    load_E: Tensor  # int64 [E], routed rows per expert of the global microbatch; no gradient
    # the router's plan with the counts of the global microbatch filled in: keep this one for a
    # recompute
    plan: RoutingPlan
    # for `global_batch_loss`; None under other scopes and outside training
    balance: BalanceTerms | None = None


def router_losses(
    routed: Routed,
    config: MoEConfig,
    *,
    sequence_shape: tuple[int, int] | None,
    token_idx_N: Tensor | None = None,
    groups: MoEGroups = ALONE,
    training: bool = True,
) -> LossShares:
    """This rank's shares of the losses of one layer and microbatch.

    Collective if `training`, like `count_load`. A coefficient of 0 makes a loss that is 0 and has
    no gradient. In evaluation nothing is communicated, so that ranks may evaluate different numbers
    of batches: the losses are 0 and `load_E` is that of this rank's tokens.

    A trainer takes the mean of the shares of its microbatches, as it does with the task's loss.

    Args:
        routed: the router's result for this rank's tokens; T may be 0.
        config: coefficients and scope.
        sequence_shape: (B, S) of this rank's tokens, or None when they have no sequence structure.
        token_idx_N: int64 [T], where in B * S the router's tokens stand, the other places being
            padding; None: B * S is T.
        groups: `tokens`, `sequence` and `timeout_s` are used.
        training: whether losses are wanted.
    """
    if not training:
        zero = routed.probs_TE.new_zeros(())
        load_E = routed.plan.counts_E
        return LossShares(aux_loss=zero, z_loss=zero.clone(), load_E=load_E, plan=routed.plan)
    plan = count_load(
        routed.plan, config, sequence_shape=sequence_shape, token_idx_N=token_idx_N, groups=groups
    )
    load_E, num_tokens, _ = _known(plan, config)
    balance = None
    if config.losses.moe_aux_loss_scope == "global_batch":
        probs_TE = routed.probs_TE
        balance = BalanceTerms(
            counts_E=plan.counts_E, prob_sum_E=probs_TE.sum(dim=0), num_tokens=probs_TE.shape[0]
        )
    return LossShares(
        aux_loss=_aux_share(routed.probs_TE, plan, config, sequence_shape, token_idx_N),
        z_loss=_z_share(routed.logits_TE, num_tokens, config),
        load_E=load_E,
        plan=plan,
        balance=balance,
    )


def count_load(
    plan: RoutingPlan,
    config: MoEConfig,
    *,
    sequence_shape: tuple[int, int] | None,
    token_idx_N: Tensor | None = None,
    groups: MoEGroups = ALONE,
) -> RoutingPlan:
    """`plan` with the counts of the global microbatch that losses and bias update need.

    Collective over `groups.tokens`, one all-reduce of E + 2 integers, and under scope "sequence"
    before that over `groups.sequence`, one of B * (E + 1): on every rank, whatever its number of
    tokens. Without groups, or with a plan that has its counts, nothing is communicated.

    Args:
        plan: of this rank's tokens.
        config: the scope.
        sequence_shape: (B, S) of this rank's tokens; needed under scope "sequence" alone. Ranks of
            `groups.sequence` have the same B, and S may differ, also be 0.
        token_idx_N: as in `router_losses`; a sequence of padding alone is none.
        groups: `tokens`, `sequence` and `timeout_s` are used.
    """
    by_sequence = _by_sequence(config)
    if plan.load_E is not None:
        _known(plan, config)
        return plan
    num_tokens = plan.topk_idx_TK.shape[0]
    num_sequences, sequence_load_BX = 0, None
    if by_sequence:
        shape = _checked_shape(sequence_shape, num_tokens, token_idx_N)
        sequence_load_BX = _sequence_load(plan, shape, token_idx_N, groups)
        # Ranks that hold parts of the same sequences count them once.
        first = groups.sequence is None or dist.get_rank(groups.sequence) == 0
        num_sequences = _num_sequences(sequence_load_BX, token_idx_N) if first else 0
    load_E = plan.counts_E
    if groups.tokens is not None:
        own_X = _with_counts(load_E, num_tokens, num_sequences)
        total_X = all_reduce(own_X, group=groups.tokens, timeout_s=groups.timeout_s)
        load_E = total_X[:-2]
        num_tokens, num_sequences = total_X[-2:].tolist()
    return replace(
        plan,
        load_E=load_E,
        num_parts=num_sequences if by_sequence else num_tokens,
        num_tokens=num_tokens,
        sequence_load_BX=sequence_load_BX,
    )


def global_batch_loss(
    terms: Sequence[BalanceTerms], config: MoEConfig, groups: MoEGroups = ALONE
) -> Tensor:
    """This rank's share of the balancing loss of one layer over all microbatches of a step.

    The sum of `global_batch_shares`, which see. Add it once to the mean loss of the step, and do
    not divide it by the number of microbatches.
    """
    return torch.stack(global_batch_shares(terms, config, groups)).sum()


def global_batch_shares(
    terms: Sequence[BalanceTerms], config: MoEConfig, groups: MoEGroups = ALONE
) -> tuple[Tensor, ...]:
    """The summands of `global_batch_loss`, one 0-d share per microbatch of this rank.

    They depend on each other's counts but not on each other's graphs, so that each can go into the
    backward of its own microbatch. Collective over `groups.tokens` (one all-reduce of E + 1
    integers), once for each layer, after the last forward; ranks may differ in the number of terms.
    Nothing is communicated without a group or with a coefficient of 0.

    Args:
        terms: of one layer, from `LossShares.balance`, at least one.
        config: the coefficient.
        groups: `tokens` and `timeout_s` are used.

    Raises:
        ValueError: no terms.
        TypeError: a term that is none, as under other scopes.
    """
    if not terms:
        raise MoEValueError("no terms: give those of every microbatch of the step, at least one")
    for term in terms:
        check_type("each term", term, BalanceTerms, hint=" (of training, scope 'global_batch')")
    if config.losses.router_aux_loss_coef == 0:
        return tuple(term.prob_sum_E.new_zeros(()) for term in terms)
    counts_E = torch.stack([term.counts_E for term in terms]).sum(dim=0)
    load_X = _with_counts(counts_E, sum(term.num_tokens for term in terms))
    if groups.tokens is not None:
        load_X = all_reduce(load_X, group=groups.tokens, timeout_s=groups.timeout_s)
    factor_E = _factors(load_X[None], 1, config, terms[0].prob_sum_E.dtype)[0]
    return tuple((factor_E * term.prob_sum_E).sum() for term in terms)


def _aux_share(
    probs_TE: Tensor,
    plan: RoutingPlan,
    config: MoEConfig,
    sequence_shape: tuple[int, int] | None,
    token_idx_N: Tensor | None,
) -> Tensor:
    """Sum over this rank's sequences, or over its tokens as one sequence, of factor times P."""
    load_E, num_tokens, num_parts = _known(plan, config)
    losses = config.losses
    if losses.router_aux_loss_coef == 0 or losses.moe_aux_loss_scope == "global_batch":
        return probs_TE.new_zeros(())
    if not _by_sequence(config) or plan.sequence_load_BX is None:
        load_X = _with_counts(load_E, num_tokens)
        factor_BE = _factors(load_X[None], 1, config, probs_TE.dtype)
        return (factor_BE[0] * probs_TE.sum(dim=0)).sum()
    shape = _checked_shape(sequence_shape, probs_TE.shape[0], token_idx_N)
    factor_BE = _factors(plan.sequence_load_BX, num_parts, config, probs_TE.dtype)
    if token_idx_N is not None:
        factor_NE = factor_BE.index_select(0, _sequence_of(token_idx_N, shape))
        return (factor_NE * probs_TE).sum()
    # Not -1: of no tokens it could be anything.
    probs_BSE = probs_TE.reshape(*shape, probs_TE.shape[1])
    return (factor_BE * probs_BSE.sum(dim=1)).sum()


def _with_counts(load_E: Tensor, *counts: int) -> Tensor:
    """The load and these numbers behind it; filled on the device, for copies stop the host."""
    return torch.cat([load_E, *(load_E.new_full((1,), count) for count in counts)])


def _z_share(logits_TE: Tensor, num_tokens: int, config: MoEConfig) -> Tensor:
    coef = config.losses.router_z_loss_coef
    if coef == 0:
        return logits_TE.new_zeros(())
    return torch.logsumexp(logits_TE, dim=1).square().sum() * (coef / max(num_tokens, 1))


def _factors(load_BX: Tensor, num_parts: int, config: MoEConfig, dtype: torch.dtype) -> Tensor:
    """What a token's probabilities are multiplied by, [B, E]: `coef * E * f / tokens / parts`."""
    counts_BE, tokens_B1 = load_BX[:, :-1], load_BX[:, -1:]
    f_BE = counts_BE.to(dtype) / counts_BE.sum(dim=1, keepdim=True).clamp(min=1)
    scale = config.losses.router_aux_loss_coef * config.num_experts / max(num_parts, 1)
    return f_BE * (scale / tokens_B1.clamp(min=1).to(dtype))


def _sequence_load(
    plan: RoutingPlan, shape: tuple[int, int], token_idx_N: Tensor | None, groups: MoEGroups
) -> Tensor:
    """Rows per expert and tokens of each whole sequence, int64 [B, E + 1]."""
    (num_sequences, length), num_experts = shape, plan.num_experts
    idx_TK = plan.topk_idx_TK if plan.undropped_idx_TK is None else plan.undropped_idx_TK
    # The last column takes what is not an expert (-1), before it takes the tokens.
    column_TK = idx_TK.where(idx_TK >= 0, num_experts)
    load_BX = idx_TK.new_zeros(num_sequences, num_experts + 1)
    if token_idx_N is None:
        idx_BR = column_TK.reshape(num_sequences, length * idx_TK.shape[1])
        load_BX.scatter_add_(1, idx_BR, torch.ones_like(idx_BR))
        load_BX[:, -1] = length
    else:
        sequence_N = _sequence_of(token_idx_N, shape)
        cell_NK = sequence_N[:, None] * (num_experts + 1) + column_TK
        load_BX.view(-1).scatter_add_(0, cell_NK.flatten(), torch.ones_like(cell_NK).flatten())
        load_BX[:, -1] = 0
        load_BX[:, -1].scatter_add_(0, sequence_N, torch.ones_like(sequence_N))
    if groups.sequence is not None:
        load_BX = all_reduce(load_BX, group=groups.sequence, timeout_s=groups.timeout_s)
    return load_BX


def _num_sequences(load_BX: Tensor, token_idx_N: Tensor | None) -> int:
    """How many sequences have a token; all where there is no padding."""
    return load_BX.shape[0] if token_idx_N is None else int((load_BX[:, -1] > 0).sum())


def _sequence_of(token_idx_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """The sequence of each token, from its place in B * S."""
    return token_idx_N.div(max(shape[1], 1), rounding_mode="floor")


def _known(plan: RoutingPlan, config: MoEConfig) -> tuple[Tensor, int, int]:
    """`load_E`, `num_tokens` and `num_parts` of a plan that has all counts of the scope."""
    lacks_sequences = _by_sequence(config) and plan.sequence_load_BX is None
    if plan.load_E is None or plan.num_tokens is None or plan.num_parts is None or lacks_sequences:
        names = ("load_E", "num_tokens", "num_parts", "sequence_load_BX")
        present = [name for name in names if getattr(plan, name) is not None]
        raise MoEValueError(
            f"the plan has the counts {present}, and {config.losses.moe_aux_loss_scope!r} losses "
            f"need {list(names if _by_sequence(config) else names[:3])}; keep the plan that "
            "count_load returns, or LossShares.plan"
        )
    return plan.load_E, plan.num_tokens, plan.num_parts


def _by_sequence(config: MoEConfig) -> bool:
    return config.losses.moe_aux_loss_scope == "sequence"


def _checked_shape(
    shape: tuple[int, int] | None, num_tokens: int, token_idx_N: Tensor | None
) -> tuple[int, int]:
    if shape is None:
        raise MoEValueError(
            "moe_aux_loss_scope='sequence' needs to know the sequences: "
            "pass the layer [batch, sequence, hidden] instead of [tokens, hidden]"
        )
    # With padding it is the caller that has held the places against the shape.
    if shape[0] * shape[1] != num_tokens and token_idx_N is None:
        raise MoEValueError(
            f"sequence_shape={shape} holds {shape[0] * shape[1]} tokens, the router got "
            f"{num_tokens}; give (batch, sequence) of the tokens on this rank"
        )
    return shape
