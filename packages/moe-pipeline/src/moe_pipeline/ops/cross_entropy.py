"""Head and cross entropy together, without ever holding the logits of all tokens.

Logits are tokens x vocabulary in fp32, with their log-softmax and its gradient the largest tensors
of many a training step. Here a chunk of tokens at a time goes through the head, gives its losses
and, while its probabilities are there, its part of both gradients. So the logits live once, for one
chunk, and the head's product is done once. What is kept for backward is the gradients themselves:
one tensor of the size of the hidden states and one of the size of the head.

    loss = chunked_cross_entropy(hidden_TD, weight_VD, labels_T)  # a sum, without labels of -100
    (loss / num_labels).backward()

The softmax and all sums are fp32 (fp64 for fp64): losses are summed in fp64, so that the number
does not depend on how tokens are cut over ranks, and the head's gradient is summed over chunks in
fp32 and rounded once. Gradients in forward: Liger Kernel (arXiv 2410.10989).

Dims: T tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_pipeline._checks import check_count, check_type
from moe_pipeline.errors import MoETypeError, MoEValueError

IGNORED_LABEL = -100
_DEFAULT_CHUNK_BYTES = 1 << 26
_CPU_BLOCK_ELEMENTS = 1 << 20
_CUDA_BLOCK_ELEMENTS = 1 << 25


def chunked_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk_bytes: int | None = None,
    ignore_index: int = IGNORED_LABEL,
) -> Tensor:
    """Sum over tokens of the cross entropy of `hidden_TD @ weight_VD.T` and their labels.

    Differentiable once, by hidden states and head; backward may run more than once. Not collective.

    Args:
        hidden_TD: [T, D] normed hidden states, in the dtype of the head (under autocast both are
            taken in its dtype, unless in fp64). T may be 0.
        weight_VD: [V, D] the head.
        labels_T: int64 [T], each in 0 .. V-1 or `ignore_index`. Others are refused on a CPU and
            trip a device assertion of torch on CUDA.
        chunk_bytes: about how much memory the fp32 logits of a chunk may take; at least one token
            is taken. None: 64 MiB, or the size of the hidden states in fp32 if that is more.
        ignore_index: tokens with this label add no loss and get a gradient of zero.

    Returns:
        0-d, fp32 (fp64 for fp64). Divide it by the number of labels of the global batch.

    Raises:
        ValueError: shapes that do not fit, a label out of range, or `chunk_bytes` below 1.
        TypeError: dtypes that do not fit.
    """
    given = {"hidden_TD": hidden_TD, "weight_VD": weight_VD, "labels_T": labels_T}
    for name, tensor in given.items():
        check_type(name, tensor, Tensor)
    check_type("ignore_index", ignore_index, int)
    device_type, fp64 = hidden_TD.device.type, torch.float64  # which autocast leaves alone
    if torch.is_autocast_enabled(device_type) and fp64 not in (hidden_TD.dtype, weight_VD.dtype):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
    _check_tensors(hidden_TD, weight_VD, labels_T, chunk_bytes)
    if labels_T.device.type == "cpu":
        _check_labels(labels_T, weight_VD.shape[0], ignore_index)
    spec = _Spec(
        chunk_tokens=_chunk_tokens(hidden_TD, weight_VD, chunk_bytes),
        ignore_index=ignore_index,
        with_gradients=torch.is_grad_enabled(),
    )
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden_TD, weight_VD, labels_T, spec
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    chunk_tokens: int
    ignore_index: int
    with_gradients: bool


@final
class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, spec: _Spec
    ) -> Tensor:
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        needs_hidden, needs_weight = (
            need and spec.with_gradients for need in ctx.needs_input_grad[:2]
        )
        # Chunks add up in fp32; a single one needs no sum.
        several = hidden_TD.shape[0] > spec.chunk_tokens
        sum_dtype = wide if several else weight_VD.dtype
        grad_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if needs_weight else None
        total = torch.zeros((), dtype=torch.float64, device=hidden_TD.device)
        for start in range(0, hidden_TD.shape[0], spec.chunk_tokens):
            chunk = slice(start, start + spec.chunk_tokens)
            grad_CD = None if grad_TD is None else grad_TD[chunk]
            total += _chunk(
                hidden_TD[chunk], weight_VD, labels_T[chunk], spec.ignore_index, (grad_CD, grad_VD)
            )
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_TD, grad_VD = ctx.saved_tensors
        return (
            _scaled(grad_TD, grad, None if grad_TD is None else grad_TD.dtype),
            _scaled(grad_VD, grad, ctx.weight_dtype),
            None,
            None,
        )


def _chunk(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    ignore_index: int,
    grads: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Loss of a chunk in fp64; writes `grads[0]` [C, D] and adds to `grads[1]` [V, D]."""
    grad_CD, grad_VD = grads
    ignored_C1 = (labels_C == ignore_index)[:, None]
    index_C1 = labels_C[:, None].masked_fill(ignored_C1, 0)
    logits_CV = _logits(hidden_CD, weight_VD)
    largest_C1 = logits_CV.amax(dim=-1, keepdim=True)
    exps_CV = logits_CV.sub_(largest_C1)
    chosen_C1 = exps_CV.gather(1, index_C1)
    sums_C1 = exps_CV.exp_().sum(dim=-1, keepdim=True)
    losses_C1 = (sums_C1.log() - chosen_C1).masked_fill_(ignored_C1, 0.0)
    if grad_CD is not None or grad_VD is not None:
        grad_CV = exps_CV.mul_(sums_C1.reciprocal_())
        grad_CV.scatter_add_(1, index_C1, grad_CV.new_full((), -1.0).expand(index_C1.shape))
        grad_CV = grad_CV.masked_fill_(ignored_C1, 0.0).to(weight_VD.dtype)
        if grad_CD is not None:
            torch.mm(grad_CV, weight_VD, out=grad_CD)
        if grad_VD is not None:
            # What ignored tokens hold may be NaN, which a gradient of zero does not undo.
            _add_product(grad_VD, grad_CV.t(), hidden_CD.masked_fill(ignored_C1, 0.0))
    return losses_C1.sum(dtype=torch.float64)


def _logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """In fp32 or fp64, and in memory of their own."""
    with torch.autocast(device_type=hidden_CD.device.type, enabled=False):
        logits_CV = F.linear(hidden_CD, weight_VD)
    return logits_CV.to(torch.promote_types(weight_VD.dtype, torch.float32))


def _add_product(sum_VD: Tensor, grad_VC: Tensor, hidden_CD: Tensor) -> None:
    """`sum_VD += grad_VC @ hidden_CD`, also into a wider dtype."""
    if sum_VD.dtype == hidden_CD.dtype:
        sum_VD.addmm_(grad_VC, hidden_CD)
        return
    # In blocks of rows, as sums of two dtypes make a copy of what they add.
    elements = _CPU_BLOCK_ELEMENTS if sum_VD.device.type == "cpu" else _CUDA_BLOCK_ELEMENTS
    rows = max(1, elements // max(1, sum_VD.shape[1]))
    for sums, grads in zip(sum_VD.split(rows), grad_VC.split(rows), strict=True):
        sums.add_(grads @ hidden_CD)


def _scaled(saved: Tensor | None, grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """`saved * grad`, rounded once; not in place, as backward may come again."""
    if saved is None:
        return None
    out = torch.empty_like(saved, dtype=dtype)
    return torch.mul(saved, grad, out=out)


def _chunk_tokens(hidden_TD: Tensor, weight_VD: Tensor, chunk_bytes: int | None) -> int:
    num_tokens, hidden_size = hidden_TD.shape
    itemsize = torch.promote_types(weight_VD.dtype, torch.float32).itemsize
    if chunk_bytes is None:
        chunk_bytes = max(_DEFAULT_CHUNK_BYTES, num_tokens * hidden_size * itemsize)
    tokens = max(1, chunk_bytes // (weight_VD.shape[0] * itemsize))
    # Chunks of one size, as a small last one would be slow.
    num_chunks = max(1, -(-num_tokens // tokens))
    return max(1, -(-num_tokens // num_chunks))


def _check_tensors(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_bytes: int | None
) -> None:
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise MoEValueError(
            f"hidden_TD must be [tokens, size] and weight_VD [vocabulary, size], got "
            f"{tuple(hidden_TD.shape)} and {tuple(weight_VD.shape)}; flatten batch and sequence"
        )
    if weight_VD.shape[0] == 0:
        raise MoEValueError("weight_VD has no rows: the vocabulary is empty")
    if labels_T.shape != hidden_TD.shape[:1]:
        raise MoEValueError(
            f"labels_T must have one label for each of the {hidden_TD.shape[0]} tokens, got shape "
            f"{tuple(labels_T.shape)}"
        )
    if hidden_TD.dtype != weight_VD.dtype or not hidden_TD.is_floating_point():
        raise MoETypeError(
            f"hidden_TD and weight_VD must be of one float dtype, got {hidden_TD.dtype} and "
            f"{weight_VD.dtype}; convert one of them"
        )
    if labels_T.dtype != torch.int64:
        raise MoETypeError(f"labels_T must be torch.int64, got {labels_T.dtype}; convert them")
    if chunk_bytes is not None:
        check_count("chunk_bytes", chunk_bytes)


def _check_labels(labels_T: Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong_T = ((labels_T < 0) | (labels_T >= vocabulary)) & (labels_T != ignore_index)
    if wrong_T.any():
        token = int(wrong_T.nonzero()[0])
        raise MoEValueError(
            f"label {int(labels_T[token])} of token {token} is outside 0..{vocabulary - 1}; "
            f"mask tokens without a label with ignore_index={ignore_index}"
        )
