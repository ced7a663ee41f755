"""Gradients that are shared out: of each row the sum over ranks and microbatches lies on one rank.

No rank keeps whole gradients. Those of a block (a layer) are complete in a backward as the gradient
of its input is; they are then summed over their ranks, each of which adds its own rows to what it
has (one reduce-scatter, beside the backward of the block before), and are freed. What belongs to no
block, and whatever a backward of weights alone gives, is summed at the end of the computation;
arXiv 1910.02054, "P_os+g".

Invariant: the ranks of a stage do the same computations and so meet in the same sums in one order,
whether or not a parameter got a gradient (that of an expert without tokens counts as zeros).

    shares = GradientShares(groups, blocks, fp32=False, dtype=None)
    executor.step(inputs, targets, around=shares.around)
    shares.sums[weight]                                  # of this rank's rows
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from moe_pipeline.schedules import Action, Kind
from moe_train.errors import MoeTrainError
from moe_train.optim.shares import RowShares
from moe_train.optim.stage_blocks import Part, StageBlocks, parts_of

_GIVES_ALL = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


@final
class GradientShares:
    """The sums of this rank's rows; forward hooks of the blocks see their inputs.

    Args:
        shares: of the parameters whose gradients are shared out, in the same order on every rank.
        stages: of this rank, by number.
        fp32: keep the sums in fp32; else in the parameters' dtype.
        dtype: in which gradients travel and are summed over ranks; None: that of the sums.
    """

    def __init__(
        self,
        shares: Sequence[RowShares],
        stages: Mapping[int, StageBlocks],
        *,
        fp32: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._dtype = dtype
        for share in shares:
            for parameter in share.parameters:
                kept = torch.float32 if fp32 else parameter.dtype
                rows = parameter.data[share.own(parameter)]
                self.sums[parameter] = torch.zeros_like(rows, dtype=kept)
        self._parts = {number: parts_of(stage, shares) for number, stage in stages.items()}
        for number, stage in stages.items():
            for part, (block, _) in zip(self._parts[number], stage.blocks, strict=False):
                block.register_forward_pre_hook(partial(self._begins, part))
        self._action: Action | None = None
        self._left: list[Part] = []
        self._under_way: Callable[[], None] | None = None

    def clear(self) -> None:
        """Forget the sums, before a step."""
        for own in self.sums.values():
            own.zero_()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Around each computation of the step on this rank. Collective over the ranks of a stage.

        Raises:
            MoeTrainError: a block got gradients after that of its input.
        """
        self._action = action
        self._left = list(self._parts[action.stage]) if action.kind in _GIVES_ALL else []
        try:
            yield
            for part in list(self._left):
                self._send(part)
            self._receive()
        finally:
            self._action, self._left, self._under_way = None, [], None
        if action.kind in _GIVES_ALL:
            self._check_none_left(action)

    def _begins(self, part: Part, _: nn.Module, inputs: tuple[object, ...]) -> None:
        """A block is called; in a backward it is only computed again, on the same input."""
        if self._action is None or self._action.kind is not Kind.FORWARD:
            return
        first = inputs[0]
        # What a stage begins with is a leaf, whose gradient comes in no order with those of
        # weights; behind it there is nothing to compute.
        if isinstance(first, Tensor) and first.requires_grad and not first.is_leaf:
            first.register_hook(partial(self._is_complete, part))

    def _is_complete(self, part: Part, _: Tensor) -> None:
        is_whole = self._action is not None and self._action.kind is Kind.BACKWARD
        if is_whole and part in self._left:
            self._send(part)

    @torch.no_grad()
    def _send(self, part: Part) -> None:
        """Start the sums of a part, when those of the part before are there."""
        self._left.remove(part)
        self._receive()
        started = []
        for shares, parameters in part.parameters:
            gradients = [self._travelling(parameter) for parameter in parameters]
            started.append((parameters, shares.start_reduce_scatter(parameters, gradients)))
            for parameter in parameters:
                parameter.grad = None

        def receive() -> None:
            for parameters, found in started:
                for parameter, rows in zip(parameters, found(), strict=True):
                    self.sums[parameter].add_(rows)

        self._under_way = receive

    def _receive(self) -> None:
        receive, self._under_way = self._under_way, None
        if receive is not None:
            with torch.no_grad():
                receive()

    def _travelling(self, parameter: nn.Parameter) -> Tensor:
        dtype = self._dtype or self.sums[parameter].dtype
        if parameter.grad is None:
            return torch.zeros_like(parameter, dtype=dtype)
        return parameter.grad.to(dtype)

    def _check_none_left(self, action: Action) -> None:
        """What came later would be lost, were it the last computation of the step."""
        for part in self._parts[action.stage]:
            for _, parameters in part.parameters:
                late = [tuple(p.shape) for p in parameters if p.grad is not None]
                if late:
                    raise MoeTrainError(
                        f"{action}: parameters of shapes {late} got gradients after that of their "
                        "layer's input; use parallel.sharding=1 for this model"
                    )
