"""Parameters that several ranks hold together, and whose gradients are therefore one sum.

Two cases, one rule: embeddings that the first and the last stage share, and the copies of a stage
that DualPipe puts on two ranks. Each holder sees only a part of the step, so after it the gradients
are summed over the holders, which keeps equal parameters equal. That they are equal at first is
checked, since nothing later would notice. A rank that holds both ends of the pipeline uses one
`nn.Parameter` in both stages and needs nothing here.

    tied = TiedParameters([stage.embed_tokens.weight], group=first_and_last)
    executor.step(inputs, targets)
    tied.reduce_gradients()
"""

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from comm_collectives import all_gather, all_reduce
from moe_pipeline.errors import MoEValueError

_DIGEST_BYTES = 32


@final
class TiedParameters:
    """The parameters that the ranks of `group` hold together, in the same order on each.

    Making it is collective over the group and compares the values, bit by bit through a hash.

    Args:
        parameters: of any shapes and dtypes.
        group: the ranks that hold them.
        timeout_s: limit of each exchange; None: the group's own.

    Raises:
        ValueError: on every rank of the group: numbers, shapes, dtypes or values differ.
        CommError: a rank did not come; names it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        group: ProcessGroup,
        timeout_s: float | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._timeout_s = timeout_s
        self._device = self._parameters[0].device if self._parameters else None
        self._check()

    def reduce_gradients(self, gradients: Sequence[Tensor] | None = None) -> None:
        """Sum the gradients over the holders, in place. Collective over the group.

        A parameter without gradient counts as zero; one that no holder has a gradient of keeps
        None, so that an optimizer skips it everywhere or nowhere.

        Args:
            gradients: one of each parameter, where they are kept elsewhere than in `.grad`, such as
                in fp32 buffers; given on every rank of the group or on none.

        Raises:
            CommError: a rank did not come, or its gradients have other shapes or dtypes.
        """
        if gradients is not None:
            self._sum(gradients)
            return
        has_grad = [p.grad is not None for p in self._parameters]
        found = torch.tensor(has_grad, dtype=torch.int64, device=self._device)
        found = all_reduce(found, group=self._group, timeout_s=self._timeout_s)
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter, holders in zip(self._parameters, found.tolist(), strict=True):
            if holders:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                kinds[parameter.grad.dtype, parameter.grad.device].append(parameter)
        for parameters in kinds.values():
            self._sum([p.grad for p in parameters if p.grad is not None])

    def _sum(self, gradients: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = all_reduce(flat, group=self._group, timeout_s=self._timeout_s)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _check(self) -> None:
        counts = self._gather(torch.tensor([len(self._parameters)], device=self._device))
        if len(set(counts.tolist())) > 1:
            raise MoEValueError(
                f"the ranks of the group tie {counts.tolist()} parameters; give each the same ones"
            )
        digests = [_digest(parameter) for parameter in self._parameters]
        mine = torch.tensor(digests, dtype=torch.uint8, device=self._device)
        mine = mine.reshape(-1, _DIGEST_BYTES)
        theirs = self._gather(mine).view(len(counts), -1, _DIGEST_BYTES)
        for index, parameter in enumerate(self._parameters):
            differs = theirs[:, index].ne(theirs[:1, index]).any(dim=1)
            if differs.any():
                others = differs.nonzero().flatten().tolist()
                raise MoEValueError(
                    f"tied parameter {index} (here of shape {tuple(parameter.shape)}, "
                    f"{parameter.dtype}) differs between rank 0 and ranks {others} of the group; "
                    "give the holders the same initial values, dtype and shape"
                )

    def _gather(self, rows: Tensor) -> Tensor:
        return all_gather(rows, group=self._group, timeout_s=self._timeout_s)


def _digest(parameter: Tensor) -> list[int]:
    flat = parameter.detach().cpu().contiguous().flatten()
    found = hashlib.sha256(f"{tuple(parameter.shape)} {parameter.dtype}".encode())
    if flat.numel():
        # Its bytes where they lie: its storage may be that of other parameters too.
        found.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return list(found.digest())
