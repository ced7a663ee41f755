"""The weight of a token in the loss of a whole step.

A mean per microbatch, averaged, gives tokens of short microbatches more weight, and makes the loss
depend on how a batch is cut. So the last stage sums over tokens and multiplies by one factor, the
same for all microbatches and ranks: one over the tokens of the step.

    scale = token_scale(labels, group=dp_group)
    loss = F.cross_entropy(logits, target, reduction="sum") * scale      # in the last stage
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from comm_collectives import all_reduce


def token_scale(
    labels: Sequence[Tensor | None],
    *,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    timeout_s: float | None = None,
) -> float:
    """1 / (tokens of the step that count). Collective over `group`; call it before the step.

    Args:
        labels: of the microbatches whose last stage runs on this rank; None for others. The group's
            backend has to carry tensors of their device.
        group: all ranks that run the last stage: data parallel ones, and with DualPipe both copies;
            None: this rank alone.
        ignore_index: labels that do not count.
        timeout_s: limit of the exchange; None: the group's own.

    Returns:
        The factor; 1.0 if no token counts, where every sum is 0.

    Raises:
        CommError: a rank did not come.
    """
    own = [x for x in labels if x is not None]
    device = own[0].device if own else None
    total = torch.tensor(sum(int((x != ignore_index).sum()) for x in own), device=device)
    if group is not None:
        total = all_reduce(total, group=group, timeout_s=timeout_s)
    return 1.0 / max(int(total), 1)
