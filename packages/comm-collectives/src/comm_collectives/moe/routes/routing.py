"""Carry rows from tokens to experts and back: a route is one hop between ranks, or several.

A hop brings *items*, which are tokens at first, to every peer that one of their choices belongs to:
in a row for each choice on the flat route, else in one row for all. Beside the rows travel the
weight of each choice and, if choices share rows, the number of its row. Choices are sorted by
expert, by the receiver again, whose items are the rows received: ready for the experts, or for the
next hop. On the way back the receiver adds the rows of each item's choices, one row returns, and
the sender adds what its peers returned, in a fixed order.

Invariants: encoded rows are forwarded as they are, never decoded and encoded again. On the flat
route a token's rows are summed in the order of its choices: one rank and many give the same bits.

Legend: T tokens, D hidden size, K choices per token, N choices that name an expert, R rows of the
local experts with padding, C columns of a row as it travels, M rows on the wire, gap rows among
them, W ranks, P peers, X items of the sender, U rows sent, V rows received.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar, final

import torch

from comm_collectives.base.transport import Lease
from comm_collectives.call import Agreed, Call, pack_counts, unpack_counts
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import Status
from comm_collectives.collectives import exchange_bytes, on_host, swap
from comm_collectives.moe.routes.messages import Messages, WireRow, plan_messages, wire_row
from comm_collectives.moe.routes.sources import Source, plan_source
from comm_collectives.moe.rows import (
    Bags,
    Payload,
    Placing,
    SortedChoices,
    bags_of,
    repeat_each,
    starts,
)
from comm_collectives.planning.wire import Movement, Route

Carried = tuple[torch.Tensor, ...]
_T = TypeVar("_T")


class Routing(ABC):
    """What carries the rows of one dispatch, of its combine and of their backwards.

    Rows come first in what is carried; weights, one for each choice, may come second.

    Attributes:
        told: what each rank has to be told ahead of the first rows, equally many numbers for each.
        num_tokens_per_expert: rows of each local expert with padding; known after `learn`.
    """

    told: Sequence[Sequence[int]] = ()
    num_tokens_per_expert: tuple[int, ...] = ()

    @abstractmethod
    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """Take note of what each rank told this one."""

    @abstractmethod
    def to_experts(self, sent: Carried, leg: "Leg") -> Carried:
        """Bring x_TD, and weight_TK, to the experts: x_RD, and weight_R, padding zero.

        The first time with weights; then with the same rows or others.
        """

    @abstractmethod
    def to_tokens(self, sent: Carried, leg: "Leg") -> Carried:
        """Bring y_RD back, summed by token: y_TD; and weight_R to its place: weight_TK."""


@final
class Leg:
    """One movement: which it is, what rows become on the wire, and the call that makes it.

    `call` is None where nothing is exchanged. `flags` are this rank's at first, and those of all
    ranks after the first exchange, in which ranks tell what `teaches` has to learn.
    """

    def __init__(
        self,
        movement: Movement,
        payload: Payload = "full",
        call: Call | None = None,
        *,
        flags: int = 0,
        teaches: Routing | None = None,
    ) -> None:
        self.movement, self.payload, self.flags = movement, payload, flags
        self._call, self._teaches = call, teaches
        self._has_met = call is not None and call.is_backward

    def __str__(self) -> str:
        """The movement as errors name it."""
        return self.movement if self._call is None else str(self._call)

    def form(self, hidden: int, dtype: torch.dtype, weights: Sequence[torch.Tensor]) -> WireRow:
        """Return how rows travel, with weights beside them."""
        itemsize = weights[0].element_size() if weights else 1
        return wire_row(self.movement, self.payload, hidden, dtype, itemsize)

    def exchange(
        self,
        rows: torch.Tensor,
        sent_W: Sequence[int],
        coming: Callable[[], Sequence[int]],
        lease: Lease,
    ) -> torch.Tensor:
        """Send contiguous rows, `sent_W[r]` of them to rank r; return those received. Collective.

        `coming`, asked after the routing has learnt, says how many come from each rank; memory is
        of the lease. This is the one place where rows of tokens are handed to the group.
        """
        if self._call is None:
            raise RuntimeError(f"{self.movement} has no call to exchange rows in")
        call, row_bytes = self._call, rows.shape[1] * rows.element_size()
        state, sent = call.state, [n * row_bytes for n in sent_W]
        flat, kind, columns = rows.view(-1).view(torch.uint8), rows.dtype, rows.shape[1]
        received: list[int] = []
        got: list[torch.Tensor] = []

        def room(agreed: Agreed) -> torch.Tensor:
            self._hear(agreed)
            received.extend(n * row_bytes for n in coming())
            got.append(lease.take((sum(received) // row_bytes, columns), kind))
            return got[0].view(-1).view(torch.uint8)

        told = self._told()
        if flat.device.type == "cpu" and on_host(state, flat.device):
            pieces = flat.split(sent)
            call.exchange(
                pieces, lambda agreed: room(agreed).split(received), parts=told, status=self.flags
            )
            for observe in state.observers:
                observe(call.name, sent)
        elif told is not None or on_host(state, flat.device):
            swap(call, flat, sent, room, parts=told, status=self.flags)
        else:
            target = room(Agreed(flags=self._flags_untold(call), parts=[], sizes=[]))
            exchange_bytes(call, flat, sent, received, target)
        return got[0]

    def agree(self) -> None:
        """Meet the other ranks of the call, if any; something else moves the rows. Collective."""
        call, told = self._call, self._told()
        if call is None:
            return
        if told is not None:
            self._hear(call.meet(parts=told, status=self.flags))
        elif not call.is_backward:
            self.flags = self._flags_untold(call)
        elif call.state.policy.every:
            call.meet()

    def _told(self) -> list[bytes] | None:
        return None if self._teaches is None else [pack_counts(row) for row in self._teaches.told]

    def _hear(self, agreed: Agreed) -> None:
        self.flags, self._has_met = agreed.flags, True
        if self._teaches is not None:
            self._teaches.learn([unpack_counts(part) for part in agreed.parts])
            self._teaches = None

    def _flags_untold(self, call: Call) -> int:
        """Flags of all where ranks meet only now and then.

        Otherwise nobody knows whether another rank wants a gradient, so every rank that records
        gradients takes part in the backward.
        """
        if self._has_met:
            return self.flags
        if call.is_due():
            return call.meet(status=self.flags).flags
        call.go_alone(None)
        return Status.WANTS_GRAD if torch.is_grad_enabled() else 0


class Arriving(NamedTuple):
    """Rows and choices that come from each peer, and where the choices go."""

    rows_P: Sequence[int]
    choices_P: Sequence[int]
    placing: Placing


@final
class Hop:
    """One hop between `peers`, ranks of the group, ascending; `choices_P` are sent to each.

    `arriving` is known once all ranks have told. The first `out` learns which row each received
    choice has; only then can the other movements run, and the next hop `start_from` this one.
    """

    def __init__(
        self,
        state: GroupState,
        peers: Sequence[int],
        choices_P: Sequence[int],
        *,
        source: Source | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        self._state, self._peers, self._choices_P = state, peers, choices_P
        self.source, self.arriving = source, arriving
        self._row_N: torch.Tensor | None = None  # the received row of each received choice
        self._sums: tuple[Bags, Bags | None] | None = None
        self._messages: dict[tuple[WireRow, bool], Messages] = {}

    def start_from(self, before: "Hop") -> None:
        """Plan, once, what is sent: the rows that came in the hop before are the items of this."""
        if self.source is None:
            rows_P, _, placing = known(before.arriving)
            item_N = placing.in_place(before.choices_at(None))
            self.source = plan_source(item_N, sum(rows_P), self._choices_P)

    def choices_at(self, at: torch.Tensor | None) -> torch.Tensor:
        """Return where each received choice has its row, if received row j stands at `at[j]`."""
        if known(self.source).row_N is None:
            local_N = known(self.arriving).placing.local_N
            return torch.arange(local_N.numel(), device=local_N.device) if at is None else at
        return known(self._row_N) if at is None else at.index_select(0, known(self._row_N))

    def out(
        self, sent: Carried, at: torch.Tensor | None, leg: Leg, form: WireRow, lease: Lease
    ) -> tuple[Carried, torch.Tensor | None]:
        """Send items, item j the row `at[j]` of `sent` (None: j), and weights sorted by expert.

        Returns rows [M, C] with weights by local row, and where the received items stand in them.
        """
        source, leaving = known(self.source), self._side(form)
        index_U = source.item_U if at is None else at.index_select(0, source.item_U)
        rows = lease.take((sum(leaving.rows_P), form.wire_columns), sent[0].dtype)
        # Columns beyond those of a row are left alone. No scatter_ of weights: on CPUs it takes all
        # 16-bit floats there through float32, in which the bits of those that are NaN change.
        torch.index_select(sent[0], 0, leaving.places(index_U), out=rows[:, : form.columns])
        for weight in sent[1:]:
            rows.view(-1).view(weight.dtype).index_copy_(0, leaving.weight_N, weight)
        if source.row_N is not None and leaving.number_N is not None:
            rows.view(-1).view(torch.int32).scatter_(0, leaving.number_N, source.row_N)
        got = leg.exchange(rows, self._by_rank(leaving), lambda: self._coming(form), lease)
        came, placing = self._side(form, is_receiver=True), known(self.arriving).placing
        if self._row_N is None and came.number_N is not None:
            self._learn_rows(got.view(-1).view(torch.int32).index_select(0, came.number_N))
        weights = []
        for weight in sent[1:]:
            flat, index_R = got.view(-1).view(weight.dtype), placing.in_place(came.weight_N)
            weights.append(placing.blank(flat.index_select(0, index_R)))
        return (got[:, : form.columns], *weights), came.row_U

    def back(
        self, sent: Carried, leg: Leg, form: WireRow, lease: Lease, *, is_summed: bool
    ) -> Carried:
        """Send a row for each received item, and weights, back; return y_XD and weight_N.

        Unless `is_summed`, what is given are rows of local choices, which are summed here.
        """
        leaving, local_N = self._side(form, is_receiver=True), known(self.arriving).placing.local_N
        returned, shared = self._bags()
        rows, index_V = sent[0], local_N
        if shared is not None:
            rows = rows if is_summed else shared.sum(rows)
            index_V = torch.arange(rows.shape[0], device=rows.device)
        rows = rows if form.codec is None else form.encode(rows)
        if shared is None or leaving.row_U is not None or form.wire_columns > form.columns:
            filled = lease.take((sum(leaving.rows_P), form.wire_columns), rows.dtype)
            torch.index_select(rows, 0, leaving.places(index_V), out=filled[:, : form.columns])
            rows = filled
        for weight in sent[1:]:
            weight_N = weight.index_select(0, local_N)
            rows.view(-1).view(weight.dtype).index_copy_(0, leaving.weight_N, weight_N)
        came = self._side(form)
        got = leg.exchange(rows, self._by_rank(leaving), lambda: self._by_rank(came), lease)
        y_XD = returned.at(came.row_U).sum(form.decode(got[:, : form.columns]))
        flats = [got.view(-1).view(weight.dtype) for weight in sent[1:]]
        return (y_XD, *(flat.index_select(0, came.weight_N) for flat in flats))

    def _side(self, form: WireRow, *, is_receiver: bool = False) -> Messages:
        """The messages at the end of the hop at which tokens, or experts, are."""
        planned = self._messages.get((form, is_receiver))
        if planned is None:
            source = known(self.source)
            rows_P, choices_P = source.rows_P, self._choices_P
            if is_receiver:
                rows_P, choices_P, _ = known(self.arriving)
            route: Route = "flat" if source.row_N is None else "dedup"
            planned = plan_messages(route, form, rows_P, choices_P, source.item_U.device)
            self._messages[form, is_receiver] = planned
        return planned

    def _coming(self, form: WireRow) -> list[int]:
        return self._by_rank(self._side(form, is_receiver=True))

    def _learn_rows(self, number_N: torch.Tensor) -> None:
        """Take note of the row that each received choice shares, from its number at its peer."""
        rows_P, choices_P, _ = known(self.arriving)
        self._row_N = repeat_each([starts(rows_P)], choices_P, number_N.device)[0].add_(number_N)

    def _bags(self) -> tuple[Bags, Bags | None]:
        """The rows that come back for each item, and the local rows of each received item."""
        if self._sums is None:
            source, shared, (rows_P, _, placing) = known(self.source), None, known(self.arriving)
            if source.row_N is not None:
                shared = bags_of(known(self._row_N), placing.local_N, sum(rows_P))
            self._sums = source.bags(), shared
        return self._sums

    def kept(self) -> Iterator[torch.Tensor | None]:
        """The indexes that later movements use."""
        yield self._row_N
        if self.source is not None:
            yield from (self.source.item_U, self.source.row_N)
        if self.arriving is not None:
            yield from (self.arriving.placing.local_N, self.arriving.placing.padding)
        for bags in self._sums or ():
            yield from () if bags is None else (bags.slots, bags.offsets)
        for planned in self._messages.values():
            yield from planned[1:]

    def _by_rank(self, messages: Messages) -> list[int]:
        rows_W = [0] * self._state.size
        for peer, number in zip(self._peers, messages.rows_P, strict=True):
            rows_W[peer] = number
        return rows_W


class HopRouting(Routing):
    """The hops in turn, and in reverse order on the way back; `learn` adds all but the first."""

    def __init__(self, choices: SortedChoices, state: GroupState, hop: Hop) -> None:
        self._choices, self._state, self._hops = choices, state, [hop]

    def to_experts(self, sent: Carried, leg: Leg) -> Carried:
        """See `Routing.to_experts`."""
        rows, at = sent[0], None
        form = leg.form(rows.shape[1], rows.dtype, sent[1:])
        weights = map(self._choices.sorted_weights, sent[1:])
        carried: Carried = (rows if form.codec is None else form.encode(rows), *weights)
        with self._state.scratch.lease(rows.device) as lease:
            for i, hop in enumerate(self._hops):  # the second may be learnt in the first
                if i:
                    hop.start_from(self._hops[i - 1])
                carried, at = hop.out(carried, at, leg, form, lease)
            placing = known(hop.arriving).placing
            x_RD = carried[0].index_select(0, placing.in_place(hop.choices_at(at)))
        x_RD = x_RD if form.codec is None else form.decode(x_RD)
        if placing.padding is not None:
            x_RD.index_fill_(0, placing.padding, 0)
        self._keep(x_RD.device)
        return (x_RD, *carried[1:])

    def to_tokens(self, sent: Carried, leg: Leg) -> Carried:
        """See `Routing.to_tokens`."""
        rows, carried = sent[0], sent
        form = leg.form(rows.shape[1], rows.dtype, sent[1:])
        with self._state.scratch.lease(rows.device) as lease:
            for i, hop in enumerate(reversed(self._hops)):
                carried = hop.back(carried, leg, form, lease, is_summed=i > 0)
        self._keep(rows.device)
        return (carried[0], *map(self._choices.unsorted_weights, carried[1:]))

    def _keep(self, device: torch.device) -> None:
        """Have the memory of indexes last until this stream has used them.

        An asynchronous dispatch makes them on the group's stream, its backward uses them on another
        one, as an asynchronous combine does with those of a dispatch that was none, and neither
        stream knows when the other one ends.
        """
        if device.type == "cpu":
            return
        stream = torch.accelerator.current_stream()
        for index in (self._choices.order_N, *(x for hop in self._hops for x in hop.kept())):
            if index is not None:
                index.record_stream(stream)


def known(value: _T | None) -> _T:
    """Return what the first dispatch of a routing has found out."""
    if value is None:
        raise RuntimeError("rows went back, or alone, before the first dispatch of this routing")
    return value
