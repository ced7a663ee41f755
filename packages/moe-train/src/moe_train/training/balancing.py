"""What the `[moe]` table means for one model and schedule, and what of it cannot be had.

check_balancing(config, model, schedule)        # ValueError: names the key and the remedy
aux_loss_coef(config, model)
"""

from moe_pipeline import Schedule, check_aux_scope
from moe_train.config import FROM_MODEL, Config
from moe_train.model import DecoderConfig

_FAMILIES_WITH_BIAS = ("deepseek_v3", "ernie4_5_moe", "glm4_moe")


def aux_loss_coef(config: Config, model: DecoderConfig) -> float:
    """The factor of the load-balancing loss: the job's, or that of config.json."""
    given = config.moe.moe_aux_loss_coeff
    return model.router_aux_loss_coef if given == FROM_MODEL else given


def check_balancing(config: Config, model: DecoderConfig, schedule: Schedule) -> None:
    """Refuse what the model or the schedule cannot do; every rank finds the same.

    Raises:
        ValueError: scope "global_batch" under a schedule that begins a backward before the last
            forward; an expert bias in a family whose checkpoints have no place for it.
    """
    try:
        check_aux_scope(schedule, config.moe.moe_router_load_balancing_scope)
    except ValueError as error:
        raise ValueError(
            f"moe.moe_router_load_balancing_scope with parallel.schedule="
            f'"{config.parallel.schedule}" and train.gradient_accumulation_steps='
            f"{config.train.gradient_accumulation_steps}: {error}"
        ) from error
    has_bias = model.moe.router.moe_router_enable_expert_bias
    if config.moe.moe_router_enable_expert_bias and not has_bias:
        raise ValueError(
            "moe.moe_router_enable_expert_bias=true, but checkpoints of model_type="
            f"{model.model_type!r} have no e_score_correction_bias, so that a loaded model would "
            f"choose other experts; train one of {', '.join(_FAMILIES_WITH_BIAS)}, or balance with "
            "moe.moe_aux_loss_coeff"
        )
