"""The one description of an MoE layer, validated once.

Field names are those of transformers' configurations where it has one (`num_experts_per_tok`,
`routed_scaling_factor`, `n_group`), else Megatron's `moe_*`.

    MoEConfig(hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
    MoEConfig(..., router=RouterOptions(moe_router_score_function="sigmoid", n_group=4))
"""

from dataclasses import dataclass, field, fields

from moe_pipeline._checks import check_count, check_finite, check_type
from moe_pipeline.errors import MoEValueError
from moe_pipeline.scoring import SCORE_FUNCTIONS

AUX_LOSS_SCOPES = ("microbatch", "sequence", "global_batch")
EXPERTS_IMPLEMENTATIONS = ("auto", "fused", "grouped_mm", "loop")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How tokens choose experts, or experts tokens.

    Attributes:
        moe_router_score_function: "softmax", "sigmoid" or another of `moe_pipeline.scoring`.
        moe_router_pre_softmax: softmax over all experts, before the choice; False: over the chosen
            logits (GPT-OSS). Softmax scores only.
        norm_topk_prob: divide the k chosen scores by their sum.
        moe_norm_min: that sum is taken as at least this.
        routed_scaling_factor: factor of the final weights.
        n_group: experts are in so many equal contiguous groups; 1: no groups.
        topk_group: groups from which a token may choose.
        moe_router_group_score: a group's score is its "max" (DeepSeek-V2) or the sum of its two
            best, "top2_sum" (DeepSeek-V3, GLM-4).
        moe_router_enable_expert_bias: a bias per expert that takes part in the choice and never in
            the weights (DeepSeek-V3's balancing without a loss).
        moe_router_bias_update_rate: step of its update.
        moe_router_bias: the linear layer of the router has a bias (GPT-OSS).
        moe_router_selection: "token_choice", "expert_choice" or "sinkhorn" (in training; in
            evaluation that is token choice). The latter two go without expert bias.
        moe_input_jitter_eps: in training, the router's input is multiplied by uniform numbers in
            1 - eps .. 1 + eps; 0: not.
        moe_expert_capacity_factor: an expert takes at most `ceil(factor * T * k / E)` of the T
            tokens of the global microbatch; None: dropless. Of expert choice it is the number of
            tokens that each expert takes, and 1.0 if None.
        moe_token_drop_policy: which rows stay: the most probable ("probs") or the first
            ("position").
    """

    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = True
    norm_topk_prob: bool = True
    moe_norm_min: float = 1e-20
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    moe_router_group_score: str = "max"
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 0.001
    moe_router_bias: bool = False
    moe_router_selection: str = "token_choice"
    moe_input_jitter_eps: float = 0.0
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"

    def __post_init__(self) -> None:
        _check_flags(self)
        _one_of("moe_router_score_function", self.moe_router_score_function, *SCORE_FUNCTIONS)
        _one_of("moe_router_group_score", self.moe_router_group_score, "max", "top2_sum")
        selections = ("token_choice", "expert_choice", "sinkhorn")
        _one_of("moe_router_selection", self.moe_router_selection, *selections)
        _one_of("moe_token_drop_policy", self.moe_token_drop_policy, "probs", "position")
        if not self.moe_router_pre_softmax and self.moe_router_score_function != "softmax":
            raise MoEValueError(
                "moe_router_pre_softmax=False is about softmax scores; with "
                "moe_router_score_function='sigmoid' leave it True"
            )
        for name in ("n_group", "topk_group"):
            check_count(name, getattr(self, name))
        if self.topk_group > self.n_group:
            raise MoEValueError(
                f"topk_group={self.topk_group} exceeds n_group={self.n_group}; choose at most that"
            )
        for name in ("moe_norm_min", "routed_scaling_factor", "moe_router_bias_update_rate"):
            check_finite(name, getattr(self, name))
        check_finite("moe_input_jitter_eps", self.moe_input_jitter_eps)
        if self.moe_input_jitter_eps >= 1.0:
            raise MoEValueError(f"moe_input_jitter_eps={self.moe_input_jitter_eps} must be below 1")
        self._check_selection()
        if self.moe_expert_capacity_factor is not None:
            check_finite("moe_expert_capacity_factor", self.moe_expert_capacity_factor)
            if self.moe_expert_capacity_factor == 0:
                raise MoEValueError(
                    "moe_expert_capacity_factor=0 leaves no room for any token; give a positive "
                    "number, or None for no limit"
                )

    def _check_selection(self) -> None:
        selection = self.moe_router_selection
        if selection == "token_choice":
            return
        if self.moe_router_enable_expert_bias:
            raise MoEValueError(
                f"moe_router_selection={selection!r} balances the load itself; leave "
                "moe_router_enable_expert_bias False"
            )
        if selection == "expert_choice" and self.n_group > 1:
            raise MoEValueError(
                f"n_group={self.n_group} limits the choice of tokens, and under "
                "moe_router_selection='expert_choice' they have none; leave it 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Losses that keep the router in order; each is the same number in every layout.

    Attributes:
        router_aux_loss_coef: factor of the load-balancing loss; 0 switches its gradient off.
        moe_aux_loss_scope: tokens over which it takes its fractions and means: "microbatch" (the
            global microbatch), "sequence" (each sequence, then averaged) or "global_batch" (all
            microbatches of a step). See `moe_pipeline.router.aux_loss`.
        router_z_loss_coef: factor of the mean of `logsumexp(logits)^2` (ST-MoE, arXiv 2202.08906).
    """

    router_aux_loss_coef: float = 0.001
    moe_aux_loss_scope: str = "microbatch"
    router_z_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        check_finite("router_aux_loss_coef", self.router_aux_loss_coef)
        check_finite("router_z_loss_coef", self.router_z_loss_coef)
        _one_of("moe_aux_loss_scope", self.moe_aux_loss_scope, *AUX_LOSS_SCOPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOptions:
    """What an expert computes, and how.

    Attributes:
        hidden_act: "silu", "gelu" or "gelu_pytorch_tanh".
        has_gate: `down(act(gate(x)) * up(x))`; False: `down(act(up(x)))`.
        swiglu_limit: clamp the gate from above and the up projection on both sides, and add 1 to
            the latter (GPT-OSS); None: not.
        swiglu_alpha: with `swiglu_limit`, the gate is `x * sigmoid(alpha * x)`.
        has_bias: both projections have one.
        experts_implementation: "auto", "fused", "grouped_mm" or "loop"; see
            `moe_pipeline.experts.compute`.
        gradient_accumulation_fusion: weight gradients are added in place to `grad`, whose memory is
            kept over steps; see `moe_pipeline.weight_grad.accumulation`.
        fp8: products in fp8 on CUDA; see `moe_pipeline.experts.fp8`.
    """

    hidden_act: str = "silu"
    has_gate: bool = True
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    has_bias: bool = False
    experts_implementation: str = "auto"
    gradient_accumulation_fusion: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        _check_flags(self)
        _one_of("hidden_act", self.hidden_act, *ACTIVATIONS)
        _one_of("experts_implementation", self.experts_implementation, *EXPERTS_IMPLEMENTATIONS)
        if self.swiglu_limit is not None:
            if not self.has_gate or self.hidden_act != "silu":
                raise MoEValueError("swiglu_limit is for gated silu experts; leave it None")
            for name, value in (("limit", self.swiglu_limit), ("alpha", self.swiglu_alpha)):
                check_finite(f"swiglu_{name}", value)
                if value == 0:
                    raise MoEValueError(f"swiglu_{name}={value} must be positive")
        if self.fp8 and (
            self.experts_implementation != "auto" or self.gradient_accumulation_fusion
        ):
            raise MoEValueError(
                "fp8=True has its own implementation; leave experts_implementation='auto' and "
                "gradient_accumulation_fusion=False"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertOptions:
    """An MLP that every token passes besides its experts; gated SwiGLU, without biases.

    Attributes:
        moe_shared_expert_intermediate_size: its width, of all shared experts together.
        moe_shared_expert_gate: its output is multiplied by `sigmoid(x @ w)` (Qwen2-MoE).
    """

    moe_shared_expert_intermediate_size: int
    moe_shared_expert_gate: bool = False

    def __post_init__(self) -> None:
        _check_flags(self)
        check_count("moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes, routing rule, losses and experts of one MoE layer.

    Attributes:
        hidden_size: width d of a token.
        moe_intermediate_size: width h inside an expert.
        num_experts: experts of the layer over all ranks.
        num_experts_per_tok: experts chosen for each token, k.
        router: the routing rule.
        losses: the auxiliary losses.
        experts: the experts' arithmetic and implementation.
        shared_expert: None: there is none.
        moe_latent_size: experts work on projections of tokens of this width (Latent MoE); None: on
            the tokens.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError, TypeError: sizes that no layer can have, or that do not fit each other.
    """

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    router: RouterOptions = field(default_factory=RouterOptions)
    losses: RouterLosses = field(default_factory=RouterLosses)
    experts: ExpertsOptions = field(default_factory=ExpertsOptions)
    shared_expert: SharedExpertOptions | None = None
    moe_latent_size: int | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
        for name in names:
            check_count(name, getattr(self, name))
        check_type("router", self.router, RouterOptions)
        check_type("losses", self.losses, RouterLosses)
        check_type("experts", self.experts, ExpertsOptions)
        if self.shared_expert is not None:
            check_type("shared_expert", self.shared_expert, SharedExpertOptions)
        if self.moe_latent_size is not None:
            check_count("moe_latent_size", self.moe_latent_size)
        if self.num_experts_per_tok > self.num_experts:
            raise MoEValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts="
                f"{self.num_experts}; each token needs that many different experts"
            )
        check_finite("initializer_range", self.initializer_range)
        self._check_groups()

    @property
    def expert_size(self) -> int:
        """Width of the rows that experts take and return."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    def _check_groups(self) -> None:
        n_group, topk_group = self.router.n_group, self.router.topk_group
        if self.num_experts % n_group:
            raise MoEValueError(
                f"n_group={n_group} does not divide num_experts={self.num_experts}; choose a "
                "divisor"
            )
        per_group = self.num_experts // n_group
        if topk_group * per_group < self.num_experts_per_tok:
            raise MoEValueError(
                f"topk_group={topk_group} groups of {per_group} experts hold fewer than "
                f"num_experts_per_tok={self.num_experts_per_tok}; raise topk_group"
            )
        if self.router.moe_router_group_score == "top2_sum" and n_group > 1 and per_group < 2:
            raise MoEValueError(
                f"moe_router_group_score='top2_sum' needs groups of at least 2 experts, and "
                f"n_group={n_group} of num_experts={self.num_experts} have {per_group}"
            )


def _check_flags(options: RouterOptions | ExpertsOptions | SharedExpertOptions) -> None:
    """Refuse what is no bool where one is wanted: the word "false" would be taken for true."""
    for each in fields(options):
        if each.type is bool:
            check_type(each.name, getattr(options, each.name), bool)


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise MoEValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
