"""Which replica sends how much: the busiest sender sends as little as any choice allows.

Every holder of a cell can send all of it, and no holder needs any of it. So what others need of a
cell may be cut at any element, and each holder sends one run of it. For one tensor an even cut is
the least for the busiest sender. For a list, cells with few replicas are dealt out first, and each
later one fills up those who have least to send; sweeps repeat that until nothing gets better.

    water_fill(torch.tensor([[5, 0, 1]]), torch.tensor([6]))   # [[0, 3, 3]] -> loads 5, 3, 4
"""

import torch


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
