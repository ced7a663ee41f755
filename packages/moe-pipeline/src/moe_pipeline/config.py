"""The one description of an MoE layer, validated once.

Field names are those of transformers' configurations (`num_experts_per_tok`, `norm_topk_prob`,
`router_aux_loss_coef`), so that a model's config.json fills it without a dictionary of synonyms.

    MoEConfig(hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
"""

from dataclasses import dataclass

AUX_LOSS_SCOPES = ("micro_batch", "sequence")
EXPERTS_IMPLEMENTATIONS = ("auto", "fused", "grouped_mm", "loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes, routing rule, auxiliary loss and implementation of one MoE layer.

    Attributes:
        hidden_size: width d of a token.
        moe_intermediate_size: width h inside an expert.
        num_experts: experts of the layer over all ranks.
        num_experts_per_tok: experts chosen for each token, k.
        norm_topk_prob: divide the k chosen probabilities by their sum.
        router_aux_loss_coef: factor of the load-balancing loss; 0 switches its gradient off.
        moe_aux_loss_scope: tokens over which the loss takes its fractions and means:
            "micro_batch" (all tokens of the global micro-batch) or "sequence" (each sequence by
            itself, then averaged). See `moe_pipeline.aux_loss`.
        experts_implementation: "auto", "fused", "grouped_mm" or "loop"; see `moe_pipeline.experts`.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: sizes that no layer can have, or an unknown scope or implementation.
    """

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001
    moe_aux_loss_scope: str = "micro_batch"
    experts_implementation: str = "auto"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts="
                f"{self.num_experts}; each token needs that many different experts"
            )
        if not 0.0 <= self.router_aux_loss_coef < float("inf"):
            raise ValueError(
                "router_aux_loss_coef must be finite and not negative, got "
                f"{self.router_aux_loss_coef}"
            )
        if not 0.0 <= self.initializer_range < float("inf"):
            raise ValueError(
                f"initializer_range must be finite and not negative, got {self.initializer_range}"
            )
        if self.moe_aux_loss_scope == "global_batch":
            raise ValueError(
                "moe_aux_loss_scope='global_batch' is not offered: its fractions are known only "
                "after the last forward of a step, which most schedules interleave with backwards; "
                f"choose one of {', '.join(AUX_LOSS_SCOPES)}"
            )
        _one_of("moe_aux_loss_scope", self.moe_aux_loss_scope, AUX_LOSS_SCOPES)
        _one_of("experts_implementation", self.experts_implementation, EXPERTS_IMPLEMENTATIONS)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
