"""The flat route: one row per choice, straight to the rank that holds its expert.

Each movement is one gather of rows by index on each side and one all-to-all between them. The rows
of a token are summed in the order of its choices, so that results do not depend on the number of
ranks: one rank and many give the same bits.

Legend: that of moe/routes/routing.py, and M rows on the wire, gap rows among them.
"""

from collections.abc import Sequence
from typing import final

import torch

from comm_collectives.base.transport import Scratch
from comm_collectives.call.groups import GroupState
from comm_collectives.moe.routes.routing import Leg, RouteRequest, Routing, WireRow, place, spread
from comm_collectives.moe.rows import Placing, SortedChoices, WireSide, plan_placing, plan_wire


@final
class _Wire:
    """Positions of rows and of weights on the wire, for one number of weights to a gap row."""

    def __init__(
        self,
        sent_P: Sequence[int],
        received_P: Sequence[int],
        weights_per_row: int,
        device: torch.device,
    ) -> None:
        self.source = plan_wire(sent_P, weights_per_row)
        self.expert = plan_wire(received_P, weights_per_row)
        self.sent_row, self.sent_weight = _positions(self.source, device)
        self.received_row, self.received_weight = _positions(self.expert, device)


@final
class _FlatRouting(Routing):
    """Experts are spread over the ranks of a group; each movement is one all-to-all."""

    exchanges = True

    def __init__(
        self,
        choices: SortedChoices,
        state: GroupState,
        *,
        sent_P: Sequence[int],
        received_P: Sequence[int],
        placing: Placing,
    ) -> None:
        self._choices, self._state, self._placing = choices, state, placing
        self._sent_P, self._received_P = sent_P, received_P
        self.num_tokens_per_expert = placing.num_tokens_per_expert
        # The received rows' places among the local experts, block by block.
        device = choices.order_N.device
        (self._local_R,) = spread([placing.local_shift_B], placing.block_rows_B, device)
        self._wires: dict[int, _Wire] = {}

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = leg.form(x_TD, weight_TK.element_size())
        wire = self._wire(form)
        weight_N = self._choices.sorted_weights(weight_TK)
        index_M = _with_gaps(self._choices.token_N, wire.source, wire.sent_row)
        sent = self._gather(form.encode(x_TD), index_M, form.wire_columns)
        _as_weights(sent.rows, weight_N.dtype).scatter_(0, wire.sent_weight, weight_N)
        got = self._exchange(
            leg, sent, wire.source.wire_rows_P, wire.expert.wire_rows_P, padded=True
        )
        rows, last = got.rows, got.rows.shape[0] - 1
        weight = _as_weights(rows, weight_TK.dtype)
        spare = last * (weight.numel() // max(1, rows.shape[0]))
        row_R = self._place(wire.received_row, last)
        x_RD = form.decode(rows[:, : form.columns].index_select(0, row_R))
        weight_R = weight.index_select(0, self._place(wire.received_weight, spare))
        self._state.scratch.give_back(got)
        return x_RD, weight_R

    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        form = leg.form(x_TD)
        sent = self._gather(form.encode(x_TD), self._choices.token_N, form.columns)
        got = self._exchange(leg, sent, self._sent_P, self._received_P, padded=True)
        running = torch.arange(self._placing.num_choices, device=x_TD.device)
        row_R = self._place(running, got.rows.shape[0] - 1)
        x_RD = form.decode(got.rows.index_select(0, row_R))
        self._state.scratch.give_back(got)
        return x_RD

    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        form = leg.form(y_RD)
        sent = self._gather(form.encode(y_RD), self._local_R, form.columns)
        got = self._exchange(leg, sent, self._received_P, self._sent_P)
        running = torch.arange(got.rows.shape[0], device=y_RD.device)
        y_TD = self._choices.bags(running).sum(form.decode(got.rows))
        self._state.scratch.give_back(got)
        return y_TD

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = leg.form(y_RD, weight_R.element_size())
        wire = self._wire(form)
        index_M = _with_gaps(self._local_R, wire.expert, wire.received_row)
        sent = self._gather(form.encode(y_RD), index_M, form.wire_columns)
        weight_N = weight_R.index_select(0, self._local_R)
        _as_weights(sent.rows, weight_R.dtype).scatter_(0, wire.received_weight, weight_N)
        got = self._exchange(leg, sent, wire.expert.wire_rows_P, wire.source.wire_rows_P)
        rows = form.decode(got.rows[:, : form.columns])
        y_TD = self._choices.bags(wire.sent_row).sum(rows)
        weight = _as_weights(got.rows, weight_R.dtype)
        weight_TK = self._choices.unsorted_weights(weight.index_select(0, wire.sent_weight))
        self._state.scratch.give_back(got)
        return y_TD, weight_TK

    def _wire(self, form: WireRow) -> _Wire:
        per_row = form.size.weights_per_row
        wire = self._wires.get(per_row)
        if wire is None:
            device = self._choices.order_N.device
            wire = self._wires[per_row] = _Wire(self._sent_P, self._received_P, per_row, device)
        return wire

    def _gather(self, rows: torch.Tensor, index_M: torch.Tensor, columns: int) -> Scratch:
        """Gather rows into scratch memory [M, columns]; columns beyond theirs are left alone."""
        wire = self._state.scratch.take((index_M.numel(), columns), rows.dtype, rows.device)
        torch.index_select(rows, 0, index_M, out=wire.rows[:, : rows.shape[1]])
        return wire

    def _exchange(
        self,
        leg: Leg,
        wire: Scratch,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        padded: bool = False,
    ) -> Scratch:
        """Exchange rows; where padding is wanted, a last row of zeros stands behind them."""
        spare = int(padded and self._placing.is_padded)
        total, pool = sum(received), self._state.scratch
        rows = wire.rows
        got = pool.take((total + spare, rows.shape[1]), rows.dtype, rows.device)
        leg.exchange(rows, sent, received, got.rows[:total])
        pool.give_back(wire)
        got.rows[total:].zero_()
        return got

    def _place(self, position: torch.Tensor, spare: int) -> torch.Tensor:
        """Order positions by local row; padding rows point at the spare row of zeros."""
        return place(position, self._local_R, self._placing, spare)


@final
class FlatRequest(RouteRequest):
    """Each rank is told the choices for each of its experts."""

    def __init__(self, choices: SortedChoices, state: GroupState) -> None:
        self._choices, self._state = choices, state
        self.counts = counts_by_rank(choices, state)

    def routing(self, received: Sequence[Sequence[int]], *, alignment: int) -> Routing:
        """Return the routing, given what each rank told this one."""
        return _FlatRouting(
            self._choices,
            self._state,
            sent_P=[sum(row) for row in self.counts],
            received_P=[sum(row) for row in received],
            placing=plan_placing(received, alignment=alignment),
        )


def counts_by_rank(choices: SortedChoices, state: GroupState) -> list[tuple[int, ...]]:
    """Return the choices for each expert of each rank."""
    counts_E = choices.counts_E
    num_local = len(counts_E) // state.size
    return [counts_E[at : at + num_local] for at in range(0, len(counts_E), num_local)]


def _with_gaps(index_N: torch.Tensor, side: WireSide, row_N: torch.Tensor) -> torch.Tensor:
    # A gap row gets a copy of row 0 first: one gather is cheaper than one per peer.
    return index_N.new_zeros(sum(side.wire_rows_P)).scatter_(0, row_N, index_N)


def _positions(side: WireSide, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    row_N, weight_N = spread([side.row_shift_P, side.weight_shift_P], side.rows_P, device)
    return row_N, weight_N


def _as_weights(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return wire.view(-1).view(dtype)
