"""The sending side of a hop: which row goes to which peer, for which choices.

Legend: that of moe/routes/routing.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from comm_collectives.moe.rows import Bags, SortedChoices, bags_of, repeat_each, starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a rank sends in a hop.

    Attributes:
        rows_P: rows for each peer.
        item_U: item of each row, by peer, then by item.
        row_N: int32, row of each choice among those for its peer; None if each has its own.
        bags: makes the bags of the rows of each item; not asked before rows come back.
    """

    rows_P: Sequence[int]
    item_U: torch.Tensor
    row_N: torch.Tensor | None
    bags: Callable[[], Bags]


def plan_rows(choices: SortedChoices, choices_P: Sequence[int]) -> Source:
    """Give each choice a row of its own."""

    def bags() -> Bags:
        return choices.bags(torch.arange(choices.order_N.numel(), device=choices.order_N.device))

    return Source(rows_P=choices_P, item_U=choices.token_N, row_N=None, bags=bags)


def plan_source(item_N: torch.Tensor, num_items: int, choices_P: Sequence[int]) -> Source:
    """Find the unique rows for each peer, given the item of each choice, choices by peer."""
    key_N, wanted_PX = _wanted(item_N, num_items, choices_P)
    rows_P, wanted = wanted_PX.sum(1).tolist(), wanted_PX.view(-1)
    running_N = (wanted.cumsum(0) - 1).index_select(0, key_N)
    item_U = wanted.nonzero().view(-1).remainder(max(1, num_items))
    first_N = repeat_each([starts(rows_P)], choices_P, item_N.device)[0]
    return Source(
        rows_P=rows_P,
        item_U=item_U,
        row_N=(running_N - first_N).to(torch.int32),
        bags=lambda: bags_of(item_U, torch.arange(len(item_U), device=item_U.device), num_items),
    )


def count_unique(item_N: torch.Tensor, num_items: int, choices_P: Sequence[int]) -> list[int]:
    """Count the unique rows for each peer, given the item of each choice, choices by peer."""
    counts: list[int] = _wanted(item_N, num_items, choices_P)[1].sum(1).tolist()
    return counts


def _wanted(
    item_N: torch.Tensor, num_items: int, choices_P: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each choice's place in the flat table, and the table: who wants what."""
    num_peers, device = len(choices_P), item_N.device
    first_P = [peer * num_items for peer in range(num_peers)]
    key_N = repeat_each([first_P], choices_P, device)[0].add_(item_N)
    wanted = torch.zeros(num_peers * num_items, dtype=torch.bool, device=device)
    return key_N, wanted.index_fill_(0, key_N, True).view(num_peers, num_items)
