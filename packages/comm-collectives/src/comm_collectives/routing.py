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
        token_N = self._choices.token_N
        wire = _load(x_TD, token_N, self._sent_row, weight_N, self._sent_weight, source)
        wire = self._exchange(label, wire, source.wire_rows_P, expert.wire_rows_P, padded=True)
        x_RD = wire[:, : x_TD.shape[1]].index_select(
            0, self._place(self._received_row, wire.shape[0] - 1)
        )
        weight = _as_weights(wire, weight_TK.dtype)
        spare = (wire.shape[0] - 1) * (weight.numel() // max(1, wire.shape[0]))
        return x_RD, weight.index_select(0, self._place(self._received_weight, spare))

    def rows_to_experts(self, x_TD: torch.Tensor, label: Label) -> torch.Tensor:
        source, expert = self._plan.source, self._plan.expert
        wire = x_TD.index_select(0, self._choices.token_N)
        wire = self._exchange(label, wire, source.rows_P, expert.rows_P, padded=True)
        running = torch.arange(expert.num_rows, device=wire.device)
        return wire.index_select(0, self._place(running, wire.shape[0] - 1))

    def rows_to_tokens(self, y_RD: torch.Tensor, label: Label) -> torch.Tensor:
        source, expert = self._plan.source, self._plan.expert
        wire = y_RD.index_select(0, self._local_R)
        wire = self._exchange(label, wire, expert.rows_P, source.rows_P)
        running = torch.arange(source.num_rows, device=wire.device)
        return _sum_rows(wire, self._choices.slots_TK(running))

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, label: Label
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, expert = self._plan.source, self._plan.expert
        weight_N = weight_R.index_select(0, self._local_R)
        wire = _load(
            y_RD, self._local_R, self._received_row, weight_N, self._received_weight, expert
        )
        wire = self._exchange(label, wire, expert.wire_rows_P, source.wire_rows_P)
        y_TD = _sum_rows(wire[:, : y_RD.shape[1]], self._choices.slots_TK(self._sent_row))
        weight = _as_weights(wire, weight_R.dtype)
        return y_TD, weight[self._choices.slots_TK(self._sent_weight)]

    def _exchange(
        self,
        label: Label,
        wire: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        padded: bool = False,
    ) -> torch.Tensor:
        """Exchange rows; where padding is wanted, a last row of zeros stands behind them."""
        call = Call(self._state, label.name, timeout_s=label.timeout_s)
        spare = int(padded and self._plan.is_padded)
        result = exchange_rows(call, self._group, wire, sent, received, spare_rows=spare)
        if spare:
            result[-1].zero_()
        return result

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


def _load(
    x_D: torch.Tensor,
    index_N: torch.Tensor,
    row_N: torch.Tensor,
    weight_N: torch.Tensor,
    weight_position_N: torch.Tensor,
    side: WireSide,
) -> torch.Tensor:
    """Fill a wire matrix [M, columns]: rows x_D[index] at their positions, weights in the gaps."""
    num_wire = sum(side.wire_rows_P)
    # A gap row gets a copy of row 0 first: one gather is cheaper than one per peer.
    source_M = index_N.new_zeros(num_wire).scatter_(0, row_N, index_N)
    hidden = x_D.shape[1]
    columns = wire_columns(hidden, x_D.element_size(), weight_N.element_size())
    if columns == hidden:
        wire = x_D.index_select(0, source_M)
    else:
        wire = x_D.new_zeros((num_wire, columns))
        wire[:, :hidden] = x_D.index_select(0, source_M)
    _as_weights(wire, weight_N.dtype).scatter_(0, weight_position_N, weight_N)
    return wire


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
