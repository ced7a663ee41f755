"""Carry rows from tokens to experts and back; the four movements that dispatch and combine need.

Every movement is one gather of rows by index on each side and, between ranks, one exchange. There
is no scattered addition: the k rows of a token are summed in the order of its k choices, so that
results do not depend on the number of ranks and repeat bit for bit.

Legend: T tokens, D hidden size, K choices per token, N = T * K routed rows sent, R rows received
with padding, M rows on the wire, W ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from comm_collectives.alltoall import exchange_rows
from comm_collectives.calls import Call
from comm_collectives.groups import GroupState
from comm_collectives.routing_plan import RoutingPlan, WireSide
from comm_collectives.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedChoices:
    """The routed rows of this rank in expert order; `order_N` indexes the flat choices [T * K]."""

    order_N: torch.Tensor
    num_choices: int
    counts_E: tuple[int, ...]

    @property
    def token_N(self) -> torch.Tensor:
        """The token of each sorted row."""
        return self.order_N.div(self.num_choices, rounding_mode="floor")

    def slots_TK(self, position_N: torch.Tensor) -> torch.Tensor:
        """Where the row of each choice stands, given the position of each sorted row."""
        slot = torch.empty_like(self.order_N).scatter_(0, self.order_N, position_N)
        return slot.view(-1, self.num_choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Under which name an exchange is counted and reported, and its limit in seconds."""

    name: str
    timeout_s: float | None


class Routing(ABC):
    """The four movements; the label names and limits the exchange, if there is one."""

    __slots__ = ()

    exchanges: ClassVar[bool]
    num_tokens_per_expert: tuple[int, ...]

    @abstractmethod
    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring rows and their weights to the experts: x_RD and weight_R, padding zero."""

    @abstractmethod
    def rows_to_experts(self, x_TD: torch.Tensor, label: Label) -> torch.Tensor:
        """Bring rows alone to the experts: x_RD, padding zero."""

    @abstractmethod
    def rows_to_tokens(self, y_RD: torch.Tensor, label: Label) -> torch.Tensor:
        """Bring rows back and sum those of each token: y_TD."""

    @abstractmethod
    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring rows and weights back: y_TD summed, weight_TK each in its place."""


@final
class _LocalRouting(Routing):
    """One rank holds all experts: rows are only reordered, nothing is exchanged."""

    exchanges = False
    __slots__ = ("_choices", "_local_N", "_num_rows", "num_tokens_per_expert")

    def __init__(self, choices: SortedChoices, plan: RoutingPlan) -> None:
        self._choices = choices
        self._num_rows = plan.num_local_rows
        self._local_N: torch.Tensor | None = None
        if plan.is_padded:
            device = choices.order_N.device
            (self._local_N,) = _spread([plan.local_shift_B], plan.block_rows_B, device)
        self.num_tokens_per_expert = plan.num_tokens_per_expert

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_N = weight_TK.reshape(-1).index_select(0, self._choices.order_N)
        return self.rows_to_experts(x_TD, label), self._pad(weight_N)

    def rows_to_experts(self, x_TD: torch.Tensor, label: Label) -> torch.Tensor:
        return self._pad(x_TD.index_select(0, self._choices.token_N))

    def rows_to_tokens(self, y_RD: torch.Tensor, label: Label) -> torch.Tensor:
        return _sum_rows(y_RD, self._slots_TK())

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slot_TK = self._slots_TK()
        return _sum_rows(y_RD, slot_TK), weight_R[slot_TK]

    def _slots_TK(self) -> torch.Tensor:
        order_N = self._choices.order_N
        position_N = self._local_N
        if position_N is None:
            position_N = torch.arange(order_N.numel(), device=order_N.device)
        return self._choices.slots_TK(position_N)

    def _pad(self, rows_N: torch.Tensor) -> torch.Tensor:
        if self._local_N is None:
            return rows_N
        padded = rows_N.new_zeros((self._num_rows, *rows_N.shape[1:]))
        return padded.index_copy_(0, self._local_N, rows_N)


@final
class _GroupRouting(Routing):
    """Experts are spread over the ranks of a group; each movement is one all-to-all."""

    exchanges = True
    __slots__ = (
        *("_choices", "_group", "_local_R", "_plan", "_received_row", "_received_weight"),
        *("_sent_row", "_sent_weight", "_state", "num_tokens_per_expert"),
    )

    def __init__(
        self,
        choices: SortedChoices,
        plan: RoutingPlan,
        group: dist.ProcessGroup,
        state: GroupState,
    ) -> None:
        self._choices, self._plan, self._group, self._state = choices, plan, group, state
        self.num_tokens_per_expert = plan.num_tokens_per_expert
        device = choices.order_N.device
        source, expert = plan.source, plan.expert
        # Positions on the wire of the rows and of the weights that this rank sends ...
        self._sent_row, self._sent_weight = _spread(
            [source.row_shift_P, source.weight_shift_P], source.rows_P, device
        )
        # ... and receives, and the rows' places among the local experts, block by block.
        num_local = len(plan.num_tokens_per_expert)
        self._received_row, self._received_weight, self._local_R = _spread(
            [
                [shift for shift in expert.row_shift_P for _ in range(num_local)],
                [shift for shift in expert.weight_shift_P for _ in range(num_local)],
                plan.local_shift_B,
            ],
            plan.block_rows_B,
            device,
        )

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, expert = self._plan.source, self._plan.expert
        weight_N = weight_TK.reshape(-1).index_select(0, self._choices.order_N)
        sent = self._load(x_TD, self._choices.token_N, weight_N, source)
        got = self._exchange(label, sent, source.wire_rows_P, expert.wire_rows_P, padded=True)
        wire, last = got.rows, got.rows.shape[0] - 1
        weight = _as_weights(wire, weight_TK.dtype)
        spare = last * (weight.numel() // max(1, wire.shape[0]))
        x_RD = wire[:, : x_TD.shape[1]].index_select(0, self._place(self._received_row, last))
        weight_R = weight.index_select(0, self._place(self._received_weight, spare))
        self._state.scratch.give_back(got)
        return x_RD, weight_R

    def rows_to_experts(self, x_TD: torch.Tensor, label: Label) -> torch.Tensor:
        source, expert = self._plan.source, self._plan.expert
        sent = self._gather(x_TD, self._choices.token_N, x_TD.shape[1])
        got = self._exchange(label, sent, source.rows_P, expert.rows_P, padded=True)
        running = torch.arange(expert.num_rows, device=x_TD.device)
        x_RD = got.rows.index_select(0, self._place(running, got.rows.shape[0] - 1))
        self._state.scratch.give_back(got)
        return x_RD

    def rows_to_tokens(self, y_RD: torch.Tensor, label: Label) -> torch.Tensor:
        source, expert = self._plan.source, self._plan.expert
        sent = self._gather(y_RD, self._local_R, y_RD.shape[1])
        got = self._exchange(label, sent, expert.rows_P, source.rows_P)
        running = torch.arange(source.num_rows, device=y_RD.device)
        y_TD = _sum_rows(got.rows, self._choices.slots_TK(running))
        self._state.scratch.give_back(got)
        return y_TD

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, expert = self._plan.source, self._plan.expert
        weight_N = weight_R.index_select(0, self._local_R)
        sent = self._load(y_RD, self._local_R, weight_N, expert)
        got = self._exchange(label, sent, expert.wire_rows_P, source.wire_rows_P)
        y_TD = _sum_rows(got.rows[:, : y_RD.shape[1]], self._choices.slots_TK(self._sent_row))
        weight = _as_weights(got.rows, weight_R.dtype)
        weight_TK = weight[self._choices.slots_TK(self._sent_weight)]
        self._state.scratch.give_back(got)
        return y_TD, weight_TK

    def _load(
        self, x_D: torch.Tensor, index_N: torch.Tensor, weight_N: torch.Tensor, side: WireSide
    ) -> Scratch:
        """Fill wire rows [M, columns]: x_D[index] at their positions, the weights in the gaps."""
        if side is self._plan.source:
            row_N, weight_position_N = self._sent_row, self._sent_weight
        else:
            row_N, weight_position_N = self._received_row, self._received_weight
        # A gap row gets a copy of row 0 first: one gather is cheaper than one per peer.
        index_M = index_N.new_zeros(sum(side.wire_rows_P)).scatter_(0, row_N, index_N)
        columns = wire_columns(x_D.shape[1], x_D.element_size(), weight_N.element_size())
        wire = self._gather(x_D, index_M, columns)
        _as_weights(wire.rows, weight_N.dtype).scatter_(0, weight_position_N, weight_N)
        return wire

    def _gather(self, x_D: torch.Tensor, index_M: torch.Tensor, columns: int) -> Scratch:
        """Gather rows into scratch memory [M, columns]; columns beyond D are left as they are."""
        wire = self._state.scratch.take((index_M.numel(), columns), x_D.dtype, x_D.device)
        torch.index_select(x_D, 0, index_M, out=wire.rows[:, : x_D.shape[1]])
        return wire

    def _exchange(
        self,
        label: Label,
        wire: Scratch,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        padded: bool = False,
    ) -> Scratch:
        """Exchange rows; where padding is wanted, a last row of zeros stands behind them."""
        call = Call(self._state, label.name, timeout_s=label.timeout_s)
        spare = int(padded and self._plan.is_padded)
        total, pool = sum(received), self._state.scratch
        rows = wire.rows
        got = pool.take((total + spare, rows.shape[1]), rows.dtype, rows.device)
        exchange_rows(call, self._group, rows, sent, received, got.rows[:total])
        pool.give_back(wire)
        got.rows[total:].zero_()
        return got

    def _place(self, position: torch.Tensor, spare: int) -> torch.Tensor:
        """Order positions by local row; padding rows point at the spare row of zeros."""
        num_rows = self._plan.num_local_rows
        if self._plan.is_padded:
            placed = position.new_full((num_rows,), spare)
        else:
            placed = position.new_empty(num_rows)
        return placed.scatter_(0, self._local_R, position)


def local_routing(choices: SortedChoices, plan: RoutingPlan) -> Routing:
    """Route within this rank, which holds all experts."""
    return _LocalRouting(choices, plan)


def group_routing(
    choices: SortedChoices, plan: RoutingPlan, group: dist.ProcessGroup, state: GroupState
) -> Routing:
    """Route between the ranks of a group, over which the experts are spread."""
    return _GroupRouting(choices, plan, group, state)


def wire_columns(hidden_size: int, itemsize: int, weight_itemsize: int) -> int:
    """Columns of a wire row: the hidden size, rounded up so that whole weights fit into a row."""
    while hidden_size * itemsize % weight_itemsize:
        hidden_size += 1
    return hidden_size


def _as_weights(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return wire.view(-1).view(dtype)


def _sum_rows(y_MD: torch.Tensor, slot_TK: torch.Tensor) -> torch.Tensor:
    """Sum the rows of each token in the order of its choices (a bag of rows: EmbeddingBag)."""
    return embedding_bag(slot_TK, y_MD, mode="sum")


def _spread(
    shifts: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Give each running number of piece p its position: running number plus shift of p."""
    table = torch.tensor([*shifts, lengths], dtype=torch.int64, device=device)
    total = sum(lengths)
    spread = table[:-1].repeat_interleave(table[-1], dim=1, output_size=total)
    spread += torch.arange(total, device=device)
    return spread.unbind(0)
