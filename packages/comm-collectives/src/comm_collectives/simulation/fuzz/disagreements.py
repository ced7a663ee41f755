"""Ranks that disagree, in the ways in which programs do: the same named error on every rank.

In a calm schedule each rank catches the error and makes one more call, so the oracle knows who
raises what, and that the group goes on. Among faults the error ends the program as any other does.

    Disagreement(Draw(seed=5, size=8, has_tokens=[True] * 8, is_calm=True)).call(rank)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from comm_collectives.call.signature import call_site
from comm_collectives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from comm_collectives.errors import CommError, MismatchError, RefusedError
from comm_collectives.moe import Dispatched, OverlappedMoe, combine, dispatch, dispatch_async
from comm_collectives.nested import broadcast_nested
from comm_collectives.simulation import SimRank
from comm_collectives.simulation.fuzz.cases import Case, Draw, Results


class Mishap(Exception):
    """What a program raises itself on the odd rank."""


@dataclass(frozen=True, slots=True)
class _At:
    """A rank's place in a disagreement; `calls` are different ones, made as `how` says."""

    rank: SimRank
    is_odd: bool
    is_calm: bool
    rows: int
    calls: Sequence[str]
    how: str

    def x(self, *, grad: bool = False) -> torch.Tensor:
        """Rows for each rank."""
        return torch.ones(self.rank.size * self.rows, 2, requires_grad=grad)

    @property
    def experts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices and weights of the rows: one of each expert in turn."""
        rows = self.rank.size * self.rows
        return (torch.arange(rows) % self.rank.size).view(-1, 1), torch.ones(rows, 1)

    def dispatched(self, x: torch.Tensor) -> Dispatched:
        """Dispatch the rows, with one expert on each rank."""
        return dispatch(x, *self.experts, num_experts=self.rank.size, group=self.rank.group)

    def make(self, number: int) -> None:
        """Make one of the calls."""
        how = {"async_op": True} if self.how == "async" else {}
        x = self.x(grad=self.how == "grad")
        got = _BY_NAME[self.calls[number]](self, x, group=self.rank.group, **how)
        if how:
            got.wait()


def _dispatch(at: _At, x: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    start = dispatch_async if async_op else dispatch
    return start(x, *at.experts, num_experts=at.rank.size, group=group)


_BY_NAME: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda at, x, **how: all_reduce(x, **how),
    "all_gather": lambda at, x, **how: all_gather(x, **how),
    "all_to_all": lambda at, x, **how: all_to_all(x, **how),
    "reduce_scatter": lambda at, x, **how: reduce_scatter(x, **how),
    "broadcast": lambda at, x, **how: broadcast(x, src=0, **how),
    "gather": lambda at, x, **how: gather(x, dst=0, **how),
    "scatter": lambda at, x, **how: scatter([x] * at.rank.size, src=0, **how),
    "broadcast_nested": lambda at, x, **how: broadcast_nested({"x": x}, src=0, **how),
    "dispatch": _dispatch,
}


def _other_call(at: _At) -> None:
    at.make(1 if at.is_odd else 0)


def _three_calls(at: _At) -> None:
    at.make(at.rank.rank % 3)


def _call_against_backward(at: _At) -> None:
    y = all_to_all(at.x(grad=True), group=at.rank.group)
    if at.is_odd:
        at.make(0)
    y.sum().backward()


def _other_splits(at: _At) -> None:
    splits = [at.rows] * at.rank.size
    expected = [splits[0] + at.is_odd, *splits[1:]]
    all_to_all(at.x(), input_splits=splits, output_splits=expected, group=at.rank.group)


def _other_handle(at: _At) -> None:
    first, second = at.dispatched(at.x()), at.dispatched(at.x() * 2)
    combine(first.x, (second if at.is_odd else first).handle)


def _other_graph_first(at: _At) -> None:
    losses = [(i + 1) * all_to_all(at.x(grad=True), group=at.rank.group).sum() for i in range(2)]
    for loss in losses if at.is_odd else losses[::-1]:
        loss.backward()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise Mishap("out of luck in backward")


def _raise_in_backward(at: _At) -> None:
    sent = at.dispatched(at.x(grad=True))
    y: Any = _Fails.apply(sent.x) if at.is_odd else sent.x
    combine(y, sent.handle).sum().backward()


def _raise_in_experts(at: _At) -> None:
    def experts(sent: Dispatched) -> torch.Tensor:
        if at.is_odd:
            raise Mishap("out of luck in an expert")
        return sent.x

    moe = OverlappedMoe(num_experts=at.rank.size, group=at.rank.group, num_chunks=2)
    try:
        moe(at.x(), *at.experts, experts)
    except Mishap:
        if not at.is_calm:
            raise
        all_gather(torch.ones(3), group=at.rank.group)  # as a loop that skips a bad batch


def _skip_named_step(at: _At) -> None:
    for step in range(3):
        if not (at.is_odd and step == 1):
            with call_site(f"step {step}"):
                all_reduce(at.x(), group=at.rank.group)


def _skip_step(at: _At) -> None:
    for _ in range(3 - at.is_odd):
        all_reduce(at.x(), group=at.rank.group)
    all_gather(at.x(), group=at.rank.group)


def _other_order(at: _At) -> None:
    """Asynchronous calls, each of which has to fail."""
    starts = (all_gather, all_reduce) if at.is_odd else (all_reduce, all_gather)
    handles: list[Any] = [s(at.x(), group=at.rank.group, async_op=True) for s in starts]
    errors = []
    for handle in handles:
        try:
            handle.wait()
        except CommError as error:
            errors.append(error)
    if len(errors) == len(handles):
        raise errors[0]


def _raw_calls_beside(at: _At) -> None:
    """Calls of another communicator of the same ranks, as raw torch's, which hold up the caller."""
    if at.is_calm:  # or they would end in an error of their own
        raw = at.rank.subgroup(range(at.rank.size)[::-1])
        # Simulated ranks answer for dropped graphs in a call of the group, not beside raw ones.
        all_reduce(at.x(), group=at.rank.group)
        if at.is_odd:
            all_reduce(at.x(), group=raw)
        handle = all_reduce(at.x(), group=at.rank.group, async_op=True)
        if not at.is_odd:
            all_reduce(at.x(), group=raw)
        handle.wait()
    _other_call(at)


_WAYS: dict[str, Callable[[_At], None]] = {
    "another call": _other_call,
    "three calls": _three_calls,
    "a call, a backward": _call_against_backward,
    "other splits": _other_splits,
    "another handle": _other_handle,
    "another graph first": _other_graph_first,
    "a backward raises": _raise_in_backward,
    "experts raise": _raise_in_experts,
    "a named step skipped": _skip_named_step,
    "a step skipped": _skip_step,
    "asynchronous calls in another order": _other_order,
    "another call, beside raw ones": _raw_calls_beside,
}
# What it ends in on the odd rank and on the others, if not in a MismatchError on all.
_ENDS = {"a backward raises": (Mishap, MismatchError), "experts raise": (RefusedError,) * 2}


@final
class Disagreement(Case):
    """The odd rank, or each, does something else than the others."""

    def __init__(self, draw: Draw) -> None:
        chance = draw.chance
        self.name = chance.choice(list(_WAYS))
        self._is_calm, self._size = draw.is_calm, draw.size
        self._odd, self._rows = chance.randrange(draw.size), chance.choice((1, 40))
        self._calls = chance.sample(list(_BY_NAME), 3)
        self._how = chance.choice(("", "grad", "async"))

    def call(self, rank: SimRank) -> Results:
        """Whether it ended here as it must, and a sum afterwards."""
        is_odd = rank.rank == self._odd
        on_odd, on_others = _ENDS.get(self.name, (MismatchError,) * 2)
        wanted, said = (on_odd if is_odd else on_others).__name__, "nothing"
        at = _At(rank, is_odd, self._is_calm, self._rows, self._calls, self._how)
        try:
            _WAYS[self.name](at)
        except (MismatchError, RefusedError, Mishap) as error:
            if not self._is_calm:
                raise
            said = type(error).__name__
            if said != Mishap.__name__ and f"rank {rank.rank}: " not in str(error):
                raise RuntimeError(f"the error does not name rank {rank.rank}") from error
        if self._is_calm and said != wanted:
            raise RuntimeError(f"{self.name}: {said} on rank {rank.rank}, {wanted} is right")
        return torch.tensor(said == wanted), self._sum(rank, ahead=on_others is RefusedError)

    def expected(self) -> list[Results]:
        """The right end, and the sum of 1, 2, 3 ..."""
        total = torch.tensor([self._size * (self._size + 1) // 2])
        return [(torch.tensor(True), total)] * self._size

    def _sum(self, rank: SimRank, *, ahead: bool) -> torch.Tensor:
        """Sum the ranks' numbers; `ahead` of that some may have issued a call already."""
        try:
            return all_reduce(torch.tensor([rank.rank + 1]), group=rank.group)
        except MismatchError:
            if not ahead:
                raise
            return self._sum(rank, ahead=False)
