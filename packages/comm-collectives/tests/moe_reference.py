"""The oracle of dispatch and combine: a dense MoE layer in one process, without any of our code."""

import torch
from torch import Tensor


def expert_weights(num_experts: int, hidden: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """One square matrix per expert, the same on every rank."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(num_experts, hidden, hidden, generator=generator, dtype=torch.float64).to(
        dtype
    )


def dense_moe(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Tensor) -> Tensor:
    """out[t] = sum over k of weight[t, k] * tanh(x[t] @ experts[idx[t, k]])."""
    y = torch.tanh(torch.einsum("td,edf->tef", x, experts))
    chosen = y.gather(1, topk_idx[:, :, None].expand(-1, -1, y.shape[2]))
    return (chosen * topk_weights[:, :, None]).sum(1)


def loop_experts(
    x: Tensor, num_tokens_per_expert: tuple[int, ...], weights: Tensor, experts: Tensor
) -> Tensor:
    """The same on sorted rows, expert by expert; an expert without rows is skipped."""
    rows, start = [x.new_zeros(0, x.shape[1])], 0
    for e, count in enumerate(num_tokens_per_expert):
        if count:
            piece = slice(start, start + count)
            rows.append(torch.tanh(x[piece] @ experts[e]) * weights[piece, None])
        start += count
    return torch.cat(rows)
