"""Attention with keys that go around among ranks, against one process."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_collectives.call.groups import count_wire_bytes
from moe_train.model.documents import read_documents
from moe_train.model.layers import explicit_attention
from moe_train.model.parallel import PositionCut, RingAttention, RingWidths, ring
from ranktest import run_ranks

BATCH, HEADS, KV_HEADS, KEY, VALUE = 2, 4, 2, 3, 5
SCALE = 0.4
CASES = [
    (2, 8, None, False),
    (3, 13, None, True),
    (3, 14, 4, True),
    (4, 9, 2, False),
    (2, 9, 1, False),
    (3, 2, None, False),
]


@pytest.mark.parametrize("tile", [1, 1 << 20])
@pytest.mark.parametrize(("size", "length", "window", "has_documents"), CASES)
def test_any_window_documents_and_lengths_give_what_one_process_gets(
    size: int, length: int, window: int | None, has_documents: bool, tile: int
) -> None:
    """With sinks; tiles of one query and of all; ranks without positions."""
    torch.manual_seed(0)
    positions = torch.arange(length).repeat(BATCH, 1)
    if has_documents:
        positions[0, 5:] -= 5
        positions[1, 9:] = -1
    documents = read_documents(positions)
    shapes = [(HEADS, KEY), (KV_HEADS, KEY), (KV_HEADS, VALUE)]
    whole = [torch.randn(BATCH, n, length, d, dtype=torch.float64) for n, d in shapes]
    sinks = torch.randn(HEADS, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*whole, sinks)]
    mask = documents.mask(window)
    out = explicit_attention(*inputs[:3], mask, scale=SCALE, sinks_H=inputs[3])
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    def run(rank: int, _: int) -> list[Tensor]:
        cut, group = PositionCut(rank=rank, size=size, is_folded=True), dist.group.WORLD
        assert group is not None
        around = RingAttention(
            group=group,
            cut=cut,
            num_positions=length,
            window=window,
            document_BS=documents.numbers() if has_documents else None,
        )
        own = [cut.take(x.detach().transpose(1, 2)).transpose(1, 2) for x in whole]
        own = [x.requires_grad_() for x in (*own, sinks.detach().clone())]
        with mock.patch.object(ring, "_TILE_NUMBERS", tile), count_wire_bytes(group) as sent:
            out = around.attend(*own[:3], scale=SCALE, sinks_H=own[3])
            forward = sent.num_wire_bytes
            grads = torch.autograd.grad(out.square().sum(), own)
        widths = RingWidths(num_kv_heads=KV_HEADS, width=KEY + VALUE)
        planned = [count * BATCH * 8 for count in widths.sent(cut, length)]
        assert [forward, sent.num_wire_bytes - forward] == [planned[0], sum(planned[1:])]
        return [out.detach(), *grads]

    ranks = run_ranks(run, size)
    spans = PositionCut(rank=0, size=size, is_folded=True).spans(length)
    order = torch.tensor([place for runs in spans for run in runs for place in run])
    parts = list(zip(*ranks, strict=True))  # type: ignore[arg-type]
    for found, wanted in zip(parts[:4], expected[:4], strict=True):
        torch.testing.assert_close(torch.cat(found, dim=2), wanted[:, :, order])
    torch.testing.assert_close(torch.stack(parts[4]).sum(dim=0), expected[4])
