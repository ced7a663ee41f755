"""Attention over heads that ranks have exchanged for positions, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_collectives.call.groups import count_wire_bytes
from moe_train.model.layers import explicit_attention
from moe_train.model.parallel import HeadExchange, HeadWidths, PositionCut
from ranktest import collect_ranks, run_ranks

BATCH, WIDTH = 2, 3


def tensors(num_heads: int, num_kv_heads: int, length: int) -> list[Tensor]:
    """Queries, keys and values of whole samples, in fp64."""
    torch.manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    shapes = [(BATCH, count, length, WIDTH) for count in heads]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def results(whole: list[Tensor]) -> list[Tensor]:
    """What one process gets: [B, H, S, D], and the gradients of its squares."""
    out = explicit_attention(*whole, None)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), whole)]


CASES = [(2, 4, 2, 6), (2, 6, 2, 5), (4, 6, 2, 7), (3, 5, 1, 2), (3, 8, 4, 9), (2, 2, 2, 1)]


@pytest.mark.parametrize(("size", "num_heads", "num_kv_heads", "length"), CASES)
def test_any_heads_and_lengths_give_what_one_process_gets(
    size: int, num_heads: int, num_kv_heads: int, length: int
) -> None:
    """Heads that do not divide, fewer of keys than ranks, ranks without positions."""
    whole = tensors(num_heads, num_kv_heads, length)
    expected = results(whole)
    widths = HeadWidths(
        queries=(num_heads, WIDTH), keys=((num_kv_heads, WIDTH),) * 2, out_width=WIDTH
    )

    def run(rank: int, _: int) -> list[Tensor]:
        cut, group = PositionCut(rank=rank, size=size), dist.group.WORLD
        assert group is not None
        exchange = HeadExchange(group=group, cut=cut, num_positions=length)
        own = [cut.take(x.detach().transpose(1, 2)).transpose(1, 2) for x in whole]
        own = [x.requires_grad_() for x in own]
        with count_wire_bytes(group) as sent:
            heads, (q, k, v) = exchange.to_heads(*own)
            assert q.shape[1] == len(heads) and len(heads) % k.shape[1] == 0
            out = exchange.to_positions(explicit_attention(q, k, v, None), num_heads=num_heads)
        forward = sent.num_wire_bytes
        with count_wire_bytes(group) as sent:
            grads = torch.autograd.grad(out.square().sum(), own)
        planned = [count * BATCH * 8 for count in widths.sent(cut, length)]
        assert [forward, sent.num_wire_bytes] == planned
        return [out.detach(), *grads]

    ranks = run_ranks(run, size)
    for parts, wanted in zip(zip(*ranks, strict=True), expected, strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(torch.cat(parts, dim=2), wanted)


def test_fewer_heads_than_ranks_are_refused_on_every_rank() -> None:
    def run(rank: int, _: int) -> None:
        cut = PositionCut(rank=rank, size=3)
        assert dist.group.WORLD is not None
        exchange = HeadExchange(group=dist.group.WORLD, cut=cut, num_positions=3)
        exchange.to_heads(*[x[:, :, :1] for x in tensors(2, 1, 3)])

    for outcome in collect_ranks(run, 3):
        assert outcome.error is not None
        assert "3 ranks cannot share out 2 attention heads" in outcome.error
