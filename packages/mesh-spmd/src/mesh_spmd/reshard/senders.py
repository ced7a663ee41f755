"""Which replica sends how much: the busiest sender sends as little as any choice allows.

Every holder of a cell can send all of it, and no holder needs any of it. So what others need of a
cell may be cut at any element, and each holder sends one run of it. For one tensor an even cut is
the least for the busiest sender. For a list, cells with few replicas are dealt out first, each
later one fills up those who have least to send, and sweeps repeat that until nothing gets better.
Then `EvenFlow` makes it the least there is, for up to `FLOW_NUMBERS` holders: exactly where all
elements are of one size. Of several sizes they travel whole, which deal is best is a hard problem
(scheduling on restricted machines), and the solution in bytes is rounded: tests hold the busiest
within one of the widest elements.

    water_fill(torch.tensor([[5, 0, 1]]), torch.tensor([6]))   # [[0, 3, 3]] -> loads 5, 3, 4
    sent, shares = deal_out(holders, amounts, itemsizes, num_ranks=8)
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mesh_spmd.reshard.even_flow import EvenFlow, Row

SWEEPS = 4
SWEEP_NUMBERS = 2_000_000  # beyond so many shares one pass has to do
FLOW_NUMBERS = 20_000  # beyond so many holders of cells, alike ones counted once, sweeps have to do


def water_fill(loads: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """Return how to add `amounts` to `loads` so that the largest sum of each row is least.

    Args:
        loads: [cells, replicas] int64, what each holder has to send already.
        amounts: [cells] int64, what each row is to send in addition.

    Returns:
        [cells, replicas] int64, none negative; each row adds up to its amount.
    """
    replicas = loads.shape[1]
    if replicas == 1:
        return amounts.view(-1, 1).clone()
    ordered, order = loads.sort(dim=1, stable=True)
    counts = torch.arange(1, replicas + 1)
    # With the j least loaded filled up to one level, the level is this; it must not pass the next.
    levels = (amounts.view(-1, 1) + ordered.cumsum(1)) // counts
    fits = torch.ones_like(levels, dtype=torch.bool)
    fits[:, :-1] = levels[:, :-1] < ordered[:, 1:]
    chosen = fits.to(torch.uint8).argmax(1, keepdim=True)
    level = levels.gather(1, chosen)
    filled = torch.where(counts - 1 <= chosen, level - ordered, 0).clamp(min=0)
    rest = amounts.view(-1, 1) - filled.sum(1, keepdim=True)
    filled += (counts <= rest).to(torch.int64)
    return torch.empty_like(filled).scatter_(1, order, filled)


def deal_out(
    holders: Sequence[torch.Tensor],
    amounts: Sequence[torch.Tensor],
    itemsizes: Sequence[int],
    num_ranks: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the bytes each rank sends, and for each move the elements each holder sends.

    Args:
        holders: of each move, [cells, replicas] int64: positions of the ranks that hold each cell.
        amounts: of each move, [cells] int64: elements to send.
        itemsizes: bytes of an element of each move.
    """
    sent = torch.zeros(num_ranks, dtype=torch.int64)
    shares = [torch.empty(0)] * len(holders)
    order = sorted(range(len(holders)), key=lambda i: holders[i].shape[1])
    for i in order:
        shares[i] = _fill(sent, holders[i], amounts[i], itemsizes[i])
    free = [i for i in order if holders[i].shape[1] > 1]
    if not free or len(order) == 1 or len(free) * num_ranks > SWEEP_NUMBERS:
        return sent, shares
    for _ in range(SWEEPS):
        highest = int(sent.max())
        for i in free:
            sent.index_add_(0, holders[i].flatten(), shares[i].flatten(), alpha=-itemsizes[i])
            shares[i] = _fill(sent, holders[i], amounts[i], itemsizes[i])
        if int(sent.max()) >= highest:
            break
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in free:
        groups[id(holders[i]), itemsizes[i]].append(i)
    alike = [_Alike(holders[g[0]], itemsizes[g[0]], g) for g in groups.values()]
    if sum(each.holders.numel() for each in alike) <= FLOW_NUMBERS:
        _even_out(sent, shares, amounts, alike, min(itemsizes))
    return sent, shares


def _fill(
    sent: torch.Tensor, where: torch.Tensor, amounts: torch.Tensor, itemsize: int
) -> torch.Tensor:
    """Deal one move out to its holders, and add what they send to `sent`."""
    shares = water_fill(sent[where] // itemsize, amounts)
    sent.index_add_(0, where.flatten(), shares.flatten(), alpha=itemsize)
    return shares


@dataclass(frozen=True, slots=True)
class _Alike:
    """Moves with the same holders and elements of one size."""

    holders: torch.Tensor
    itemsize: int
    moves: list[int]


def _even_out(
    sent: torch.Tensor,
    shares: list[torch.Tensor],
    amounts: Sequence[torch.Tensor],
    groups: Sequence[_Alike],
    unit: int,
) -> None:
    """Lower the most that a rank sends as far as it goes; `unit` bytes are the smallest element."""
    loads = (sent // unit).tolist()
    rows = [_rows(shares, group, group.itemsize // unit) for group in groups]
    widths = [group.itemsize // unit for group in groups]
    for width in sorted(set(widths), reverse=True):
        # Wider elements are dealt out in whole ones already; narrower ones still fill up.
        open_rows = [
            row for w, found in zip(widths, rows, strict=True) if w <= width for row in found
        ]
        EvenFlow(loads=loads, rows=open_rows).run()
        if width > 1:
            for w, found in zip(widths, rows, strict=True):
                if w == width:
                    _make_whole(loads, found, width)
    if max(loads) * unit >= int(sent.max()):
        return
    for group, found, width in zip(groups, rows, widths, strict=True):
        dealt = torch.tensor([row.shares for row in found]) // width
        _split(shares, amounts, group.moves, dealt)
    sent.copy_(torch.tensor(loads) * unit)


def _rows(shares: Sequence[torch.Tensor], group: _Alike, width: int) -> list[Row]:
    together = torch.stack([shares[i] for i in group.moves]).sum(0) * width
    pairs = zip(group.holders.tolist(), together.tolist(), strict=True)
    return [Row(holders=holders, shares=dealt) for holders, dealt in pairs]


def _make_whole(loads: list[int], rows: Sequence[Row], width: int) -> None:
    """Round shares to whole elements; those that are over go to who sends the least."""
    for row in rows:
        over = sum(share % width for share in row.shares) // width
        for position, rank in enumerate(row.holders):
            loads[rank] -= row.shares[position] % width
            row.shares[position] -= row.shares[position] % width
        for _ in range(over):
            position = min(range(len(row.holders)), key=lambda p: loads[row.holders[p]])
            row.shares[position] += width
            loads[row.holders[position]] += width


def _split(
    shares: list[torch.Tensor],
    amounts: Sequence[torch.Tensor],
    moves: Sequence[int],
    dealt: torch.Tensor,
) -> None:
    """Cut what each holder sends of all moves, one after the other, into its shares of each."""
    ends = dealt.cumsum(1)
    begins = ends - dealt
    done = torch.zeros(len(dealt), 1, dtype=torch.int64)
    for i in moves:
        after = done + amounts[i].view(-1, 1)
        shares[i] = (ends.minimum(after) - begins.maximum(done)).clamp(min=0)
        done = after
