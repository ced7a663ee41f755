"""The tables that say which model is trained, and how its experts are balanced.

model.source        # where the decoder is described
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import PATH, Table, key
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Table):
    """Which model is trained."""

    table: ClassVar[str] = "model"
    config_file: str | None = key(
        "path of the model's config.json as transformers writes it; not used with init_from",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
    init_from: str | None = key(
        "folder of a transformers checkpoint to start from; absent: random weights",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
    experts_implementation: Literal["auto", "fused", "grouped_mm", "loop"] = key(
        "how the experts' matrix products are computed; auto picks the fastest for the device",
        default="auto",
        on_resume="free",
    )

    @property
    def source(self) -> str:
        """Where the model is described: `init_from` if it is given, else `config_file`."""
        return str(self.config_file if self.init_from is None else self.init_from)

    def _check(self) -> None:
        if self.config_file is None and self.init_from is None:
            raise TrainValueError(
                "[model] names no model; set model.config_file to a config.json, or "
                "model.init_from to a folder that holds one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTable(Table):
    """Balancing and capacity of the experts; routers compute in fp32 whatever train.dtype is."""

    table: ClassVar[str] = "moe"
    aux_loss_scope: Literal["microbatch", "sequence", "global_batch"] = key(
        "tokens over which the load-balancing loss takes its means: a global microbatch, each "
        "sequence, or all microbatches of a step (only with parallel.schedule="
        '"forward_then_backward" or one microbatch)',
        default="microbatch",
        on_resume="asked",
    )
    aux_loss_coef: float | None = key(
        "factor of the load-balancing loss, 0 for none; absent: that of config.json "
        "(router_aux_loss_coef)",
        default=None,
        minimum=0,
        on_resume="asked",
    )
    z_loss_coef: float = key(
        "factor of the mean squared logsumexp of the router's logits; 0 for none",
        default=0.0,
        minimum=0,
        on_resume="asked",
    )
    capacity_factor: float | None = key(
        "most tokens of an expert, over an even share of the global microbatch; absent: no limit",
        default=None,
        above=0,
        on_resume="asked",
    )
    token_drop_policy: Literal["probs", "position"] = key(
        "which tokens a full expert keeps: the most probable or the first ones",
        default="probs",
        on_resume="asked",
    )
    update_expert_bias: bool = key(
        "balance without a loss: move the bias that chooses experts towards even load after each "
        "step (families with e_score_correction_bias)",
        default=False,
        on_resume="asked",
    )
    expert_bias_update_rate: float = key(
        "how far the expert bias moves in a step", default=1e-3, above=0, on_resume="asked"
    )
