"""How experts are balanced in a job: the factor of the loss, and what is refused.

check_balancing(config, model, schedule)        # ValueError: names the key and the remedy
aux_loss_coef(config, model)
"""

from moe_pipeline import Schedule
from moe_pipeline.router import check_aux_scope
from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig

_FAMILIES_WITH_BIAS = ("deepseek_v3", "ernie4_5_moe", "glm4_moe")


def aux_loss_coef(config: Config, model: DecoderConfig) -> float:
    """The factor of the load-balancing loss: the job's, or that of config.json."""
    given = config.moe.aux_loss_coef
    return model.moe.losses.router_aux_loss_coef if given is None else given


def check_balancing(config: Config, model: DecoderConfig, schedule: Schedule) -> None:
    """Refuse what the model or the schedule cannot do; every rank finds the same.

    Raises:
        ValueError: scope "global_batch" under a schedule that begins a backward before the last
            forward; an expert bias in a family whose checkpoints have no place for it.
    """
    try:
        check_aux_scope(schedule, config.moe.aux_loss_scope)
    except ValueError as error:
        raise TrainValueError(
            f'moe.aux_loss_scope with parallel.schedule="{config.parallel.schedule}" and '
            f"train.gradient_accumulation_steps={config.train.gradient_accumulation_steps}: {error}"
        ) from error
    has_bias = model.moe.router.moe_router_enable_expert_bias
    if config.moe.update_expert_bias and not has_bias:
        raise TrainValueError(
            f"moe.update_expert_bias=true, but checkpoints of model_type={model.model_type!r} have "
            "no e_score_correction_bias, so a loaded model would choose other experts; train one "
            f"of {', '.join(_FAMILIES_WITH_BIAS)}, or balance with moe.aux_loss_coef"
        )
