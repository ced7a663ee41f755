"""Transfers between simulated ranks: right ones, and mistakes, named on those they concern.

What fails between two ranks is no failure of the others. So mistakes are made in calm schedules
only, where the oracle knows who raises what and that all go on. Among faults only right transfers
are made, and ranks may end in errors of different classes.

    Transfers(Draw(seed=5, size=8, has_tokens=[True] * 8)).call(rank)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

import torch

from comm_collectives.collectives import all_reduce, drop_in
from comm_collectives.errors import CollectiveTimeoutError, CommError, MismatchError
from comm_collectives.p2p import expect_tensors, isend_tensors, recv, recv_tensors, send
from comm_collectives.simulation import SimRank
from comm_collectives.simulation.fuzz.cases import Case, Draw, Results

_LONG_S = 10.0  # longer than all that ranks may be late
_SIZES, _LARGE = (0, 1, 200, 30_000), 300_000  # floats; the large ones find no room under way
_LONGEST_CIRCLE = 5
_TURNS, _LATE_S = 6, 1.2  # together within the limit
_DTYPES = (torch.float32, torch.int16)


class _Turn(NamedTuple):
    """What some ranks do together, in a group of their own; the last one comes late."""

    kind: str
    ranks: tuple[int, ...]
    late_s: float


class _Edge(NamedTuple):
    src: int
    dst: int
    tag: int
    length: int
    dtype: torch.dtype

    @property
    def data(self) -> torch.Tensor:
        """What travels: numbers that tell who sent it, and which one it is."""
        return torch.full((self.length,), self.src * 100 + self.tag, dtype=self.dtype)

    def check(self, got: torch.Tensor, *, is_calm: bool) -> None:
        """Raise unless this came; among faults an earlier one from the same rank may."""
        right = got.dtype == self.dtype and torch.equal(got, self.data)
        if not (right if is_calm else bool((got // 100 == self.src).all())):
            raise RuntimeError(f"{got} arrived as {self}")


@dataclass(frozen=True, slots=True)
class _At:
    """A rank among those that make transfers; `first` and those after it are in the mistake."""

    rank: SimRank
    edges: list[_Edge]
    first: int
    length: int
    is_calm: bool
    script: "Sequence[_Turn]"

    @property
    def place(self) -> int:
        """This rank's distance from the first one."""
        return (self.rank.rank - self.first) % self.rank.size

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of all functions of `p2p`."""
        return {"group": self.rank.group}

    @property
    def next(self) -> int:
        """The rank after this one in the circle, the first one behind the last."""
        return (self.first + (self.place + 1) % self.length) % self.rank.size

    def expect(self, kind: type[CommError], call: Callable[[], object]) -> None:
        """Make a call that must fail."""
        try:
            call()
        except kind as error:
            if f"rank {self.rank.rank}: " not in str(error):
                raise RuntimeError(f"the error does not name rank {self.rank.rank}") from error
        else:
            raise RuntimeError(f"nothing on rank {self.rank.rank}, {kind.__name__} is right")


def _lists(at: _At) -> None:
    me = at.rank.rank
    sends = [isend_tensors([e.data, e.data], dst=e.dst, **at.how) for e in at.edges if e.src == me]
    mine = [edge for edge in at.edges if edge.dst == me]
    if mine:
        expect_tensors(src=mine[0].src, **at.how)
    for edge in mine:
        for got in recv_tensors(src=edge.src, **at.how):
            edge.check(got, is_calm=at.is_calm)
    for handle in sends:
        handle.wait()


def _asynchronous(at: _At) -> None:
    me = at.rank.rank
    sends = [send(e.data, dst=e.dst, async_op=True, **at.how) for e in at.edges if e.src == me]
    mine = [(e, recv(src=e.src, async_op=True, **at.how)) for e in at.edges if e.dst == me]
    for edge, handle in mine[::-1]:
        edge.check(handle.wait(), is_calm=at.is_calm)
    for sent in sends:
        sent.wait()


def _batch(at: _At) -> None:
    """As `batch_isend_irecv`, by tag, and from any source now and then."""
    works: list[Any] = []
    rooms = []
    for edge in at.edges:
        if edge.src == at.rank.rank:
            works.append(drop_in.isend(edge.data, group_dst=edge.dst, tag=edge.tag, **at.how))
        if edge.dst == at.rank.rank:
            source = None if edge.tag % 3 == 0 else edge.src
            rooms.append((edge, torch.zeros(edge.length, dtype=edge.dtype)))
            room = rooms[-1][1]
            works.append(drop_in.irecv(room, group_src=source, tag=edge.tag, **at.how))
    for work in works[::-1]:
        work.wait()
    for edge, room in rooms:
        edge.check(room, is_calm=at.is_calm)


def _chain(at: _At) -> None:
    """Through all ranks and back, with gradients: each multiplies by 2."""
    here, last = at.place, at.rank.size - 1
    x = torch.ones(3, requires_grad=True)
    y = x * 1 if here == 0 else recv(src=(at.rank.rank - 1) % at.rank.size, **at.how)
    if here == last:
        (y * 2).sum().backward()
    else:
        token = send(y * 2, dst=(at.rank.rank + 1) % at.rank.size, **at.how)
        token.sum().backward()
    got, wanted = x.grad, torch.full((3,), 2.0**at.rank.size)
    # A rank that has failed lets its result go, which stands for zeros.
    if at.is_calm and here == 0 and (got is None or not torch.equal(got, wanted)):
        raise RuntimeError(f"the gradient is {got}, {wanted} is right")


def _circle_of_receives(at: _At) -> None:
    if at.place < at.length:
        at.expect(MismatchError, lambda: recv(src=at.next, timeout_s=_LONG_S, **at.how))


def _circle_of_all_kinds(at: _At) -> None:
    """A large send among receives; a rank outside waits for one of the circle, which then sends."""
    x, outside = torch.ones(_LARGE), at.length if at.length < at.rank.size else None
    if at.place < at.length:
        first = at.place == 0
        at.expect(
            MismatchError,
            lambda: (
                send(x, dst=at.next, timeout_s=_LONG_S, **at.how)
                if first and at.length > 2
                else recv_tensors(src=at.next, timeout_s=_LONG_S, **at.how)
            ),
        )
    if outside is not None and at.place == 0:
        send(torch.ones(1), dst=(at.first + outside) % at.rank.size, **at.how)
    if at.place == outside:
        recv(src=at.first, timeout_s=_LONG_S, **at.how)


def _circle_over_groups(at: _At) -> None:
    """Each waits for the next one in a group of these two, in a transfer or in a call."""
    size, links = at.rank.size, range(at.length)
    ranks = [(at.first + i) % size for i in links]
    groups = [(ranks[i], ranks[(i + 1) % at.length]) for i in links]
    mine = {i: at.rank.subgroup(groups[i]) for i in links if at.rank.rank in groups[i]}
    if at.place < at.length:
        how: Any = {"group": mine[at.place], "timeout_s": _LONG_S}
        in_call = (at.place + at.first) % 3 > 0
        at.expect(
            MismatchError,
            lambda: all_reduce(torch.ones(3), **how) if in_call else recv(src=1, **how),
        )
    for group in mine.values():
        all_reduce(torch.ones(1), group=group)  # it goes on


def _groups_in_order(at: _At) -> None:
    """Calls and transfers in groups that overlap, in an order in which all of them come about."""
    handles: list[Any] = []
    for turn in at.script:
        if at.rank.rank not in turn.ranks:
            continue
        how: Any = {"group": at.rank.subgroup(turn.ranks), "timeout_s": _LONG_S}
        how["async_op"] = turn.kind.startswith("async")
        place = turn.ranks.index(at.rank.rank)
        if place == len(turn.ranks) - 1:
            at.rank.sleep(turn.late_s)
        got: Any = None
        if turn.kind.endswith("call"):
            got = all_reduce(torch.ones(_LARGE if turn.late_s > 1 else 3), **how)
        elif place == 0:
            got = recv(src=1, **how)
        elif place == 1:
            got = send(torch.ones(_LARGE), dst=0, **how)
        if how["async_op"] and got is not None:
            handles.append(got)
    for handle in handles:
        handle.wait()


def _other_tensor(at: _At) -> None:
    """Another size or dtype, a list for a tensor: named by the receiver, and the next is right."""
    group, to = at.rank.group, (at.first + 1) % at.rank.size
    rooms = torch.zeros(2), torch.zeros(3, dtype=torch.int32)
    if at.place == 0:
        for _ in range(3):
            drop_in.send(torch.ones(3), group=group, group_dst=to, tag=2)
        isend_tensors([torch.ones(1)] * 2, dst=to, group=group)
        send(torch.ones(1), dst=to, group=group)
    elif at.place == 1:
        for room in rooms:
            at.expect(MismatchError, partial(drop_in.recv, room, None, group, 2, at.first))
        drop_in.recv(torch.zeros(3), None, group, 2, at.first)
        at.expect(MismatchError, lambda: recv(src=at.first, group=group))
        recv(src=at.first, group=group)


def _other_tag(at: _At) -> None:
    """A receive whose message comes only after its first wait, behind one of another tag."""
    to, group = (at.first + 1) % at.rank.size, at.rank.group
    if at.place == 1:
        rooms = torch.zeros(1), torch.zeros(1)
        works = [
            drop_in.irecv(x, group_src=at.first, tag=5 + i, group=group)
            for i, x in enumerate(rooms)
        ]
        first: Any = works[0]
        try:
            first.wait(timedelta(seconds=0.2))
        except CollectiveTimeoutError:
            pass  # the rank may be late itself
        else:
            raise RuntimeError("a receive ended before its message was sent")
        drop_in.send(torch.ones(1), group_dst=at.first, tag=7, group=group)
        for work in works:
            _ = work is None or work.wait()
        if [x.item() for x in rooms] != [5, 6]:
            raise RuntimeError(f"{rooms} came by tag, 5 and 6 are right")
    elif at.place == 0:
        drop_in.send(torch.full((1,), 6.0), group_dst=to, tag=6, group=group)
        drop_in.recv(torch.zeros(1), group_src=to, tag=7, group=group)
        drop_in.send(torch.full((1,), 5.0), group_dst=to, tag=5, group=group)


def _against_a_call(at: _At) -> None:
    """One rank waits for a transfer, and all others for it in a call."""
    if at.place == 0:
        at.expect(MismatchError, lambda: recv(src=at.next, timeout_s=_LONG_S, **at.how))
    else:
        how = {"timeout_s": _LONG_S, **at.how}
        x = torch.ones(4)
        at.expect(
            MismatchError,
            lambda: (
                all_reduce(x, async_op=True, **how).wait()
                if at.length % 2
                else all_reduce(x, **how)
            ),
        )


_RIGHT: dict[str, Callable[[_At], None]] = {
    "lists": _lists,
    "asynchronous transfers": _asynchronous,
    "batch_isend_irecv": _batch,
    "a chain with gradients": _chain,
    "groups in order": _groups_in_order,
}
_WAYS = {
    **_RIGHT,
    "a circle of receives": _circle_of_receives,
    "a circle with a send": _circle_of_all_kinds,
    "a circle over groups": _circle_over_groups,
    "another tensor": _other_tensor,
    "another tag": _other_tag,
    "a transfer against a call": _against_a_call,
}


@final
class Transfers(Case):
    """Transfers of a few ranks, and a sum of all."""

    def __init__(self, draw: Draw) -> None:
        chance = draw.chance
        self._is_calm, self._size = draw.is_calm, draw.size
        self.name = chance.choice(list(_WAYS if draw.is_calm else _RIGHT))
        self._first = chance.randrange(draw.size)
        self._length = chance.randint(2, min(_LONGEST_CIRCLE, draw.size))
        self._edges = []
        for tag in range(chance.randint(1, draw.size)):
            src, away = chance.randrange(draw.size), chance.randrange(1, draw.size)
            length, dtype = chance.choice(_SIZES), chance.choice(_DTYPES)
            self._edges.append(_Edge(src, (src + away) % draw.size, tag, length, dtype))
        self._script = []
        for _ in range(_TURNS):
            some = chance.sample(range(draw.size), min(chance.randint(2, 4), draw.size))
            kind = chance.choice(("call", "transfer", "async call", "async transfer"))
            self._script.append(_Turn(kind, tuple(some), chance.uniform(0.0, _LATE_S)))

    def call(self, rank: SimRank) -> Results:
        """Raise if something else came than was sent, or an error is not as it must be."""
        at = _At(rank, self._edges, self._first, self._length, self._is_calm, self._script)
        # Simulated ranks take part in a backward that they owe in their next call only.
        all_reduce(torch.ones(1), group=rank.group)
        _WAYS[self.name](at)
        x = torch.tensor([rank.rank + 1])
        return (all_reduce(x, group=rank.group, timeout_s=_LONG_S),)

    def expected(self) -> list[Results]:
        """The sum of 1, 2, 3 ..."""
        return [(torch.tensor([self._size * (self._size + 1) // 2]),)] * self._size
