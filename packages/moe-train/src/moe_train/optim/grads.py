"""Gradients of a step: accumulation, reduction over the right ranks, norm and clipping.

A parameter's gradient is summed over the ranks that hold the same values and saw other tokens:
dense parameters over dp x ep, experts over dp, an embedding that two stages hold over both. The
loss is already divided by the tokens of the whole batch, so sums are all that is needed.

    store = GradientStore(groups, fp32_accumulation=False)
    ...backward...
    store.reduce()
    square = store.norm_squared()        # this rank's share; the sum over all ranks is the norm^2
    store.scale(coefficient)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_collectives import reduce_in_buckets
from moe_pipeline.executor import TiedParameters

_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters whose gradients are reduced over the same ranks.

    Args:
        parameters: in the same order on every rank of `reduce_group`.
        reduce_group: ranks that hold the same parameters; None when there is only this one.
        tied: of the embedding that two stages hold, over the same ranks.
    """

    parameters: Sequence[nn.Parameter]
    reduce_group: dist.ProcessGroup | None
    tied: TiedParameters | None = None

    @property
    def num_holders(self) -> int:
        """How many ranks hold each of the parameters."""
        return 1 if self.reduce_group is None else self.reduce_group.size()


class GradientStore:
    """The gradients of this rank's parameters, in fp32 when `fp32_accumulation` is set.

    With fp32 accumulation a hook adds each microbatch's gradient to an fp32 buffer and frees the
    low-precision one at once; otherwise autograd's own accumulation into `.grad` is used.

    Args:
        groups: every parameter once.
        fp32_accumulation: see above.
        reduce_dtype: in which sums over ranks are taken and travel; None: that of the gradients.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        fp32_accumulation: bool,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._groups, self._reduce_dtype = groups, reduce_dtype
        self._parameters = [p for group in groups for p in group.parameters]
        self._buffers: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters if fp32_accumulation else ():
            self._buffers[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, parameter: Tensor) -> None:
        if parameter.grad is not None and isinstance(parameter, nn.Parameter):
            self._buffers[parameter].add_(parameter.grad)
            parameter.grad = None

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of `parameter`; zeros when no microbatch reached it."""
        if parameter in self._buffers:
            return self._buffers[parameter]
        if parameter.grad is None:
            # A rank without tokens still takes part in the reduction.
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def clear(self) -> None:
        """Forget all gradients, before a step."""
        for buffer in self._buffers.values():
            buffer.zero_()
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Sum every gradient over its group's ranks. Collective over each group."""
        for group in self._groups:
            if group.num_holders == 1:
                continue
            gradients = [self.of(parameter) for parameter in group.parameters]
            if self._reduce_dtype is None:
                self._reduce(group, gradients)
            else:  # few at a time, since they are copied
                for part in slices_of([g.numel() for g in gradients]):
                    self._reduce(group, gradients[part])

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
                total += float(nn.utils.get_total_norm(grads).double() ** 2) / group.num_holders
        return total

    def scale(self, coefficient: float) -> None:
        """Multiply every gradient in place."""
        for parameter in self._parameters:
            self.of(parameter).mul_(coefficient)


def slices_of(sizes: Sequence[int], limit: int = 1 << 24) -> list[slice]:
    """Neighbours of together at least `limit`, but for the last ones."""
    found, start, total = [], 0, 0
    for end, size in enumerate(sizes, start=1):
        total += size
        if total >= limit or end == len(sizes):
            found.append(slice(start, end))
            start, total = end, 0
    return found


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that torch's `clip_grad_norm_` applies; an infinite `max_norm` never clips."""
    return min(1.0, max_norm / (norm + 1e-6))
