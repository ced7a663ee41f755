"""Gradients of a step: accumulation, reduction over the right ranks, norm and clipping.

A parameter's gradient is summed over the ranks that hold the same values and saw other tokens:
dense parameters over dp x ep, experts over dp, an embedding that two stages hold over both. The
loss is already divided by the tokens of the whole batch, so sums are all that is needed.

    store = GradientStore(groups, fp32_accumulation=False)
    with store.reducing() as around:
        executor.step(inputs, targets, around=around)
    square = store.norm_squared()        # this rank's share; the sum over all ranks is the norm^2
    store.scale(coefficient)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_collectives import reduce_in_buckets
from moe_pipeline.executor import TiedParameters
from moe_pipeline.schedules import Action
from moe_train.optim.grad_overlap import OverlappedReduction
from moe_train.optim.grad_shares import GradientShares
from moe_train.optim.param_shares import ParameterShares
from moe_train.optim.shares import RowShares
from moe_train.optim.stage_blocks import StageBlocks, stages_of_parameters
from moe_train.slices import slices_of

_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters whose gradients are reduced over the same ranks.

    Args:
        parameters: in the same order on every rank of `reduce_group`.
        reduce_group: ranks that hold the same parameters; None when there is only this one.
        tied: of the embedding that two stages hold, over the same ranks.
        shares: who updates which rows, where the ranks share that out; those of `reduce_group`, or
            of a tied embedding the ranks of this stage.
        shares_gradients: sums of gradients are kept by rows as well, from the first microbatch on.
    """

    parameters: Sequence[nn.Parameter]
    reduce_group: dist.ProcessGroup | None
    tied: TiedParameters | None = None
    shares: RowShares | None = None
    shares_gradients: bool = False

    @property
    def num_holders(self) -> int:
        """How many ranks hold each of the parameters."""
        return 1 if self.reduce_group is None else self.reduce_group.size()

    @property
    def num_updating(self) -> int:
        """How many ranks update each row."""
        return self.num_holders // (1 if self.shares is None else self.shares.num_ranks)

    @property
    def is_overlapped(self) -> bool:
        """Whether the gradients can be summed beside the backward, if that is asked for."""
        is_whole = self.tied is None and not self.is_by_rows
        return self.num_holders > 1 and is_whole and bool(self.parameters)

    @property
    def is_by_rows(self) -> bool:
        """Whether gradients are shared out; those of a tied embedding are summed whole."""
        return self.shares_gradients and self.shares is not None and self.tied is None


class GradientStore:
    """The gradients of this rank's parameters, in fp32 when `fp32_accumulation` is set.

    With fp32 accumulation a hook adds each microbatch's gradient to an fp32 buffer and frees the
    low-precision one at once; otherwise autograd's own accumulation into `.grad` is used.

    Args:
        groups: every parameter once.
        fp32_accumulation: see above.
        reduce_dtype: in which sums over ranks are taken and travel; None: that of the gradients.
        overlap: what this rank does in a step, to sum while its last backwards run, in groups that
            they do not use; tied parameters are summed afterwards.
        stages: of this rank, by number; for `overlap` and groups whose gradients are shared out.
        parameters: what makes parameters whole that are shared out themselves.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        fp32_accumulation: bool,
        reduce_dtype: torch.dtype | None = None,
        overlap: Sequence[Action] | None = None,
        stages: Mapping[int, StageBlocks] = MappingProxyType({}),
        parameters: ParameterShares | None = None,
    ) -> None:
        self._groups, self._reduce_dtype = groups, reduce_dtype
        self._parameters = [p for group in groups for p in group.parameters]
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._own: dict[nn.Parameter, Tensor] = {}
        by_rows = [g.shares for g in groups if g.shares is not None and g.is_by_rows]
        self._whole = parameters if parameters is not None and parameters.own else None
        self._shared: GradientShares | None = None
        if by_rows:
            self._shared = GradientShares(
                by_rows, stages, fp32=fp32_accumulation, dtype=reduce_dtype
            )
        whole = [p for group in groups if not group.is_by_rows for p in group.parameters]
        for parameter in whole if fp32_accumulation else ():
            self._buffers[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        self._beside = None if overlap is None else self._overlapped(overlap, stages)
        for parameter in whole if fp32_accumulation or self._beside else ():
            parameter.register_post_accumulate_grad_hook(_weakly(self._arrived))

    def _overlapped(
        self, row: Sequence[Action], stages: Mapping[int, StageBlocks]
    ) -> OverlappedReduction | None:
        chosen = [
            (group.parameters, group.reduce_group)
            for group in self._groups
            if group.reduce_group is not None and group.is_overlapped
        ]
        if not chosen:
            return None
        beside = OverlappedReduction(
            chosen,
            of=self.of,
            stages_of=stages_of_parameters(stages),
            row=row,
            dtype=self._reduce_dtype,
            bucket_bytes=_BUCKET_BYTES,
        )
        self.clear()  # of zeros that said in which dtype gradients travel
        return beside

    def _arrived(self, parameter: Tensor) -> None:
        if parameter.grad is None or not isinstance(parameter, nn.Parameter):
            return
        if parameter in self._buffers:
            self._buffers[parameter].add_(parameter.grad)
            parameter.grad = None
        if self._beside is not None:
            self._beside.arrived(parameter)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of `parameter`; zeros when no microbatch reached it.

        After `reduce` that of this rank's rows, where rows are shared out.
        """
        if parameter in self._own:
            return self._own[parameter]
        if parameter in self._buffers:
            return self._buffers[parameter]
        if parameter.grad is None:
            # A rank without tokens still takes part in the reduction.
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def held(self) -> list[Tensor]:
        """The gradients that exist, without making any."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        sums = {} if self._shared is None else self._shared.sums
        own = {id(tensor): tensor for tensor in (*self._own.values(), *sums.values())}
        return [*self._buffers.values(), *own.values(), *grads]

    def clear(self) -> None:
        """Forget all gradients, before a step."""
        self._own.clear()
        for buffer in self._buffers.values():
            buffer.zero_()
        if self._shared is not None:
            self._shared.clear()
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def num_overlapped(self) -> int:
        """Buckets of the last step that left while it computed, or at its end; 0: none do."""
        return 0 if self._beside is None else self._beside.num_started

    @contextmanager
    def reducing(
        self,
    ) -> Iterator[Callable[[Action], AbstractContextManager[object]] | None]:
        """Around the computations of a step: sum every gradient over its group's ranks.

        Collective over each group. Gives what each computation is to run in, or None.
        """
        with nullcontext() if self._beside is None else self._beside:
            each = (self._whole, self._beside, self._shared)
            arounds = [one.around for one in each if one is not None]
            yield partial(_within, arounds) if arounds else None
        if self._shared is not None:
            self._own |= self._shared.sums
        for group in self._groups:
            is_summed = self._beside is not None and group.is_overlapped
            if group.num_holders > 1 and not group.is_by_rows:
                self._finish(group, is_summed=is_summed)

    def _finish(self, group: ParameterGroup, *, is_summed: bool) -> None:
        """Sum what is not yet, and keep this rank's rows where they are shared out."""
        shares, parts = group.shares, [slice(None)]
        if shares is not None or self._reduce_dtype is not None:  # few at a time: they are copied
            parts = slices_of([parameter.numel() for parameter in group.parameters])
        for part in parts:
            parameters = group.parameters[part]
            if shares is not None and group.tied is None and not is_summed:
                self._reduce_shares(shares, parameters)
                continue
            if not is_summed:
                self._reduce(group, [self.of(parameter) for parameter in parameters])
            if shares is not None:
                for parameter in parameters:
                    self._keep(parameter, self.of(parameter)[shares.own(parameter)].clone())

    def _reduce_shares(self, shares: RowShares, parameters: Sequence[nn.Parameter]) -> None:
        gradients = [self.of(parameter) for parameter in parameters]
        sums = [g.to(self._reduce_dtype or g.dtype) for g in gradients]
        found = shares.reduce_scatter(parameters, sums)
        for parameter, gradient, own in zip(parameters, gradients, found, strict=True):
            self._keep(parameter, own.to(gradient.dtype))

    def _keep(self, parameter: nn.Parameter, own: Tensor) -> None:
        """From now on what this rank updates of a gradient stands for the whole of it."""
        self._own[parameter] = own
        parameter.grad = None

    def _reduce(self, group: ParameterGroup, gradients: Sequence[Tensor]) -> None:
        sums = [g.to(self._reduce_dtype or g.dtype) for g in gradients]
        if group.tied is not None:
            group.tied.reduce_gradients(sums)
        else:
            reduce_in_buckets(sums, group=group.reduce_group, bucket_bytes=_BUCKET_BYTES)
        for gradient, found in zip(gradients, sums, strict=True):
            if found is not gradient:
                gradient.copy_(found)

    def norm_squared(self) -> float:
        """This rank's share of the squared global norm, after `reduce`.

        The shares of all ranks add up to the squared norm over all parameters, each counted once.
        """
        total = 0.0
        for group in self._groups:
            grads = [self.of(parameter) for parameter in group.parameters]
            if grads:
                total += float(_squared_norm(grads)) / group.num_updating
        return total

    def scale(self, coefficient: float) -> None:
        """Multiply every gradient in place."""
        for parameter in self._parameters:
            self.of(parameter).mul_(coefficient)


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """In fp64 of norms in fp32 or wider: one in bfloat16 is off by up to 0.4%, and differently for
    each way to share gradients out.
    """
    if all(gradient.dtype.itemsize >= torch.float32.itemsize for gradient in gradients):
        return nn.utils.get_total_norm(gradients).double() ** 2
    norms = [
        torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32))
        for each in gradients
    ]
    return torch.stack([norm.double() for norm in norms]).square_().sum()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that does not keep its object: Python does not see that a parameter keeps its hooks.

    Else a model whose layout has been left would stay for ever.
    """
    of = WeakMethod(method)

    def call(parameter: Tensor) -> None:
        found = of()
        if found is not None:
            found(parameter)

    return call


@contextmanager
def _within(
    arounds: Sequence[Callable[[Action], AbstractContextManager[object]]], action: Action
) -> Iterator[None]:
    with ExitStack() as opened:
        for around in arounds:
            opened.enter_context(around(action))
        yield


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that torch's `clip_grad_norm_` applies; an infinite `max_norm` never clips."""
    return min(1.0, max_norm / (norm + 1e-6))
