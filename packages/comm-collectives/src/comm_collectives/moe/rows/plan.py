"""Where received choices go among the local experts: planned with plain numbers, kept as tensors.

    placing = plan_placing([[2, 0], [0, 4]], alignment=1, device=torch.device("cpu"))
    placing.num_tokens_per_expert                       # (2, 4)
    x_RD = x_ND.index_select(0, placing.in_place(torch.arange(6)))

Legend: W ranks, L local experts per rank, N choices received, R rows of the local experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from comm_collectives.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Expert by expert, inside an expert by source and then in the source's order, padded.

    Attributes:
        num_tokens_per_expert: rows of each local expert, padding included.
        local_N: the row of each choice; choices are in the order of the wire.
        padding: the rows that belong to no choice, if there are any.
    """

    num_tokens_per_expert: tuple[int, ...]
    local_N: torch.Tensor
    padding: torch.Tensor | None

    def in_place(self, index_N: torch.Tensor) -> torch.Tensor:
        """Bring an index for each choice into the order of the rows; 0 for padding."""
        index_R = index_N.new_zeros(sum(self.num_tokens_per_expert))
        return index_R.scatter_(0, self.local_N, index_N)

    def gather(self, values: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """Return for each row the value that its choice has in `index_N`; zeros for padding."""
        return self.blank(values.index_select(0, self.in_place(index_N)))

    def blank(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Return the rows themselves, with zeros in the padding."""
        return rows_R if self.padding is None else rows_R.index_fill_(0, self.padding, 0)


def plan_placing(
    received_WL: Sequence[Sequence[int]],
    *,
    alignment: int,
    device: torch.device,
    blocks: Iterable[tuple[int, int]] | None = None,
) -> Placing:
    """Plan where received choices go.

    Args:
        received_WL: choices that each source has for each local expert.
        alignment: each local expert's number of rows is rounded up to a multiple of this.
        device: where the choices are.
        blocks: (source, expert) in the order of the wire; None: source by source.
    """
    sums_L = tuple(map(sum, zip(*received_WL, strict=True)))
    padded_L = tuple(round_up(count, alignment) for count in sums_L)
    next_L = first_L = starts(padded_L)
    first_WL: list[list[int]] = []
    for row in received_WL:
        first_WL.append(next_L)
        next_L = [at + count for at, count in zip(next_L, row, strict=True)]
    if blocks is None:
        blocks = [(source, e) for source, row in enumerate(received_WL) for e in range(len(row))]
    order = list(blocks)
    lengths = [received_WL[source][e] for source, e in order]
    padding = None
    if padded_L != sums_L:
        ends_L = [at + count for at, count in zip(first_L, sums_L, strict=True)]
        missing_L = [full - count for full, count in zip(padded_L, sums_L, strict=True)]
        (padding,) = spread([ends_L], missing_L, device)
    (local_N,) = spread([[first_WL[source][e] for source, e in order]], lengths, device)
    return Placing(num_tokens_per_expert=padded_L, local_N=local_N, padding=padding)


def starts(lengths: Sequence[int]) -> list[int]:
    """Return where each of consecutive pieces begins."""
    return list(accumulate(lengths, initial=0))[:-1]


def spread(
    firsts: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return, for each of `firsts`, the numbers of all pieces; each piece counts up from its first.

    All of them in one copy to the device.
    """
    running = starts(lengths)
    shifts = [[at - n for at, n in zip(first, running, strict=True)] for first in firsts]
    numbers = repeat_each(shifts, lengths, device)
    return numbers.add_(torch.arange(numbers.shape[1], device=device)).unbind(0)


def repeat_each(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return each value of each row as often as its piece is long."""
    table = torch.tensor([*rows, lengths], dtype=torch.int64, device=device)
    return table[:-1].repeat_interleave(table[-1], dim=1, output_size=sum(lengths))
