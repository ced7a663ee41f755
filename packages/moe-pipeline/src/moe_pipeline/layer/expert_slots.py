"""Uneven experts for an exchange that shares them evenly: every rank gets as many numbers.

A rank with fewer experts than the one with most gets numbers that no token chooses, so that the
rows of an expert, and their order, are those of any other split.

    slots = ExpertSlots.of((1, 3))               # experts 0 | 1 2 3 are numbers 0 . . | 3 4 5
    slots.numbers(torch.tensor([[0, 1, -1]]))    # [[0, 3, -1]]

Dims: T tokens, K choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_pipeline._torch_private import FakeTensor


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """Where each expert stands among equally many numbers for each rank.

    Attributes:
        each: numbers of each rank.
        total: numbers of all ranks.
        expert_numbers: the number of each expert.
    """

    each: int
    total: int
    expert_numbers: tuple[int, ...]
    _tables: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, parts: Sequence[int]) -> "ExpertSlots":
        """Those of ranks that hold so many experts each."""
        each = max(parts)
        numbers = tuple(rank * each + at for rank, n in enumerate(parts) for at in range(n))
        return cls(each=each, total=each * len(parts), expert_numbers=numbers)

    def numbers(self, topk_idx_TK: Tensor) -> Tensor:
        """The numbers of chosen experts, which are in range; -1 stays -1."""
        is_fake = isinstance(topk_idx_TK, FakeTensor)  # a table of its mode is of no use outside
        table = None if is_fake else self._tables.get(topk_idx_TK.device)
        if table is None:
            values = [*self.expert_numbers, -1]  # an index of -1 finds the last one
            table = torch.tensor(values, dtype=torch.int64, device=topk_idx_TK.device)
            if not is_fake:
                self._tables[topk_idx_TK.device] = table
        return table[topk_idx_TK]
