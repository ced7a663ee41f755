"""The `[moe]` table: how experts are balanced, and how many tokens each may take.

Names are Megatron's. The router's arithmetic is not among them: logits, scores and losses are fp32
whatever `train.dtype` is (Megatron's `moe_router_dtype = "fp32"`), and so is the expert bias.

    MoeTable(moe_z_loss_coeff=1e-3, moe_expert_capacity_factor=1.25)
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import Table, key

FROM_MODEL = -1.0
"""Value of `moe_aux_loss_coeff` that takes the one of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTable(Table):
    """Balancing and capacity of the experts.

    Raises:
        ValueError: values that contradict each other.
    """

    table: ClassVar[str] = "moe"
    moe_router_load_balancing_scope: Literal["micro_batch", "sequence", "global_batch"] = key(
        "tokens over which the load-balancing loss takes its means: a global micro-batch, each "
        "sequence, or all micro-batches of a step (only with parallel.schedule="
        '"forward_then_backward" or one micro-batch)',
        default="micro_batch",
    )
    moe_aux_loss_coeff: float = key(
        "factor of the load-balancing loss; 0 switches it off, -1 takes router_aux_loss_coef of "
        "config.json",
        default=FROM_MODEL,
        minimum=FROM_MODEL,
    )
    moe_z_loss_coeff: float = key(
        "factor of the mean squared logsumexp of the router's logits; 0 switches it off",
        default=0.0,
        minimum=0,
    )
    moe_expert_capacity_factor: float = key(
        "an expert takes at most this times its even share of a global micro-batch's tokens, and "
        "the others skip it; 0 drops none",
        default=0.0,
        minimum=0,
    )
    moe_token_drop_policy: Literal["probs", "position"] = key(
        "which tokens a full expert keeps: the most probable or the first ones", default="probs"
    )
    moe_router_enable_expert_bias: bool = key(
        "balance without a loss: after each step move the bias by which experts are chosen "
        "towards even load (families with e_score_correction_bias in their checkpoints); false "
        "leaves it as it is",
        default=False,
    )
    moe_router_bias_update_rate: float = key(
        "how far the expert bias moves in a step", default=1e-3, above=0
    )

    def _check(self) -> None:
        if FROM_MODEL < self.moe_aux_loss_coeff < 0:
            raise ValueError(
                f"moe.moe_aux_loss_coeff={self.moe_aux_loss_coeff} is negative; give 0 or more, or "
                "-1 for router_aux_loss_coef of config.json"
            )

    @property
    def capacity_factor(self) -> float | None:
        """The capacity factor as moe-pipeline takes it: None drops no token."""
        return self.moe_expert_capacity_factor or None
