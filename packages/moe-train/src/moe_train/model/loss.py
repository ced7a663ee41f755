"""Head and cross entropy in one function, which holds the logits once.

The usual chain keeps the logits, their log-softmax and its gradient: three times tokens x
vocabulary in fp32, most of a small model's memory. Here the logits are turned into probabilities in
place, and those into their own gradient in backward. The arithmetic is fp32 (fp64 for fp64).

    loss = head_loss(hidden_TD, weight_VD, labels_T)        # a sum; labels of -100 do not count

Shape legend: T tokens, D hidden size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_train.labels import IGNORED_LABEL


def head_loss(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Sum of the cross entropies of the labels that are not -100; a scalar in fp32 or fp64.

    Args:
        hidden_TD: normed hidden states, in the dtype of the weight.
        weight_VD: the head.
        labels_T: int64, each below V or -100.
    """
    loss: Tensor = _HeadLoss.apply(hidden_TD, weight_VD, labels_T)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = F.linear(hidden_TD, weight_VD)
        if logits_TV.dtype in (torch.bfloat16, torch.float16):
            logits_TV = logits_TV.float()
        counts_T1 = (labels_T != IGNORED_LABEL).to(logits_TV.dtype)[:, None]
        index_T1 = labels_T.clamp(min=0)[:, None]
        largest_T1 = logits_TV.amax(dim=-1, keepdim=True)
        chosen_T1 = logits_TV.gather(1, index_T1).sub_(largest_T1)
        exps_TV = logits_TV.sub_(largest_T1).exp_()
        sums_T1 = exps_TV.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(hidden_TD, weight_VD, exps_TV, sums_T1, index_T1, counts_T1)
        ctx.is_used = False
        # Summed in fp64, so that the number does not depend on how a batch is cut over ranks.
        losses_T1 = (sums_T1.log() - chosen_T1).mul_(counts_T1)
        return losses_T1.sum(dtype=torch.float64).to(losses_T1.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if ctx.is_used:
            raise RuntimeError("head_loss can go backward once: its probabilities are overwritten")
        ctx.is_used = True
        hidden_TD, weight_VD, exps_TV, sums_T1, index_T1, counts_T1 = ctx.saved_tensors
        scale_T1 = counts_T1 * grad
        grad_TV = exps_TV.mul_(scale_T1 / sums_T1).scatter_add_(1, index_T1, -scale_T1)
        grad_TV = grad_TV.to(weight_VD.dtype)
        grad_weight = grad_TV.t() @ hidden_TD if ctx.needs_input_grad[1] else None
        return grad_TV @ weight_VD, grad_weight, None
