"""Embedding and head of which tensor-parallel ranks share out the rows, and the loss of both.

A rank looks up the tokens of all positions in its own rows; the sum over the ranks, of which each
keeps its own positions, is the embedding. For the loss it gathers the hidden states of all
positions and computes the logits of its own rows; of each token the ranks tell each other the
largest logit, the sum of exponentials and the label's logit (Megatron-LM, arXiv 1909.08053).

Invariant: each rank returns the losses of its own positions, and its backward is that of the sum
over the ranks. So the gradient of its rows is whole, and that of hidden states is a part of a sum.

    share = VocabularyShare(tp=tp, size=32000)
    x_BPd = share.embedded(input_ids_BS, rows_Vd)
    loss = share.loss(hidden_BPd, rows_Vd, labels_BS)

Shape legend: B sequences, P positions of this rank, S of all ranks of tp, d hidden size, V this
rank's rows, T = S * B tokens, C tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from comm_collectives import all_reduce
from moe_train.labels import IGNORED_LABEL
from moe_train.model.parallel.position_cut import PositionCut
from moe_train.model.parallel.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShare:
    """This rank's rows of a vocabulary of `size`; the first ranks have one more if some are left.

    Args:
        tp: the ranks that share it out.
        size: at least one row for each of them.
    """

    size: int
    tp: TensorParallel = ALONE

    @property
    def rows(self) -> range:
        """Which rows this rank has."""
        (rows,) = PositionCut(rank=self.tp.rank, size=self.tp.size).spans(self.size)[self.tp.rank]
        return rows

    def embedded(self, ids_BS: Tensor, rows_Vd: Tensor) -> Tensor:
        """The embeddings of this rank's positions, [B, P, d]. Collective, also in its backward.

        Args:
            ids_BS: int64, of the positions of all ranks of `tp`.
            rows_Vd: this rank's rows of the embedding.

        Raises:
            IndexError: an id is no row of the vocabulary (on CUDA a device assertion of torch).
        """
        if self.tp.size == 1:
            return F.embedding(ids_BS, rows_Vd)
        index_BS, is_elsewhere_BS = self.own(ids_BS)
        found_BSd = F.embedding(index_BS, rows_Vd)
        return self.tp.scatter(found_BSd.masked_fill(is_elsewhere_BS[..., None], 0.0))

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where ids lie among this rank's rows, 0 for those of other ranks; and which these are.

        What is no id of the vocabulary stays out of range, so that torch refuses to look it up.
        """
        rows = self.rows
        is_before = (ids >= 0) & (ids < rows.start)
        is_elsewhere = is_before | ((ids >= rows.stop) & (ids < self.size))
        index = torch.where(ids < 0, ids, ids - rows.start)
        return index.masked_fill(is_elsewhere, 0), is_elsewhere

    def loss(
        self,
        hidden_BPd: Tensor,
        rows_Vd: Tensor,
        labels_BS: Tensor,
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """Sum of the cross entropies of this rank's positions; labels of -100 do not count.

        Collective over `tp`, also in its backward; differentiable once. Softmax and sums are fp32
        (fp64 for fp64). Gradients are made with the losses, so that no logits are kept.

        Args:
            hidden_BPd: normed hidden states, in the dtype of the head.
            rows_Vd: this rank's rows of the head.
            labels_BS: int64, of the positions of all ranks of `tp`; each a row or -100.
            chunk_tokens: tokens whose logits are there at a time; None: all.

        Raises:
            IndexError: a label is no row of the vocabulary (on CUDA a device assertion of torch).
        """
        hidden_Td = self.tp.gather(hidden_BPd).transpose(0, 1).flatten(0, 1)
        lengths = PositionCut(rank=self.tp.rank, size=self.tp.size).lengths(labels_BS.shape[1])
        first, rows = sum(lengths[: self.tp.rank]), labels_BS.shape[0]
        how = _How(
            share=self,
            chunk_tokens=chunk_tokens or max(1, len(hidden_Td)),
            own=slice(first * rows, (first + lengths[self.tp.rank]) * rows),
            with_gradients=torch.is_grad_enabled(),
        )
        loss: Tensor = _SharedHeadLoss.apply(hidden_Td, rows_Vd, labels_BS.t().flatten(), how)
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    share: VocabularyShare
    chunk_tokens: int
    own: slice
    with_gradients: bool


@final
class _SharedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_Td: Tensor, rows_Vd: Tensor, labels_T: Tensor, how: _How
    ) -> Tensor:
        wide = torch.promote_types(rows_Vd.dtype, torch.float32)
        needs_hidden, needs_rows = (n and how.with_gradients for n in ctx.needs_input_grad[:2])
        # Chunks add up in fp32; a single one needs no sum.
        is_one = len(hidden_Td) <= how.chunk_tokens
        sum_dtype = rows_Vd.dtype if is_one else wide
        grad_Td = torch.empty_like(hidden_Td) if needs_hidden else None
        grad_Vd = torch.zeros_like(rows_Vd, dtype=sum_dtype) if needs_rows else None
        losses_T = torch.zeros(labels_T.shape, dtype=wide, device=labels_T.device)
        for start in range(0, len(hidden_Td), how.chunk_tokens):
            chunk = slice(start, start + how.chunk_tokens)
            hidden_Cd, labels_C = hidden_Td[chunk], labels_T[chunk]
            losses_T[chunk], grad_CV = _losses(hidden_Cd, rows_Vd, labels_C, how)
            if grad_Td is not None:
                torch.mm(grad_CV, rows_Vd, out=grad_Td[chunk])
            if grad_Vd is not None:
                # What ignored tokens hold may be NaN, which a gradient of zero does not undo.
                counted_Cd = hidden_Cd.masked_fill((labels_C == IGNORED_LABEL)[:, None], 0.0)
                grad_Vd += grad_CV.t() @ counted_Cd
        ctx.save_for_backward(grad_Td, grad_Vd)
        ctx.dtype = rows_Vd.dtype
        # Summed in fp64, so that the number does not depend on how a batch is cut over ranks.
        return losses_T[how.own].sum(dtype=torch.float64).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        scaled = (None if g is None else (g * grad).to(ctx.dtype) for g in ctx.saved_tensors)
        grad_Td, grad_Vd = scaled
        return grad_Td, grad_Vd, None, None


def _losses(
    hidden_Cd: Tensor, rows_Vd: Tensor, labels_C: Tensor, how: _How
) -> tuple[Tensor, Tensor]:
    """The losses [C] of all ranks' positions, and the gradient of this rank's logits [C, V]."""
    tp = how.share.tp
    is_ignored_C = labels_C == IGNORED_LABEL
    index_C, is_elsewhere_C = how.share.own(
        labels_C.masked_fill(is_ignored_C, how.share.rows.start)
    )
    logits_CV = F.linear(hidden_Cd, rows_Vd)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    largest_C = logits_CV.amax(dim=-1)
    chosen_C = logits_CV.gather(1, index_C[:, None])[:, 0].masked_fill(is_elsewhere_C, 0.0)
    exps_CV = logits_CV.sub_(largest_C[:, None]).exp_()
    # A sum with zeros is a gather without the hosts telling each other sizes.
    told_N3C = largest_C.new_zeros((tp.size, 3, len(labels_C)))
    told_N3C[tp.rank] = torch.stack((largest_C, exps_CV.sum(dim=-1), chosen_C))
    largest_NC, sums_NC, chosen_NC = all_reduce(told_N3C, group=tp.group).unbind(1)
    most_C = largest_NC.amax(dim=0)
    sums_C = (sums_NC * (largest_NC - most_C).exp()).sum(dim=0)
    losses_C = (sums_C.log() - (chosen_NC.sum(dim=0) - most_C)).masked_fill(is_ignored_C, 0.0)
    grad_CV = exps_CV.mul_(((largest_C - most_C).exp() / sums_C)[:, None])
    ones_C = torch.where(is_elsewhere_C, 0.0, 1.0).to(grad_CV.dtype)
    grad_CV.scatter_add_(1, index_C[:, None], -ones_C[:, None])
    grad_CV = grad_CV.masked_fill_(is_ignored_C[:, None], 0.0)
    return losses_C, grad_CV.to(rows_Vd.dtype)
