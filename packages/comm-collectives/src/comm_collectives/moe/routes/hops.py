"""Routes that send a row once for several choices: one hop, or two with a stop between.

A hop brings *items* to *peers*: each item once to every peer that one of its choices belongs to.
Beside the rows travel, for each choice, the number of its row and its weight, choices sorted by
expert. The receiver puts the choices of all peers in order of expert, and so has again items (the
rows received) with choices sorted by expert: ready for the experts, or for the next hop. On the way
back the receiver adds the rows of each item's choices, one row returns, and the sender adds what
its peers returned: rows are summed at every hop, by expert, then by peer.

Invariant: encoded rows are forwarded as they are, never decoded and encoded again.

Legend: that of moe/routes/routing.py, and X items of the sender, U rows sent, V rows received, P
peers.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, final

import torch

from comm_collectives.base.transport import Lease
from comm_collectives.call.groups import GroupState
from comm_collectives.moe.routes.hop_messages import Messages
from comm_collectives.moe.routes.routing import (
    Leg,
    Routing,
    WireRow,
    counts_by_rank,
    local_places,
    place,
)
from comm_collectives.moe.rows import Bags, Placing, SortedChoices, bags_of, plan_placing, starts

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HopSource:
    """The sending side of a hop.

    Attributes:
        rows_P: rows for each peer.
        item_U: item of each row, by peer, then by item.
        row_N: int32, row of each choice among those for its peer; choices are sorted by peer.
        bags: the rows of each item.
    """

    rows_P: tuple[int, ...]
    item_U: torch.Tensor
    row_N: torch.Tensor
    bags: Bags


class Arriving(NamedTuple):
    """Rows and choices that come from each peer, and where the choices go."""

    rows_P: tuple[int, ...]
    choices_P: tuple[int, ...]
    placing: Placing


def plan_source(item_N: torch.Tensor, num_items: int, choices_P: Sequence[int]) -> HopSource:
    """Find the unique rows for each peer, given the item of each choice, choices by peer."""
    peer_N, key_N, wanted_PX = _wanted(item_N, num_items, choices_P)
    rows_P, wanted = tuple(wanted_PX.sum(1).tolist()), wanted_PX.view(-1)
    first_P = torch.tensor(starts(rows_P), dtype=torch.int64, device=item_N.device)
    running_N = (wanted.cumsum(0) - 1).index_select(0, key_N)
    item_U = wanted.nonzero().view(-1).remainder(max(1, num_items))
    running_U = torch.arange(item_U.numel(), device=item_N.device)
    return HopSource(
        rows_P=rows_P,
        item_U=item_U,
        row_N=(running_N - first_P.index_select(0, peer_N)).to(torch.int32),
        bags=bags_of(item_U, running_U, num_items),
    )


def count_unique(item_N: torch.Tensor, num_items: int, choices_P: Sequence[int]) -> tuple[int, ...]:
    """Count the unique rows for each peer, given the item of each choice, choices by peer."""
    _, _, wanted_PX = _wanted(item_N, num_items, choices_P)
    return tuple(wanted_PX.sum(1).tolist())


def _wanted(
    item_N: torch.Tensor, num_items: int, choices_P: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each choice's peer, its place in the flat table, and the table: who wants what."""
    num_peers, device = len(choices_P), item_N.device
    counts_P = torch.tensor(choices_P, dtype=torch.int64, device=device)
    peer_N = torch.arange(num_peers, device=device).repeat_interleave(
        counts_P, output_size=item_N.numel()
    )
    key_N = peer_N * num_items + item_N
    wanted = torch.zeros(num_peers * num_items, dtype=torch.bool, device=device)
    return peer_N, key_N, wanted.index_fill_(0, key_N, True).view(num_peers, num_items)


@final
class Hop:
    """One hop between `peers`, ranks of the group, ascending; `choices_P` are sent to each.

    `arriving` is known once all ranks have told. The first `out` learns which rows arrive; only
    then can the other movements run.
    """

    def __init__(
        self,
        state: GroupState,
        peers: Sequence[int],
        choices_P: tuple[int, ...],
        *,
        source: HopSource | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        self._state, self._peers, self._choices_P = state, peers, choices_P
        self._source = source
        self.arriving = arriving
        self._local_N: torch.Tensor | None = None
        self._row_N: torch.Tensor | None = None
        self._row_R: torch.Tensor | None = None
        self._bags: Bags | None = None

    @property
    def num_received(self) -> int:
        """Rows received, without a spare row."""
        return sum(_learned(self.arriving).rows_P)

    @property
    def row_R(self) -> torch.Tensor:
        """The received row of each local choice; padding points at the spare row behind them."""
        return _learned(self._row_R)

    def start_from(self, item_N: torch.Tensor, num_items: int) -> None:
        """Plan what is sent, unless it is known: the item of each choice, sorted by expert."""
        if self._source is None:
            self._source = plan_source(item_N, num_items, self._choices_P)

    def out(
        self, rows_XC: torch.Tensor, weight_N: torch.Tensor, leg: Leg, form: WireRow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send items and weights; return rows [V, C], with a spare one, and weight_R."""
        source = _learned(self._source)
        leaving = self._messages(leg, form, source.rows_P, self._choices_P)
        with self._state.scratch.lease(rows_XC.device) as lease:
            sent = lease.take((leaving.num_bytes,), torch.uint8)
            _gather_into(leaving.rows(sent, rows_XC.dtype), rows_XC, source.item_U)
            _split_into(leaving.row_numbers(sent), source.row_N)
            _split_into(leaving.weights(sent, weight_N.dtype), weight_N)
            got = self._swap(leg, sent, leaving.bytes_P, lambda: self._coming(leg, form), lease)
            arriving = _learned(self.arriving)
            coming = self._messages(leg, form, arriving.rows_P, arriving.choices_P)
            pieces = [rows[:, : rows_XC.shape[1]] for rows in coming.rows(got, rows_XC.dtype)]
            # A row of zeros behind them, if padding will point there.
            spare = pieces[0].new_zeros((int(arriving.placing.is_padded), rows_XC.shape[1]))
            rows_VC = torch.cat([*pieces, spare])
            weight = torch.cat(coming.weights(got, weight_N.dtype))
            self._learn(coming.row_numbers(got), arriving)
        return rows_VC, place(weight, _learned(self._local_N), arriving.placing, 0)

    def rows_out(self, rows_XC: torch.Tensor, leg: Leg, lease: Lease) -> torch.Tensor:
        """Send items alone; return rows [V, C], with a spare one."""
        source, arriving = _learned(self._source), _learned(self.arriving)
        rows_UC = rows_XC.index_select(0, source.item_U)
        spare = int(arriving.placing.is_padded)
        return self._swap(leg, rows_UC, source.rows_P, lambda: (arriving.rows_P, spare), lease)

    def choices_summed(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Sum the local choices of each received row: [V, D]."""
        if self._bags is None:
            self._bags = bags_of(_learned(self._row_N), _learned(self._local_N), self.num_received)
        return self._bags.sum(y_RD)

    def rows_back(self, rows_VC: torch.Tensor, leg: Leg, lease: Lease) -> torch.Tensor:
        """Return a row for each one received; gives [U, C], for `items_summed`."""
        source, arriving = _learned(self._source), _learned(self.arriving)
        return self._swap(leg, rows_VC, arriving.rows_P, lambda: (source.rows_P, 0), lease)

    def back(
        self, rows_VC: torch.Tensor, weight_R: torch.Tensor, leg: Leg, form: WireRow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rows_back`, with a weight for each local choice; gives rows [U, C] and weight_N."""
        source, arriving = _learned(self._source), _learned(self.arriving)
        leaving = self._messages(leg, form, arriving.rows_P, arriving.choices_P)
        coming = self._messages(leg, form, source.rows_P, self._choices_P)
        columns = rows_VC.shape[1]
        with self._state.scratch.lease(rows_VC.device) as lease:
            sent = lease.take((leaving.num_bytes,), torch.uint8)
            views = leaving.rows(sent, rows_VC.dtype)
            _split_into([view[:, :columns] for view in views], rows_VC)
            weight_N = weight_R.index_select(0, _learned(self._local_N))
            _split_into(leaving.weights(sent, weight_R.dtype), weight_N)
            got = self._swap(leg, sent, leaving.bytes_P, lambda: (coming.bytes_P, 0), lease)
            views = coming.rows(got, rows_VC.dtype)
            rows_UC = torch.cat([view[:, :columns] for view in views])
            return rows_UC, torch.cat(coming.weights(got, weight_R.dtype))

    def items_summed(self, y_UD: torch.Tensor) -> torch.Tensor:
        """Sum what the peers returned for each item: [X, D]."""
        return _learned(self._source).bags.sum(y_UD)

    def _coming(self, leg: Leg, form: WireRow) -> tuple[Sequence[int], int]:
        arriving = _learned(self.arriving)
        return self._messages(leg, form, arriving.rows_P, arriving.choices_P).bytes_P, 0

    def _learn(self, number_P: Sequence[torch.Tensor], arriving: Arriving) -> None:
        """Take note of the row of each received choice."""
        if self._row_R is not None:
            return
        first_P = starts(arriving.rows_P)
        self._row_N = torch.cat(
            [number.to(torch.int64) + at for number, at in zip(number_P, first_P, strict=True)]
        )
        self._local_N = local_places(arriving.placing, self._row_N.device)
        self._row_R = place(self._row_N, self._local_N, arriving.placing, self.num_received)

    def _messages(
        self, leg: Leg, form: WireRow, rows_P: Sequence[int], choices_P: Sequence[int]
    ) -> Messages:
        return Messages(leg.movement, form.size, rows_P=rows_P, choices_P=choices_P)

    def _swap(
        self,
        leg: Leg,
        rows: torch.Tensor,
        sent_P: Sequence[int],
        coming: Callable[[], tuple[Sequence[int], int]],
        lease: Lease,
    ) -> torch.Tensor:
        """Exchange with the peers; nothing goes to the group's other ranks."""

        def by_rank() -> tuple[Sequence[int], int]:
            received_P, spare = coming()
            return self._by_rank(received_P), spare

        return leg.exchange(rows, self._by_rank(sent_P), by_rank, lease)

    def _by_rank(self, number_P: Sequence[int]) -> list[int]:
        number_W = [0] * self._state.size
        for peer, number in zip(self._peers, number_P, strict=True):
            number_W[peer] = number
        return number_W


def _learned(value: _T | None) -> _T:
    if value is None:
        raise RuntimeError("rows went back, or alone, before the first dispatch of this routing")
    return value


def _gather_into(
    view_P: Sequence[torch.Tensor], rows_XC: torch.Tensor, item_U: torch.Tensor
) -> None:
    """Gather the rows of each peer straight into its message."""
    for view, item in zip(view_P, item_U.split([len(v) for v in view_P]), strict=True):
        torch.index_select(rows_XC, 0, item, out=view[:, : rows_XC.shape[1]])


def _split_into(view_P: Sequence[torch.Tensor], value: torch.Tensor) -> None:
    for view, piece in zip(view_P, value.split([len(v) for v in view_P]), strict=True):
        view.copy_(piece)


class HopRouting(Routing):
    """The hops in turn, and in reverse order on the way back; `learn` adds all but the first."""

    def __init__(self, choices: SortedChoices, state: GroupState, hop: Hop) -> None:
        self._choices, self._state, self._hops = choices, state, [hop]

    @abstractmethod
    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`."""

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Routing.to_experts`."""
        form = leg.form(x_TD.shape[1], x_TD.dtype, weight_TK.element_size())
        rows, weight = form.encode(x_TD), self._choices.sorted_weights(weight_TK)
        item_N, num_items = self._choices.token_N, self._choices.num_tokens
        for hop in self._hops:  # the first time the second hop is learnt in the first
            hop.start_from(item_N, num_items)
            rows, weight = hop.out(rows, weight, leg, form)
            item_N, num_items = hop.row_R, hop.num_received
        return form.decode(rows).index_select(0, item_N), weight

    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """See `Routing.rows_to_experts`."""
        form = leg.form(x_TD.shape[1], x_TD.dtype)
        rows = form.encode(x_TD)
        with self._state.scratch.lease(x_TD.device) as lease:
            for hop in self._hops:
                rows = hop.rows_out(rows, leg, lease)
            return form.decode(rows).index_select(0, self._hops[-1].row_R)

    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """See `Routing.rows_to_tokens`."""
        form, y = leg.form(y_RD.shape[1], y_RD.dtype), self._hops[-1].choices_summed(y_RD)
        with self._state.scratch.lease(y_RD.device) as lease:
            for hop in reversed(self._hops):
                y = hop.items_summed(form.decode(hop.rows_back(form.encode(y), leg, lease)))
        return y

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Routing.to_tokens`."""
        form = leg.form(y_RD.shape[1], y_RD.dtype, weight_R.element_size())
        y, weight = self._hops[-1].choices_summed(y_RD), weight_R
        for hop in reversed(self._hops):
            rows, weight = hop.back(form.encode(y), weight, leg, form)
            y = hop.items_summed(form.decode(rows))
        return y, self._choices.unsorted_weights(weight)


@final
class DedupRouting(HopRouting):
    """A token goes once to each rank, however many of its experts are there: one hop.

    Each rank is told its number of rows, then the choices for each of its experts. `combine` adds a
    token's rows per rank first, then the ranks' sums, so results can differ from the flat route's
    in the last bits.
    """

    def __init__(self, choices: SortedChoices, state: GroupState, alignment: int) -> None:
        self._alignment = alignment
        counts_WL = counts_by_rank(choices, state)
        choices_W = tuple(map(sum, counts_WL))
        source = plan_source(choices.token_N, choices.num_tokens, choices_W)
        self.told = [(n, *row) for n, row in zip(source.rows_P, counts_WL, strict=True)]
        hop = Hop(state, range(state.size), choices_W, source=source)
        super().__init__(choices, state, hop)

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`."""
        counts_WL = [told[1:] for told in told_W]
        placing = plan_placing(counts_WL, alignment=self._alignment)
        self.num_tokens_per_expert = placing.num_tokens_per_expert
        rows_W = tuple(told[0] for told in told_W)
        self._hops[0].arriving = Arriving(rows_W, tuple(map(sum, counts_WL)), placing)
