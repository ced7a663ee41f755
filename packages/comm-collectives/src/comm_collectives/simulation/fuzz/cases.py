"""Calls for the fuzzer, each with its result computed without any communication.

A case draws the data of all ranks at once, so every rank and the oracle know the same numbers.
All values are small integers, whatever the dtype, so sums are exact and results are equal bit for
bit. A case is made anew for each number of ranks, from the same seed.

    case = Rows(Draw(seed=5, size=8, has_tokens=[True] * 8))
    got = case.call(rank)                  # on each rank
    case.expected()[3]                     # what rank 3 must get
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import final

import torch

from comm_collectives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from comm_collectives.errors import CommTypeError
from comm_collectives.nested import broadcast_nested
from comm_collectives.simulation import SimRank

Results = Sequence[torch.Tensor]
_FOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


@final
class Draw:
    """Random choices of one case.

    `has_tokens[r]` is False for a rank without data; `is_calm` that nothing can go wrong by itself.
    """

    def __init__(
        self, *, seed: int, size: int, has_tokens: Sequence[bool], is_calm: bool = True
    ) -> None:
        self.chance = Random(seed)
        self.size, self.is_calm = size, is_calm
        self.has_tokens = torch.tensor(has_tokens)
        self._generator = torch.Generator().manual_seed(seed % 2**64)

    def numbers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers in low..high - 1."""
        return torch.randint(low, high, shape, generator=self._generator)

    def counts(self, high: int) -> list[int]:
        """How many rows each rank has; 0 without tokens."""
        counts = self.numbers(0, high, self.size) * self.has_tokens
        return [int(count) for count in counts.tolist()]


class Case(ABC):
    """One call of a fuzzed program."""

    name: str

    @abstractmethod
    def call(self, rank: SimRank) -> Results:
        """Make the call on one rank."""

    @abstractmethod
    def expected(self) -> list[Results]:
        """Return what each rank must get, by rank."""


@final
class Reduce(Case):
    """all_reduce of nothing, little and more."""

    name = "all_reduce"

    def __init__(self, draw: Draw) -> None:
        self._op = draw.chance.choice(list(_FOLD))
        self._grad = self._op == "sum" and draw.chance.random() < 0.3
        dtype = torch.float32 if self._grad else draw.chance.choice(_DTYPES)
        length = draw.chance.choice((0, 3, 200))
        self._data = draw.numbers(0, 100, draw.size, length).to(dtype)
        self._data[~draw.has_tokens] = 0

    def call(self, rank: SimRank) -> Results:
        """With a gradient now and then."""
        x = self._data[rank.rank].clone().requires_grad_(self._grad)
        y = all_reduce(x, op=self._op, group=rank.group)
        if not self._grad:
            return (y,)
        y.sum().backward()
        return y.detach(), _grad(x)

    def expected(self) -> list[Results]:
        """Folded in the order of the ranks."""
        total = self._data[0]
        for row in self._data[1:]:
            total = _FOLD[self._op](total, row)
        size = self._data.shape[0]
        if not self._grad:
            return [(total,)] * size
        return [(total, torch.full_like(total, size))] * size


@final
class Rows(Case):
    """all_to_all of uneven rows; some ranks may not use the result."""

    name = "all_to_all"

    def __init__(self, draw: Draw) -> None:
        size = draw.size
        self._splits = draw.numbers(0, 3, size, size) * draw.has_tokens[:, None]
        self._knows = draw.chance.random() < 0.3
        self._grad = draw.chance.random() < 0.5
        used = draw.numbers(0, 4, size) > 0 if draw.chance.random() < 0.3 else torch.ones(size)
        self._used = used.bool()
        flat = self._splits.reshape(-1)
        ranks = torch.arange(size)
        self._src = ranks.repeat_interleave(size).repeat_interleave(flat)
        self._dst = ranks.repeat(size).repeat_interleave(flat)
        columns = torch.arange(draw.chance.choice((2, 20, 60)))
        self._rows = torch.arange(int(flat.sum()), dtype=torch.float32)[:, None] + columns
        self._starts = [0, *self._splits.sum(1).cumsum(0).tolist()]

    def call(self, rank: SimRank) -> Results:
        """Each row is a number of its own."""
        at = rank.rank
        x = self._rows[self._starts[at] : self._starts[at + 1]].clone().requires_grad_(self._grad)
        y = all_to_all(
            x,
            input_splits=self._splits[at].tolist(),
            output_splits=self._splits[:, at].tolist() if self._knows else None,
            group=rank.group,
        )
        if not self._grad:
            return (y,)
        if not self._used[at]:
            return (y.detach(),)
        (y * (y.detach() + 1)).sum().backward()
        return y.detach(), _grad(x)

    def expected(self) -> list[Results]:
        """Rows by receiver, then by sender; gradients are 0 for rows whose receiver has no use."""
        size = len(self._starts) - 1
        received = self._splits.sum(0).tolist()
        y = self._rows[torch.argsort(self._dst, stable=True)].split(received)
        if not self._grad:
            return [(rows,) for rows in y]
        grads = ((self._rows + 1) * self._used[self._dst][:, None]).split(
            self._splits.sum(1).tolist()
        )
        used = self._used.tolist()
        return [(y[r], grads[r]) if used[r] else (y[r],) for r in range(size)]


@final
class Everything(Case):
    """all_gather of uneven rows, then reduce_scatter of as many."""

    name = "all_gather, reduce_scatter"

    def __init__(self, draw: Draw) -> None:
        self._counts = draw.counts(4)
        self._width = draw.chance.choice((1, 60))
        self._grad = draw.chance.random() < 0.3
        total = sum(self._counts)
        self._rows = draw.numbers(0, 100, total, self._width).float()
        self._parts = self._rows.split(self._counts)

    def call(self, rank: SimRank) -> Results:
        """What everybody has, summed, is what everybody had, times the number of ranks."""
        x = self._parts[rank.rank].clone().requires_grad_(self._grad)
        y = all_gather(x, group=rank.group)
        z = reduce_scatter(y.detach(), splits=self._counts, group=rank.group)
        if not self._grad:
            return y, z
        (y * (rank.rank + 1)).sum().backward()
        return y.detach(), z, _grad(x)

    def expected(self) -> list[Results]:
        """Ranks weight the gradient by 1, 2, 3 ..."""
        size = len(self._counts)
        weight = float(size * (size + 1) // 2)
        results: list[Results] = []
        for part in self._parts:
            values = (self._rows, part * size)
            results.append((*values, torch.full_like(part, weight)) if self._grad else values)
        return results


@final
class Rooted(Case):
    """gather to one rank, scatter from it, or both."""

    name = "gather, scatter"

    def __init__(self, draw: Draw) -> None:
        self._root = draw.chance.randrange(draw.size)
        self._counts = draw.counts(3)
        width = draw.chance.choice((2, 200))
        self._parts = (
            draw.numbers(0, 100, sum(self._counts), width).to(torch.int16).split(self._counts)
        )

    def call(self, rank: SimRank) -> Results:
        """What was gathered is scattered again."""
        parts = gather(self._parts[rank.rank], dst=self._root, group=rank.group)
        back = scatter(parts, src=self._root, group=rank.group)
        return (back,) if parts is None else (torch.cat(parts), back)

    def expected(self) -> list[Results]:
        """Everybody has what it had."""
        whole = torch.cat(self._parts)
        return [
            (whole, part) if rank == self._root else (part,)
            for rank, part in enumerate(self._parts)
        ]


@final
class FromOne(Case):
    """broadcast of a tensor and of a nested value."""

    name = "broadcast, broadcast_nested"

    def __init__(self, draw: Draw) -> None:
        self._size = draw.size
        self._root = draw.chance.randrange(draw.size)
        length = draw.chance.choice((0, 3, 500))
        self._x = draw.numbers(0, 100, length).to(draw.chance.choice(_DTYPES))
        self._is_nested = draw.chance.random() < 0.5

    def call(self, rank: SimRank) -> Results:
        """The receivers give None."""
        is_root = rank.rank == self._root
        if not self._is_nested:
            return (broadcast(self._x if is_root else None, src=self._root, group=rank.group),)
        value = {"x": [self._x, self._x + 1], "n": 3} if is_root else None
        got = broadcast_nested(value, src=self._root, group=rank.group)
        if not isinstance(got, dict):
            raise CommTypeError(f"a dict was sent and a {type(got).__name__} arrived")
        return (*got["x"], torch.tensor(got["n"]))

    def expected(self) -> list[Results]:
        """The same on every rank."""
        if not self._is_nested:
            return [(self._x,)] * self._size
        return [(self._x, self._x + 1, torch.tensor(3))] * self._size


@final
class Beside(Case):
    """Asynchronous calls, and one that has to wait its turn behind them."""

    name = "async all_reduce, all_to_all"

    def __init__(self, draw: Draw) -> None:
        self._size = draw.size
        self._data = draw.numbers(0, 100, draw.size, draw.size).float()

    def call(self, rank: SimRank) -> Results:
        """Waits in the order of the calls: of several failures the first is the one that counts."""
        x = self._data[rank.rank]
        rows = all_to_all(x, group=rank.group, async_op=True)
        total = all_reduce(x, group=rank.group, async_op=True)
        try:
            largest = all_reduce(x, op="max", group=rank.group)
        finally:
            results = rows.wait(), total.wait()
        return largest, *results

    def expected(self) -> list[Results]:
        """Column r of the numbers goes to rank r."""
        largest, total = self._data.amax(0), self._data.sum(0)
        return [(largest, self._data[:, r], total) for r in range(self._size)]


_DTYPES = (torch.float32, torch.int64, torch.int16)
KINDS: tuple[Callable[[Draw], Case], ...] = (Reduce, Rows, Everything, Rooted, FromOne, Beside)


def _grad(x: torch.Tensor) -> torch.Tensor:
    if x.grad is None:
        raise RuntimeError("a gradient is missing")
    return x.grad
