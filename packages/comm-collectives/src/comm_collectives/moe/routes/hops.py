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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from comm_collectives.base.transport import Scratch
from comm_collectives.call.groups import GroupState
from comm_collectives.moe.routes.hop_messages import Messages
from comm_collectives.moe.routes.routing import Leg, Routing, WireRow, place, spread
from comm_collectives.moe.rows import Bags, Placing, SortedChoices, bags_of, starts

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HopPlan:
    """The numbers of a hop as this rank sees them.

    Attributes:
        peers: the ranks inside the group that this hop reaches, ascending; each is sent to and
            received from.
        sent_choices_P: choices for each peer.
        received_rows_P: rows from each peer.
        received_choices_P: choices from each peer.
        placing: where the received choices go.
    """

    peers: tuple[int, ...]
    sent_choices_P: tuple[int, ...]
    received_rows_P: tuple[int, ...]
    received_choices_P: tuple[int, ...]
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
    """One hop. The first `out` learns which rows arrive; only then can the others run."""

    def __init__(self, plan: HopPlan, state: GroupState, source: HopSource | None = None) -> None:
        self._plan, self._state, self._source = plan, state, source
        self._local_N: torch.Tensor | None = None
        self._row_N: torch.Tensor | None = None
        self._row_R: torch.Tensor | None = None
        self._bags: Bags | None = None

    @property
    def num_received(self) -> int:
        """Rows received, without a spare row."""
        return sum(self._plan.received_rows_P)

    @property
    def row_R(self) -> torch.Tensor:
        """The received row of each local choice; padding points at the spare row behind them."""
        return _learned(self._row_R)

    def start_from(self, item_N: torch.Tensor, num_items: int) -> None:
        """Plan what is sent, unless it is known: the item of each choice, sorted by expert."""
        if self._source is None:
            self._source = plan_source(item_N, num_items, self._plan.sent_choices_P)

    def out(
        self, rows_XC: torch.Tensor, weight_N: torch.Tensor, leg: Leg, form: WireRow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send items and weights; return rows [V, C], with a spare one, and weight_R."""
        source, plan = _learned(self._source), self._plan
        leaving = self._messages(leg, form, source.rows_P, plan.sent_choices_P)
        sent = self._flat(leaving, rows_XC.device)
        _gather_into(leaving.rows(sent.rows, rows_XC.dtype), rows_XC, source.item_U)
        _split_into(leaving.row_numbers(sent.rows), source.row_N)
        _split_into(leaving.weights(sent.rows, weight_N.dtype), weight_N)
        coming = self._messages(leg, form, plan.received_rows_P, plan.received_choices_P)
        got = self._swap(leg, sent, leaving.bytes_P, coming.bytes_P)
        rows_VC = self._joined(coming.rows(got.rows, rows_XC.dtype), rows_XC.shape[1])
        weight = torch.cat(coming.weights(got.rows, weight_N.dtype))
        self._learn(coming.row_numbers(got.rows))
        self._state.scratch.give_back(got)
        return rows_VC, place(weight, _learned(self._local_N), plan.placing, 0)

    def rows_out(self, rows_XC: torch.Tensor, leg: Leg) -> torch.Tensor:
        """Send items alone; return rows [V, C], with a spare one."""
        source = _learned(self._source)
        rows_UC = rows_XC.index_select(0, source.item_U)
        return self._swap_rows(
            leg, rows_UC, source.rows_P, self._plan.received_rows_P, spare=self._spare
        )

    def choices_summed(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Sum the local choices of each received row: [V, D]."""
        if self._bags is None:
            self._bags = bags_of(_learned(self._row_N), _learned(self._local_N), self.num_received)
        return self._bags.sum(y_RD)

    def rows_back(self, rows_VC: torch.Tensor, leg: Leg) -> torch.Tensor:
        """Return a row for each one received; gives [U, C], for `items_summed`."""
        source = _learned(self._source)
        return self._swap_rows(leg, rows_VC, self._plan.received_rows_P, source.rows_P, spare=0)

    def back(
        self, rows_VC: torch.Tensor, weight_R: torch.Tensor, leg: Leg, form: WireRow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rows_back`, with a weight for each local choice; gives rows [U, C] and weight_N."""
        source, plan = _learned(self._source), self._plan
        leaving = self._messages(leg, form, plan.received_rows_P, plan.received_choices_P)
        sent = self._flat(leaving, rows_VC.device)
        _split_into(
            [view[:, : rows_VC.shape[1]] for view in leaving.rows(sent.rows, rows_VC.dtype)],
            rows_VC,
        )
        weight_N = weight_R.index_select(0, _learned(self._local_N))
        _split_into(leaving.weights(sent.rows, weight_R.dtype), weight_N)
        coming = self._messages(leg, form, source.rows_P, plan.sent_choices_P)
        got = self._swap(leg, sent, leaving.bytes_P, coming.bytes_P)
        views = coming.rows(got.rows, rows_VC.dtype)
        rows_UC = torch.cat([view[:, : rows_VC.shape[1]] for view in views])
        weight_N = torch.cat(coming.weights(got.rows, weight_R.dtype))
        self._state.scratch.give_back(got)
        return rows_UC, weight_N

    def items_summed(self, y_UD: torch.Tensor) -> torch.Tensor:
        """Sum what the peers returned for each item: [X, D]."""
        return _learned(self._source).bags.sum(y_UD)

    @property
    def _spare(self) -> int:
        return int(self._plan.placing.is_padded)

    def _learn(self, number_P: Sequence[torch.Tensor]) -> None:
        """Take note of the row of each received choice."""
        if self._row_R is not None:
            return
        plan = self._plan
        first_P = starts(plan.received_rows_P)
        row_N = torch.cat(
            [number.to(torch.int64) + at for number, at in zip(number_P, first_P, strict=True)]
        )
        placing = plan.placing
        (local_N,) = spread([placing.local_shift_B], placing.block_rows_B, row_N.device)
        self._row_N, self._local_N = row_N, local_N
        self._row_R = place(row_N, local_N, placing, self.num_received)

    def _messages(
        self, leg: Leg, form: WireRow, rows_P: Sequence[int], choices_P: Sequence[int]
    ) -> Messages:
        return Messages(leg.movement, form.size, rows_P=rows_P, choices_P=choices_P)

    def _flat(self, messages: Messages, device: torch.device) -> Scratch:
        return self._state.scratch.take((messages.num_bytes,), torch.uint8, device)

    def _swap(
        self, leg: Leg, wire: Scratch, sent_P: Sequence[int], received_P: Sequence[int]
    ) -> Scratch:
        pool = self._state.scratch
        got = pool.take((sum(received_P),), torch.uint8, wire.rows.device)
        self._exchange(leg, wire.rows, sent_P, received_P, got.rows)
        pool.give_back(wire)
        return got

    def _swap_rows(
        self,
        leg: Leg,
        rows: torch.Tensor,
        sent_P: Sequence[int],
        received_P: Sequence[int],
        *,
        spare: int,
    ) -> torch.Tensor:
        total = sum(received_P)
        got = rows.new_empty((total + spare, rows.shape[1]))
        self._exchange(leg, rows, sent_P, received_P, got[:total])
        got[total:].zero_()
        return got

    def _exchange(
        self,
        leg: Leg,
        rows: torch.Tensor,
        sent_P: Sequence[int],
        received_P: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Exchange with the peers; nothing goes to the group's other ranks."""
        sent, received = [0] * self._state.size, [0] * self._state.size
        for peer, out_count, in_count in zip(self._plan.peers, sent_P, received_P, strict=True):
            sent[peer], received[peer] = out_count, in_count
        leg.exchange(rows, sent, received, out)

    def _joined(self, view_P: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """Join the peers' rows, and a row of zeros behind them if padding will point there."""
        pieces = [view[:, :columns] for view in view_P]
        return torch.cat([*pieces, pieces[0].new_zeros((self._spare, columns))])


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


@final
class _HopRouting(Routing):
    """The hops in turn, and in reverse order on the way back."""

    exchanges = True

    def __init__(
        self, choices: SortedChoices, hops: Sequence[Hop], num_tokens_per_expert: tuple[int, ...]
    ) -> None:
        self._choices, self._hops = choices, hops
        self.num_tokens_per_expert = num_tokens_per_expert

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = leg.form(x_TD, weight_TK.element_size())
        rows, weight = form.encode(x_TD), self._choices.sorted_weights(weight_TK)
        item_N, num_items = self._choices.token_N, self._choices.num_tokens
        for hop in self._hops:
            hop.start_from(item_N, num_items)
            rows, weight = hop.out(rows, weight, leg, form)
            item_N, num_items = hop.row_R, hop.num_received
        return form.decode(rows).index_select(0, item_N), weight

    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        form = leg.form(x_TD)
        rows = form.encode(x_TD)
        for hop in self._hops:
            rows = hop.rows_out(rows, leg)
        return form.decode(rows).index_select(0, self._hops[-1].row_R)

    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        form = leg.form(y_RD)
        y = self._hops[-1].choices_summed(y_RD)
        for hop in reversed(self._hops):
            y = hop.items_summed(form.decode(hop.rows_back(form.encode(y), leg)))
        return y

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = leg.form(y_RD, weight_R.element_size())
        y, weight = self._hops[-1].choices_summed(y_RD), weight_R
        for hop in reversed(self._hops):
            rows, weight = hop.back(form.encode(y), weight, leg, form)
            y = hop.items_summed(form.decode(rows))
        return y, self._choices.unsorted_weights(weight)


def hop_routing(
    choices: SortedChoices, hops: Sequence[Hop], num_tokens_per_expert: tuple[int, ...]
) -> Routing:
    """Route by hops, of which the last ends at the experts."""
    return _HopRouting(choices, hops, num_tokens_per_expert)
