"""Gradients are summed over ranks while the last backwards of a step still make others.

A parameter's gradient is complete when it arrives in the last computation that its stage has in a
step: the last backward, or where weights get theirs later, the last of these. What several stages
of a rank share is complete in the latest of their last computations; what gets no gradient there,
an expert without tokens, at its end.

    beside = OverlappedReduction(groups, of=store.of, stages_of=stages_of, row=schedule.ranks[rank])
    with beside:
        executor.step(inputs, targets, around=beside.around)    # hooks call beside.arrived(p)

Invariant: buckets are the same on every rank of a group and leave in one order, whichever rank's
gradients are complete first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_collectives import overlap_gradients
from moe_pipeline.schedules import Action, Kind

_GIVES_GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class OverlappedReduction(AbstractContextManager["OverlappedReduction"]):
    """A block around the computations of a step; collective over each group as it is left.

    Args:
        groups: parameters, in the same order on every rank of their group.
        of: where a parameter's gradient lies.
        stages_of: the stages of this rank that use a parameter.
        row: what this rank does in a step.
        dtype: in which gradients travel; None: their own.
        bucket_bytes: the most that travels at once.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[nn.Parameter], dist.ProcessGroup]],
        *,
        of: Callable[[nn.Parameter], Tensor],
        stages_of: Mapping[nn.Parameter, frozenset[int]],
        row: Sequence[Action],
        dtype: torch.dtype | None,
        bucket_bytes: int,
    ) -> None:
        self._last = {a.stage: a for a in row if a.kind in _GIVES_GRADIENTS}
        self._stages_of = stages_of
        self._reducers = [
            overlap_gradients(
                parameters,
                group=group,
                op="sum",
                bucket_bytes=bucket_bytes,
                gradient_of=of,
                dtype=dtype,
            )
            for parameters, group in groups
        ]
        self._reducer_of = {
            parameter: reducer
            for (parameters, _), reducer in zip(groups, self._reducers, strict=True)
            for parameter in parameters
        }
        self._in_last: set[int] = set()
        self._ended: set[int] = set()
        self._complete: set[nn.Parameter] = set()
        self._open = ExitStack()

    @property
    def num_started(self) -> int:
        """Buckets on their way or done, in this block or the last one."""
        return sum(reducer.num_started for reducer in self._reducers)

    def __enter__(self) -> "OverlappedReduction":
        for seen in (self._in_last, self._ended, self._complete):
            seen.clear()
        with ExitStack() as opened:
            for reducer in self._reducers:
                opened.enter_context(reducer)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Around each computation of the step on this rank."""
        if self._last.get(action.stage) != action:
            yield
            return
        self._in_last.add(action.stage)
        yield
        self._ended.add(action.stage)
        for parameter in self._reducer_of:
            stages = self._stages_of[parameter]
            if action.stage in stages and stages <= self._ended and parameter not in self._complete:
                self._tell(parameter)

    def arrived(self, parameter: nn.Parameter) -> None:
        """A gradient has been added to that of `parameter`."""
        if parameter in self._reducer_of and self._stages_of[parameter] <= self._in_last:
            self._tell(parameter)

    def _tell(self, parameter: nn.Parameter) -> None:
        self._complete.add(parameter)
        self._reducer_of[parameter].ready(parameter)
