"""Keyword arguments of torch's schedules: what is used, and what steers only torch.

checked_keywords({"output_merge_spec": None, "backward_requires_autograd": True})
"""

from typing import Any, TypedDict, cast

from torch.distributed import ProcessGroup
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.executor import ExecutorOptions


class ScheduleKeywords(TypedDict, total=False):
    """Further arguments of a schedule, by keyword: torch's, then this executor's own."""

    # how positional arguments are split; None: tensors along dim 0
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None
    # how keyword arguments are split; likewise
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None
    output_merge_spec: Any  # how outputs are put together; likewise
    backward_group: ProcessGroup | None  # carries gradients; None: the group of the stages
    executor_options: ExecutorOptions  # of the executor, whose device is that of the stages


# Torch's further arguments, taken as they stand there: nothing here is steered by them.
_DEFAULTS_OF_TORCH: dict[str, object] = {
    "use_full_backward": None,
    "backward_requires_autograd": True,
    "defer_pp_recv": False,
    "max_active_stages": 3,
    "unshard_lookahead": "full",
    "defer_reduce_grad_wait": False,
    "max_outstanding_sends": None,
}


def checked_keywords(given: ScheduleKeywords) -> ScheduleKeywords:
    """Those that mean something here.

    Raises:
        TypeError: an argument that neither torch nor this package has.
        ValueError: one that steers torch's runtime, away from its default.
    """
    known = ScheduleKeywords.__annotations__
    unknown = sorted(set(given) - set(known) - set(_DEFAULTS_OF_TORCH))
    if unknown:
        raise MoETypeError(
            f"schedules here have no argument {', '.join(unknown)}; leave it out. They take "
            f"scale_grads, {', '.join(known)}"
        )
    kept: dict[str, Any] = dict(given)
    for name, default in _DEFAULTS_OF_TORCH.items():
        value = kept.pop(name, default)
        if value != default:
            raise MoEValueError(
                f"{name}={value!r} steers torch's own runtime; leave it out, or at {default!r}: "
                "the schedule alone decides here"
            )
    return cast("ScheduleKeywords", kept)
