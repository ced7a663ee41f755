"""The MoE layer: router, dispatch, experts, combine, and what stands beside them.

Parameters are named as in transformers' `Qwen3MoeSparseMoeBlock` (`gate.weight`,
`experts.gate_up_proj`, `experts.down_proj`) and its relatives (`shared_experts.*`,
`shared_expert_gate.weight`, `fc1_latent_proj.weight`), so that a state dict fits both.

Without process groups (`MoEGroups`) it is an ordinary module.

    layer = MoELayer(config)
    out = layer(x)                       # [batch, sequence, hidden] or [tokens, hidden]
    (task_loss(out.hidden) + out.aux_loss + out.z_loss).backward()

Invariant: hidden states, losses (their shares summed) and gradients are those of one process, for
every way to lay ranks over dp, ep, etp and sequence parallelism. Each rank computes what its own
tokens, or its own experts, contribute to a gradient; the sums over ranks are the caller's:

- of `experts.*`: over the ranks that hold the same slices of the same experts
  (`fold_experts(...).expert_dp`), nobody else has a part of these;
- of `shared_experts.*` with `MoEGroups.tp`: over the ranks that hold the same part of its width;
- of every other parameter: over all ranks with tokens (`MoEGroups.tokens`). Sums, never means.

Dims: T tokens of this rank (N of them without padding), R routed rows received, D hidden,
E experts of the layer, K choices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from comm_collectives.moe import Dispatched
from moe_pipeline._checks import check_type
from moe_pipeline._torch_private import has_own_call
from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.groups import ALONE, MoEGroups
from moe_pipeline.layer.etp import gather_rows, return_rows, share_counts
from moe_pipeline.layer.latent import latent_projections
from moe_pipeline.layer.local_experts import Experts
from moe_pipeline.layer.padding import check_token_idx, with_padding, without_padding
from moe_pipeline.layer.shared_expert import SharedExpert, SharedExpertGate, in_parts
from moe_pipeline.layer.token_dispatch import TOGETHER, DispatchOptions, TokenExchange
from moe_pipeline.recomputation import is_replaying, keep_plan, recorded, replayed_plan
from moe_pipeline.router import BalanceTerms, TopKRouter, router_losses
from moe_pipeline.routing_plan import Routed, RoutingPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoEOutput:
    """What an MoE layer returns.

    In evaluation no counts are exchanged: losses are 0 and `load_E` is that of this rank's tokens.

    Attributes:
        hidden: same shape and dtype as the input.
        aux_loss: 0-d, this rank's share of the load-balancing loss, coefficient included; summed
            over the ranks of `groups.tokens` it is the loss of the global microbatch. Under scope
            "global_batch" it is 0, and `balance` is for `global_batch_loss`.
        z_loss: 0-d, this rank's share of the router z-loss, likewise.
        load_E: int64 [E], routed rows per expert of the global microbatch; no gradient; the
            caller's own.
        topk_idx_TK: int64 [T, K], the experts of each token, -1 for none (padding has none); no
            gradient. Give it back to `forward` to replay the routing. It is the plan's: not to be
            changed in place.
        balance: what the balancing loss of a whole step is made of; None under other scopes.
    """

    hidden: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    load_E: Tensor
    topk_idx_TK: Tensor
    balance: BalanceTerms | None = None


@final
class MoELayer(nn.Module):
    """A sparse block of experts; see the module's docstring.

    Initial weights come from torch's generator, in the order of the parameters, so they are not
    those of another layout: ranks of one seed would even hold the same experts. Where ranks share a
    layer, load a state, or draw rows by their global number (`counter_normal`).

    Args:
        config: sizes, routing rule, losses, experts.
        groups: who shares experts and tokens.
        device: of the parameters.
        dtype: of the parameters.
        noise_key: which stream the router's input jitter comes from; give each layer its own.
        dispatch: how tokens travel to the experts of other ranks.

    Raises:
        ValueError: `num_experts` is not divisible by the size of `groups.ep`, nor the sum of its
            parts, or `moe_intermediate_size` not divisible by the size of `groups.etp`; or
            `dispatch` overlaps a shared expert that is not there, or that ranks share.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        groups: MoEGroups = ALONE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        noise_key: int = 0,
        dispatch: DispatchOptions = TOGETHER,
    ) -> None:
        check_type("config", config, MoEConfig)
        check_type("groups", groups, MoEGroups)
        check_type("dispatch", dispatch, DispatchOptions)
        super().__init__()
        num_local_experts = groups.local_experts(config.num_experts)
        if dispatch.overlaps_shared_expert and (config.shared_expert is None or groups.tp):
            why = "ranks of groups.tp gather tokens for it" if groups.tp else "there is none"
            raise MoEValueError(
                f"dispatch.overlaps_shared_expert=True, but {why}: the layer has no shared expert "
                "that needs nothing of other ranks; leave it out, or give a layer that has one"
            )
        self.config = config
        self.groups = groups
        self.exchange = TokenExchange(
            options=dispatch,
            num_experts=config.num_experts,
            parts=groups.ep_parts,
            num_local_experts=num_local_experts,
            group=groups.ep,
            timeout_s=groups.timeout_s,
        )
        self.gate = TopKRouter(config, device=device, dtype=dtype, noise_key=noise_key)
        self.experts = Experts(
            config,
            num_local_experts=num_local_experts,
            etp_rank=groups.etp_rank,
            etp_size=groups.etp_size,
            device=device,
            dtype=dtype,
        )
        self.shared_experts: SharedExpert | None = None
        self.shared_expert_gate: SharedExpertGate | None = None
        if config.shared_expert is not None:
            self.shared_experts = SharedExpert(
                config, tp_size=groups.tp_size, device=device, dtype=dtype
            )
            if config.shared_expert.moe_shared_expert_gate:
                self.shared_expert_gate = SharedExpertGate(config, device=device, dtype=dtype)
        self.fc1_latent_proj: nn.Linear | None = None
        self.fc2_latent_proj: nn.Linear | None = None
        if config.moe_latent_size is not None:
            projections = latent_projections(config, device=device, dtype=dtype)
            self.fc1_latent_proj, self.fc2_latent_proj = projections

    def forward(
        self,
        x: Tensor,
        *,
        topk_idx_TK: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        token_idx_N: Tensor | None = None,
    ) -> MoEOutput:
        """Send each token through its experts.

        Collective: every rank of the groups must call it, and then its backward, in the same order,
        also with zero tokens. In a recompute (`moe_pipeline.recompute`) the routing of the first
        forward is replayed.

        Args:
            x: [batch, sequence, D] or [tokens, D], in the dtype of the parameters.
            topk_idx_TK: int64 [T, K], the experts to send each token to instead of those that the
                router would choose; -1 for none. Weights and losses still come from the router.
            token_ids_T: int64 [T], the global number of each token, which keys the router's noise.
            token_idx_N: int64 [N], the places among the T that hold tokens, each once; all others
                are padding, which goes to no expert, counts nowhere and comes out as 0
                (`moe_pipeline.layer.padding`). None: there is none.

        Raises:
            ValueError: another shape, or [tokens, D] under `moe_aux_loss_scope="sequence"`.
            TypeError: `x` in another dtype than the parameters.
        """
        self._check(x)
        x_TD = x.reshape(-1, x.shape[-1])
        num_places = x_TD.shape[0]
        if token_idx_N is not None:
            check_token_idx(token_idx_N, num_places)
            x_TD = x_TD.index_select(0, token_idx_N)
            topk_idx_TK = without_padding("topk_idx_TK", topk_idx_TK, token_idx_N, num_places)
            token_ids_T = without_padding("token_ids_T", token_ids_T, token_idx_N, num_places)
        routed = self._route(x_TD, topk_idx_TK, token_ids_T)
        shares = router_losses(
            routed,
            self.config,
            sequence_shape=(x.shape[0], x.shape[1]) if x.dim() == 3 else None,
            token_idx_N=token_idx_N,
            groups=self.groups,
            training=self.training,
        )
        shared = None
        if self.shared_experts is not None:
            shared = partial(self._shared, x, x_TD, token_idx_N)
        hidden_TD = self._all_experts(x_TD, routed.topk_weights_TK, shares.plan, shared)
        hidden_TD = with_padding(hidden_TD, token_idx_N, num_places)
        # Last, so that a forward that fails has not counted.
        if self.training and not is_replaying():
            self.gate.count(shares.load_E)
        return MoEOutput(
            hidden=hidden_TD.to(x.dtype).view(x.shape),  # autocast may have left another
            aux_loss=shares.aux_loss,
            z_loss=shares.z_loss,
            load_E=shares.load_E.clone(),  # the plan's own is read again by a recompute
            topk_idx_TK=with_padding(routed.plan.topk_idx_TK, token_idx_N, num_places, fill=-1),
            balance=shares.balance,
        )

    def _route(
        self, x_TD: Tensor, topk_idx_TK: Tensor | None, token_ids_T: Tensor | None
    ) -> Routed:
        """Choose experts, in a recompute those of the first forward."""
        replayed = replayed_plan(self)
        if replayed is not None:
            return self._route_again(x_TD, replayed, token_ids_T)
        routed: Routed = self.gate(
            x_TD, groups=self.groups, topk_idx_TK=topk_idx_TK, token_ids_T=token_ids_T
        )
        return routed

    def _route_again(
        self, x_TD: Tensor, replayed: RoutingPlan, token_ids_T: Tensor | None
    ) -> Routed:
        """Route by the plan of the first forward, which goes on to losses and dispatch whole."""
        routed: Routed = self.gate(
            x_TD,
            groups=self.groups,
            topk_idx_TK=replayed.topk_idx_TK,
            token_ids_T=token_ids_T,
            logits_TE=replayed.logits_TE,
        )
        return replace(routed, plan=replayed)

    def _all_experts(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        plan: RoutingPlan,
        shared: Callable[[], Tensor] | None,
    ) -> Tensor:
        """What the chosen experts and the shared one return [T, D]; keeps the plan."""
        rows_TD = x_TD
        if self.fc1_latent_proj is not None:
            rows_TD = self.fc1_latent_proj(x_TD).to(x_TD.dtype)
        alone = self.groups.ep_size == 1 and self.groups.etp_size == 1
        # What FSDP or `recompute_modules` adds to the experts acts on calls of the module alone.
        if alone and not has_own_call(self.experts) and not self.exchange.options.rounds_rows:
            # Nothing travels, and the experts save tokens instead of k rows for each.
            keep_plan(self, plan)
            out_TD = self.experts.forward_tokens(rows_TD, plan.topk_idx_TK, weights_TK)
            shared_TD = None
        else:
            out_TD, shared_TD = self._through_ranks(rows_TD, weights_TK, plan, shared)
        if self.fc2_latent_proj is not None:
            out_TD = self.fc2_latent_proj(out_TD)
        if shared is None:
            return out_TD
        return out_TD + (shared() if shared_TD is None else shared_TD)

    def _shared(self, x: Tensor, x_TD: Tensor, token_idx_N: Tensor | None) -> Tensor:
        """The shared expert's part [T, D] of the tokens of `x`. Collective over `groups.tp`."""
        scale_T1 = None if self.shared_expert_gate is None else self.shared_expert_gate(x_TD)
        shared: SharedExpert = self.shared_experts  # type: ignore[assignment]  # is there
        if self.groups.tp is None:
            return shared(x_TD, scale_T1)  # type: ignore[no-any-return]
        # With padding, so that all ranks know how many positions each has; as zeros, for a gradient
        # of zero times NaN would be NaN in the weights.
        x = with_padding(x_TD, token_idx_N, x.shape[:-1].numel()).view(x.shape)
        out = in_parts(shared, x, self.groups.tp, self.groups.timeout_s).reshape(-1, x.shape[-1])
        out_TD = out if token_idx_N is None else out.index_select(0, token_idx_N)
        return out_TD if scale_T1 is None else out_TD * scale_T1

    def _through_ranks(
        self,
        rows_TD: Tensor,
        weights_TK: Tensor,
        plan: RoutingPlan,
        shared: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Exchange rows with the ranks that share the experts; the plan gets their permutation.

        The second part is what `shared` returned, if it ran meanwhile.
        """
        exchange, routed = self.exchange, (rows_TD, plan.topk_idx_TK, weights_TK)
        # The plan is kept ahead of what the experts record: a recompute takes both in this order.
        if exchange.in_chunks:
            keep_plan(self, plan)
            return exchange.chunk_by_chunk(routed, self._apply_experts), None
        return exchange.all_at_once(
            routed,
            self._apply_experts,
            reuse=plan.handle,
            keep=lambda handle: keep_plan(self, replace(plan, handle=handle)),
            beside=shared if exchange.options.overlaps_shared_expert else None,
        )

    def _apply_experts(self, dispatched: Dispatched) -> Tensor:
        """The local experts' weighted results [R, D], with the slices of the etp group summed."""
        x_RD, weights_R, group = dispatched.x, dispatched.topk_weights, self.groups.etp
        counts = dispatched.num_tokens_per_expert
        if group is None or self.groups.etp_size == 1:
            return self.experts(x_RD, counts, weights_R)  # type: ignore[no-any-return]
        layout = recorded(
            self,
            lambda: share_counts(
                counts, group=group, device=x_RD.device, timeout_s=self.groups.timeout_s
            ),
        )
        x_SD, weights_S = gather_rows(x_RD, weights_R, layout)
        return return_rows(self.experts(x_SD, layout.num_tokens_per_expert, weights_S), layout)

    def _check(self, x: Tensor) -> None:
        if x.dim() not in (2, 3):
            raise MoEValueError(
                "an MoE layer expects [batch, sequence, hidden] or [tokens, hidden], "
                f"got shape {tuple(x.shape)}"
            )
        if x.dim() == 2 and self.groups.tp is not None and self.shared_experts is not None:
            raise MoEValueError(
                "ranks of groups.tp share out the positions of sequences, so an MoE layer expects "
                f"[batch, sequence, hidden], got shape {tuple(x.shape)}"
            )
        if x.shape[-1] != self.config.hidden_size:
            raise MoEValueError(
                f"an MoE layer of hidden_size={self.config.hidden_size} got shape "
                f"{tuple(x.shape)}; its last dim has to be that"
            )
        dtype = self.experts.down_proj.dtype
        if x.dtype != dtype:
            raise MoETypeError(
                f"the experts hold {dtype} and got {x.dtype}; convert the input or the layer"
            )
