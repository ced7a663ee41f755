"""Which schedules a scope of the balancing loss allows.

Under `moe_aux_loss_scope="global_batch"` the gradient of every microbatch needs the load of all of
them (`moe_pipeline.router.aux_loss`), which a stage knows after its last forward. A schedule that
begins a backward earlier, or that gives a stage's microbatches to several ranks, could only use a
part of the load: it is refused, never approximated.

    check_aux_scope(one_f_one_b(num_stages=4, num_microbatches=8), "global_batch")   # ValueError
"""

from moe_pipeline.config import AUX_LOSS_SCOPES
from moe_pipeline.errors import MoEValueError
from moe_pipeline.schedules.table import COMPUTE, Action, Kind, Schedule


def check_aux_scope(schedule: Schedule, scope: str) -> None:
    """Refuse a schedule under which the balancing loss of `scope` cannot be exact.

    Pure; each rank finds the same.

    Args:
        schedule: what the ranks will do.
        scope: a `moe_aux_loss_scope`.

    Raises:
        ValueError: an unknown scope; "global_batch" with a stage that begins a backward before its
            last forward (the first such pair is named), or whose microbatches lie on several ranks.
    """
    if scope not in AUX_LOSS_SCOPES:
        raise MoEValueError(
            f"moe_aux_loss_scope={scope!r} is unknown; choose one of {', '.join(AUX_LOSS_SCOPES)}"
        )
    if scope != "global_batch":
        return
    found = _early_backward(schedule) or _divided_stage(schedule)
    if found is not None:
        raise MoEValueError(
            "moe_aux_loss_scope='global_batch' needs every forward of a stage before its first "
            "backward, because the load of the experts is known only then; schedule "
            f"{schedule.name} with {schedule.num_microbatches} microbatches {found}; choose "
            "forward_then_backward, 1 microbatch, or the scope 'microbatch' or 'sequence'"
        )


def _early_backward(schedule: Schedule) -> str | None:
    """What is wrong with the order of some rank; None: nothing."""
    for actions in schedule.ranks:
        begun: dict[int, Action] = {}
        for action in actions:
            if action.kind is Kind.FORWARD and action.stage in begun:
                return f"runs {begun[action.stage]} before {action}"
            if action.kind in COMPUTE and action.kind is not Kind.FORWARD:
                begun.setdefault(action.stage, action)
    return None


def _divided_stage(schedule: Schedule) -> str | None:
    """A stage that two ranks run, each of them some microbatches; None: there is none."""
    if not schedule.has_backward:
        return None
    place: dict[int, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind is Kind.FORWARD and place.setdefault(action.stage, rank) != rank:
                return f"runs stage {action.stage} on ranks {place[action.stage]} and {rank}"
    return None
