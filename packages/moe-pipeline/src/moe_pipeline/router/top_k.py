"""Which experts each token goes to, and with what weight.

The choice is an immutable `RoutingPlan`; the weights are differentiable and follow from the logits
and the plan alone (`moe_pipeline.router.scores`), so that whoever holds a plan can compute the
weights again without choosing again. Logits and scores are fp32 whatever the dtype of the model, or
fp64 (`moe_pipeline.router.logits`). The choice is exact, also among ties
(`moe_pipeline.router.choice`), and where it depends on other tokens it is made over the whole
global microbatch (`moe_pipeline.router.capacity`, `.expert_choice`, `.sinkhorn`).

    router = TopKRouter(config)
    routed = router(x_TD)
    routed.plan.topk_idx_TK, routed.topk_weights_TK

Dims: T tokens of this rank, D hidden, E experts of the layer, K choices per token (E under expert
choice, where a token may be taken by any number of experts).
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from moe_pipeline._checks import check_type
from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.groups import ALONE, MoEGroups
from moe_pipeline.ops import counter_uniform
from moe_pipeline.router.capacity import drop_over_capacity
from moe_pipeline.router.choice import choose_experts
from moe_pipeline.router.expert_choice import choose_tokens
from moe_pipeline.router.logits import router_logits, with_values
from moe_pipeline.router.scores import chosen_weights, expert_scores
from moe_pipeline.router.sinkhorn import sinkhorn_offsets
from moe_pipeline.routing_plan import Routed, RoutingPlan


@final
class TopKRouter(nn.Module):
    """The router of an MoE layer, for every rule of `RouterOptions`.

    Parameters and buffers have the names and layouts of transformers' routers: `weight` [E, D];
    `bias` [E] with `moe_router_bias`; with `moe_router_enable_expert_bias` the buffer
    `e_score_correction_bias` [E], fp32, and beside it `tokens_per_expert`, int64 [E], which is not
    saved: what `count` has added up since the last `update_expert_bias`.

    Args:
        config: of the layer.
        device: of parameters and buffers.
        dtype: of parameters.
        noise_key: which stream the input jitter comes from (`moe_pipeline.ops.rng`); give each
        layer
            its own.
    """

    bias: nn.Parameter | None
    e_score_correction_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        noise_key: int = 0,
    ) -> None:
        check_type("config", config, MoEConfig)
        super().__init__()
        self.config = config
        self.noise_key = noise_key
        num_experts, options = config.num_experts, config.router
        shape = (num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias = None
        if options.moe_router_bias:
            bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        if options.moe_router_enable_expert_bias:
            bias_E = torch.empty(num_experts, device=device, dtype=torch.float32)
            load_E = torch.empty(num_experts, device=device, dtype=torch.int64)
            self.register_buffer("e_score_correction_bias", bias_E)
            self.register_buffer("tokens_per_expert", load_E, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution with `initializer_range`; all else is 0."""
        nn.init.normal_(self.weight, std=self.config.initializer_range)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.config.router.moe_router_enable_expert_bias:
            self.e_score_correction_bias.zero_()
            self.tokens_per_expert.zero_()

    def forward(
        self,
        x_TD: Tensor,
        *,
        groups: MoEGroups = ALONE,
        topk_idx_TK: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        logits_TE: Tensor | None = None,
    ) -> Routed:
        """Route [T, D] tokens; T may be 0.

        Collective over `groups.tokens` under a capacity, expert choice and, in training, Sinkhorn,
        unless choices are given: every rank must call it, also without tokens. Otherwise there is
        no communication.

        Args:
            x_TD: any float dtype, any strides.
            groups: of the layer.
            topk_idx_TK: int64 [T, K], the choice as it was made before, -1 for none; nothing is
                chosen or dropped then, and the weights follow from it.
            token_ids_T: integers [T], each token's number in the global batch: keys its jitter, and
                is its position where a choice depends on other tokens (without it that is by rank,
                then by place). New numbers in each step make new noise.
            logits_TE: the logits that the first forward of these tokens returned; they replace the
                values of those computed now, whose gradient stays.

        Raises:
            ValueError: shapes that do not fit; an expert that the layer does not have; jitter in
                training without `token_ids_T`.
            TypeError: choices that are not int64, or token ids that are no integers.
        """
        self._check(x_TD, topk_idx_TK, token_ids_T)
        options = self.config.router
        logits = router_logits(self._with_jitter(x_TD, token_ids_T), self.weight, self.bias)
        if logits_TE is not None:
            logits = with_values(logits, logits_TE)
        scores_TE, probs_TE = expert_scores(logits, options)
        if topk_idx_TK is None:
            wanted_TK = self._choose(logits.detach(), scores_TE.detach(), groups, token_ids_T)
            kept_TK = self._drop(wanted_TK, probs_TE.detach(), groups, token_ids_T)
        else:
            wanted_TK = kept_TK = topk_idx_TK
        plan = RoutingPlan(
            topk_idx_TK=kept_TK,
            counts_E=rows_per_expert(wanted_TK, self.config.num_experts),
            logits_TE=logits.detach(),
            undropped_idx_TK=None if kept_TK is wanted_TK else wanted_TK,
        )
        return Routed(
            plan=plan,
            topk_weights_TK=chosen_weights(logits, scores_TE, kept_TK, options),
            probs_TE=probs_TE,
            logits_TE=logits,
        )

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Counts, which are not saved, begin anew with a bias that is: after `to_empty` they are
        whatever lay there, and of a layer that was made on meta they would stay there.
        """
        super()._load_from_state_dict(*arguments)
        if self.config.router.moe_router_enable_expert_bias:
            device = self.e_score_correction_bias.device
            if self.tokens_per_expert.device != device:
                self.tokens_per_expert = torch.empty_like(self.tokens_per_expert, device=device)
            self.tokens_per_expert.zero_()

    def count(self, load_E: Tensor) -> None:
        """Add the rows per expert of a global microbatch, int64 [E], for `update_expert_bias`.

        Once for each forward, not for its recompute. Nothing to do without an expert bias.
        """
        if self.config.router.moe_router_enable_expert_bias:
            if self.tokens_per_expert.device != load_E.device:  # on meta, where sums go nowhere
                self.tokens_per_expert = torch.zeros_like(load_E)
            self.tokens_per_expert.add_(load_E)

    def _with_jitter(self, x_TD: Tensor, token_ids_T: Tensor | None) -> Tensor:
        eps = self.config.router.moe_input_jitter_eps
        if not self.training or eps == 0.0:
            return x_TD
        if token_ids_T is None:
            raise MoEValueError(
                f"moe_input_jitter_eps={eps} draws noise by token: give token_ids_T, the number of "
                "each token in the global batch, or call eval()"
            )
        dtype = torch.promote_types(x_TD.dtype, torch.float)
        uniform_TD = counter_uniform(self.noise_key, token_ids_T, x_TD.shape[1], dtype=dtype)
        return x_TD.to(dtype) * (1.0 - eps + 2.0 * eps * uniform_TD)

    def _choose(
        self, logits_TE: Tensor, scores_TE: Tensor, groups: MoEGroups, token_ids_T: Tensor | None
    ) -> Tensor:
        options = self.config.router
        if options.moe_router_selection == "expert_choice":
            return choose_tokens(scores_TE, self.config, groups=groups, token_ids_T=token_ids_T)
        if options.moe_router_selection == "sinkhorn" and self.training:
            offset_E = sinkhorn_offsets(logits_TE, groups=groups, token_ids_T=token_ids_T)
            return choose_experts(logits_TE + offset_E, self.config)
        # Of softmax after the choice only logits exist before it.
        by_TE = scores_TE if options.moe_router_pre_softmax else logits_TE
        if options.moe_router_enable_expert_bias:
            by_TE = by_TE + self.e_score_correction_bias
        return choose_experts(by_TE, self.config)

    def _drop(
        self, wanted_TK: Tensor, probs_TE: Tensor, groups: MoEGroups, token_ids_T: Tensor | None
    ) -> Tensor:
        options = self.config.router
        # Experts that choose never take more than their capacity.
        chosen_by_expert = options.moe_router_selection == "expert_choice"
        if options.moe_expert_capacity_factor is None or chosen_by_expert:
            return wanted_TK
        return drop_over_capacity(
            wanted_TK, probs_TE, self.config, groups=groups, token_ids_T=token_ids_T
        )

    def _check(self, x_TD: Tensor, topk_idx_TK: Tensor | None, token_ids_T: Tensor | None) -> None:
        if x_TD.dim() != 2 or x_TD.shape[1] != self.config.hidden_size:
            raise MoEValueError(
                f"the router expects [tokens, hidden_size={self.config.hidden_size}], "
                f"got shape {tuple(x_TD.shape)}"
            )
        num_tokens = x_TD.shape[0]
        if token_ids_T is not None and token_ids_T.shape != (num_tokens,):
            raise MoEValueError(
                f"token_ids_T has shape {tuple(token_ids_T.shape)}, but there are {num_tokens} "
                "tokens; give one number for each"
            )
        if token_ids_T is not None and token_ids_T.is_floating_point():
            raise MoETypeError(f"token_ids_T is {token_ids_T.dtype}; give integers")
        if topk_idx_TK is not None:
            _check_choice(topk_idx_TK, num_tokens, self.config.num_experts)


def rows_per_expert(topk_idx_TK: Tensor, num_experts: int) -> Tensor:
    """Return int64 [E]: how often each expert is chosen; -1 is not counted."""
    bins = topk_idx_TK.reshape(-1) + 1  # no bincount: on a device the host waits for it
    return bins.new_zeros(num_experts + 1).scatter_add_(0, bins, torch.ones_like(bins))[1:]


def _check_choice(topk_idx_TK: Tensor, num_tokens: int, num_experts: int) -> None:
    if topk_idx_TK.dtype != torch.int64:
        raise MoETypeError(f"topk_idx_TK is {topk_idx_TK.dtype}; convert it to torch.int64")
    if topk_idx_TK.dim() != 2 or topk_idx_TK.shape[0] != num_tokens:
        raise MoEValueError(
            f"topk_idx_TK has shape {tuple(topk_idx_TK.shape)}, but there are {num_tokens} tokens; "
            f"give [{num_tokens}, choices]"
        )
    if topk_idx_TK.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(topk_idx_TK))
    if low < -1 or high >= num_experts:
        raise MoEValueError(
            f"topk_idx_TK has values from {low} to {high}; experts are 0 to {num_experts - 1}, "
            "and -1 is none"
        )
