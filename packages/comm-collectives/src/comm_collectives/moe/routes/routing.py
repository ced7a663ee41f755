"""Carry rows from tokens to experts and back; the four movements that dispatch and combine need.

Each route is a `Routing`. All bring the experts the same rows in the same order; they differ in how
often a token's row travels, and therefore in the order in which `combine` adds. Here is the flat
one: one row per choice, straight to the rank that holds its expert. Each of its movements is one
gather of rows by index on each side and one exchange between them, and a token's rows are summed in
the order of its choices, so that one rank and many give the same bits.

Legend: T tokens, D hidden size, K choices per token, N choices that name an expert, R rows of the
local experts with padding, C columns of a row as it travels, M rows on the wire, gap rows among
them, W ranks, P peers, L local experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, final

import torch

from comm_collectives.base.transport import Lease
from comm_collectives.call import Agreed, Call, pack_counts, unpack_counts
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import Status
from comm_collectives.collectives import exchange_bytes, on_host, swap
from comm_collectives.moe.rows import (
    Payload,
    Placing,
    RowCodec,
    SortedChoices,
    plan_placing,
    plan_wire,
)
from comm_collectives.planning.wire import Movement, RowFormat

# How many rows come from each rank, and how many of zeros stand behind them.
Coming = Callable[[], tuple[Sequence[int], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """How the rows [N, D] of one movement travel: as their elements, or as bytes of a codec.

    Attributes:
        columns: elements of a row as it travels.
        wire_columns: the same with the room that weights beside it need.
        size: the sizes in bytes.
    """

    hidden: int
    dtype: torch.dtype
    codec: RowCodec | None
    columns: int
    wire_columns: int
    size: RowFormat

    def encode(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return rows [N, C] as they travel, which may be `x_ND` itself."""
        return x_ND if self.codec is None else self.codec.encode(x_ND)

    def decode(self, rows_NC: torch.Tensor) -> torch.Tensor:
        """Return rows [N, D] as they were, but for the rounding; zero bytes are zeros."""
        if self.codec is None:
            return rows_NC
        return self.codec.decode(rows_NC, hidden=self.hidden, dtype=self.dtype)


class Routing(ABC):
    """The four movements of one dispatch, its combine and their backwards.

    `to_experts` comes first. It may come again, with the same rows or others.

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
    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: "Leg"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring rows and their weights to the experts: x_RD and weight_R, padding zero."""

    @abstractmethod
    def rows_to_experts(self, x_TD: torch.Tensor, leg: "Leg") -> torch.Tensor:
        """Bring rows alone to the experts: x_RD, padding zero."""

    @abstractmethod
    def rows_to_tokens(self, y_RD: torch.Tensor, leg: "Leg") -> torch.Tensor:
        """Bring rows back and sum those of each token: y_TD."""

    @abstractmethod
    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: "Leg"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring rows and weights back: y_TD summed, weight_TK each in its place."""


@final
class Leg:
    """One movement: which it is, what rows become on the wire, and the call that makes it.

    `call` is None where nothing is exchanged. `flags` are this rank's at first, and those of all
    ranks after the first exchange.
    """

    def __init__(
        self,
        movement: Movement,
        payload: Payload = "full",
        call: Call | None = None,
        *,
        flags: int = 0,
    ) -> None:
        self.movement = movement
        self.payload = payload
        self._call = call
        self._routing: Routing | None = None
        self._has_met = call is not None and call.is_backward
        self.flags = flags

    def __str__(self) -> str:
        """The movement as errors name it."""
        return self.movement if self._call is None else str(self._call)

    def tell(self, routing: Routing) -> None:
        """Let the ranks tell with the first exchange what the routing has to learn."""
        self._routing = routing

    def form(self, hidden: int, dtype: torch.dtype, weight_itemsize: int = 1) -> WireRow:
        """Return how rows travel, with weights of that many bytes beside them."""
        return _wire_row(self.movement, self.payload, hidden, dtype, weight_itemsize)

    def exchange(
        self, rows: torch.Tensor, sent_W: Sequence[int], coming: Coming, lease: Lease
    ) -> torch.Tensor:
        """Send contiguous rows, `sent_W[r]` of them to rank r; return those received. Collective.

        `coming` is asked after the routing has learnt; memory is of the lease. This is the one
        place where rows of tokens are handed to the group.
        """
        call, row_bytes = self._exchanging(), rows.shape[1:].numel() * rows.element_size()
        state, sent = call.state, [n * row_bytes for n in sent_W]
        flat, kind, columns = rows.view(-1).view(torch.uint8), rows.dtype, rows.shape[1:]
        made: list[torch.Tensor] = []

        def room(agreed: Agreed) -> list[int]:
            self._hear(agreed)
            received_W, spare = coming()
            got = lease.take((sum(received_W) + spare, *columns), kind)
            total = got.shape[0] - spare
            got[total:].zero_()
            made.extend((got, got[:total].view(-1).view(torch.uint8)))
            return [n * row_bytes for n in received_W]

        def place(agreed: Agreed) -> Sequence[torch.Tensor]:
            sizes = room(agreed)
            pieces: Sequence[torch.Tensor] = made[1].split(sizes)
            return pieces

        told = None if self._routing is None else [pack_counts(row) for row in self._routing.told]
        if flat.device.type == "cpu" and on_host(state, flat.device):
            call.exchange(flat.split(sent), place, parts=told, status=self.flags)
            for observe in state.observers:
                observe(call.name, sent)
        elif told is not None or on_host(state, flat.device):
            swap(
                call,
                flat,
                sent,
                lambda agreed: (room(agreed), made[1])[1],
                parts=told,
                status=self.flags,
            )
        else:
            received = room(Agreed(flags=self._flags_untold(call), parts=[], sizes=[]))
            exchange_bytes(call, flat, sent, received, made[1])
        return made[0]

    def agree(self) -> None:
        """Meet the other ranks of the call, if any; something else moves the rows. Collective."""
        call = self._call
        if call is None:
            return
        if self._routing is not None:
            told = [pack_counts(row) for row in self._routing.told]
            self._hear(call.meet(parts=told, status=self.flags))
        elif not call.is_backward:
            self.flags = self._flags_untold(call)
        elif call.state.policy.every:
            call.meet()

    def _hear(self, agreed: Agreed) -> None:
        self.flags, self._has_met = agreed.flags, True
        if self._routing is not None:
            self._routing.learn([unpack_counts(part) for part in agreed.parts])
            self._routing = None

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

    def _exchanging(self) -> Call:
        if self._call is None:
            raise RuntimeError(f"{self.movement} has no call to exchange rows in")
        return self._call


@lru_cache(maxsize=256)
def _wire_row(
    movement: Movement, payload: Payload, hidden: int, dtype: torch.dtype, weight_itemsize: int
) -> WireRow:
    size = RowFormat(
        hidden_size=hidden,
        itemsize=dtype.itemsize,
        weight_itemsize=weight_itemsize,
        block_scaled=payload != "full",
    )
    itemsize = dtype.itemsize if payload == "full" else 1
    return WireRow(
        hidden=hidden,
        dtype=dtype,
        codec=None if payload == "full" else RowCodec(payload),
        columns=size.bare_row_bytes // itemsize,
        wire_columns=size.row_bytes_of(movement) // itemsize,
        size=size,
    )


class _Side(NamedTuple):
    """One end of the wire: rows and gap rows per peer, and where rows and weights stand there."""

    wire_rows_P: Sequence[int]
    row_N: torch.Tensor
    weight_N: torch.Tensor


@final
class FlatRouting(Routing):
    """Experts are spread over the ranks of a group; each rank is told the choices for each."""

    def __init__(self, choices: SortedChoices, state: GroupState, alignment: int) -> None:
        self._choices, self._state, self._alignment = choices, state, alignment
        self.told = counts_by_rank(choices, state)
        self._sent_P = tuple(map(sum, self.told))
        self._received_P: tuple[int, ...] = ()
        self._sides: dict[tuple[bool, int], _Side] = {}

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`."""
        self._received_P = tuple(map(sum, told_W))
        self._placing = plan_placing(told_W, alignment=self._alignment)
        self.num_tokens_per_expert = self._placing.num_tokens_per_expert
        # The received rows' places among the local experts, block by block.
        self._local_R = local_places(self._placing, self._choices.order_N.device)

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Routing.to_experts`; weights travel in the gap rows."""
        form = leg.form(x_TD.shape[1], x_TD.dtype, weight_TK.element_size())
        side = self._side(form, is_source=True)
        with self._state.scratch.lease(x_TD.device) as lease:
            index_M = _with_gaps(self._choices.token_N, side)
            weight_N = self._choices.sorted_weights(weight_TK)
            sent = _filled(form, x_TD, index_M, lease)
            sent.view(-1).view(weight_N.dtype).scatter_(0, side.weight_N, weight_N)
            got = leg.exchange(sent, side.wire_rows_P, lambda: self._coming(form, True), lease)
            side, last = self._side(form, is_source=False), got.shape[0] - 1
            weight = got.view(-1).view(weight_N.dtype)
            spare = last * (weight.numel() // max(1, got.shape[0]))
            row_R = self._place(side.row_N, last)
            x_RD = got[:, : form.columns].index_select(0, row_R)
            weight_R = weight.index_select(0, self._place(side.weight_N, spare))
        return x_RD if form.codec is None else form.decode(x_RD), weight_R

    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """See `Routing.rows_to_experts`."""
        form = leg.form(x_TD.shape[1], x_TD.dtype)
        with self._state.scratch.lease(x_TD.device) as lease:
            sent = _filled(form, x_TD, self._choices.token_N, lease)
            coming = self._received_P, int(self._placing.is_padded)
            got = leg.exchange(sent, self._sent_P, lambda: coming, lease)
            running = torch.arange(self._placing.num_choices, device=x_TD.device)
            x_RD = got.index_select(0, self._place(running, got.shape[0] - 1))
        return form.decode(x_RD)

    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """See `Routing.rows_to_tokens`."""
        form = leg.form(y_RD.shape[1], y_RD.dtype)
        with self._state.scratch.lease(y_RD.device) as lease:
            sent = _filled(form, y_RD, self._local_R, lease)
            got = leg.exchange(sent, self._received_P, lambda: (self._sent_P, 0), lease)
            running = torch.arange(got.shape[0], device=y_RD.device)
            return self._choices.bags(running).sum(form.decode(got))

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Routing.to_tokens`."""
        form = leg.form(y_RD.shape[1], y_RD.dtype, weight_R.element_size())
        side = self._side(form, is_source=False)
        with self._state.scratch.lease(y_RD.device) as lease:
            sent = _filled(form, y_RD, _with_gaps(self._local_R, side), lease)
            weight_N = weight_R.index_select(0, self._local_R)
            sent.view(-1).view(weight_R.dtype).scatter_(0, side.weight_N, weight_N)
            got = leg.exchange(sent, side.wire_rows_P, lambda: self._coming(form, False), lease)
            side = self._side(form, is_source=True)
            y_TD = self._choices.bags(side.row_N).sum(form.decode(got[:, : form.columns]))
            weight_N = got.view(-1).view(weight_R.dtype).index_select(0, side.weight_N)
        return y_TD, self._choices.unsorted_weights(weight_N)

    def _side(self, form: WireRow, *, is_source: bool) -> _Side:
        key = is_source, form.size.weights_per_row
        if key not in self._sides:
            plan = plan_wire(self._sent_P if is_source else self._received_P, key[1])
            device = self._choices.order_N.device
            row_N, weight_N = spread([plan.row_shift_P, plan.weight_shift_P], plan.rows_P, device)
            self._sides[key] = _Side(plan.wire_rows_P, row_N, weight_N)
        return self._sides[key]

    def _coming(self, form: WireRow, to_experts: bool) -> tuple[Sequence[int], int]:
        rows_P = self._side(form, is_source=not to_experts).wire_rows_P
        return rows_P, int(to_experts and self._placing.is_padded)

    def _place(self, position: torch.Tensor, spare: int) -> torch.Tensor:
        """Order positions by local row; padding rows point at the spare row of zeros."""
        return place(position, self._local_R, self._placing, spare)


def counts_by_rank(choices: SortedChoices, state: GroupState) -> list[tuple[int, ...]]:
    """Return the choices for each expert of each rank."""
    counts_E = choices.counts_E
    num_local = len(counts_E) // state.size
    return [counts_E[at : at + num_local] for at in range(0, len(counts_E), num_local)]


def spread(
    shifts: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Give each running number of piece p its position: running number plus shift of p."""
    table = torch.tensor([*shifts, lengths], dtype=torch.int64, device=device)
    total = sum(lengths)
    positions = table[:-1].repeat_interleave(table[-1], dim=1, output_size=total)
    positions += torch.arange(total, device=device)
    return positions.unbind(0)


def local_places(placing: Placing, device: torch.device) -> torch.Tensor:
    """Return where each received choice stands among the rows of the local experts."""
    return spread([placing.local_shift_B], placing.block_rows_B, device)[0]


def place(
    value_N: torch.Tensor, local_N: torch.Tensor, placing: Placing, spare: int
) -> torch.Tensor:
    """Bring one value per choice into the order of the local rows; padding rows get `spare`."""
    if placing.is_padded:
        placed = value_N.new_full((placing.num_rows,), spare)
    else:
        placed = value_N.new_empty(placing.num_rows)
    return placed.scatter_(0, local_N, value_N)


def _with_gaps(index_N: torch.Tensor, side: _Side) -> torch.Tensor:
    # A gap row gets a copy of row 0 first: one gather is cheaper than one per peer.
    return index_N.new_zeros(sum(side.wire_rows_P)).scatter_(0, side.row_N, index_N)


def _filled(form: WireRow, x_ND: torch.Tensor, index_M: torch.Tensor, lease: Lease) -> torch.Tensor:
    """Gather rows as they travel; columns beyond theirs are left alone."""
    rows = x_ND if form.codec is None else form.encode(x_ND)
    filled = lease.take((index_M.numel(), form.wire_columns), rows.dtype)
    torch.index_select(rows, 0, index_M, out=filled[:, : rows.shape[1]])
    return filled
