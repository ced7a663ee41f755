"""What a dispatch leaves behind for its combine, and for a later dispatch of the same choices."""

from dataclasses import dataclass, fields
from typing import get_args

import torch

from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import Argument
from comm_collectives.errors import CommValueError
from comm_collectives.moe.routes import Routing
from comm_collectives.moe.rows import Payload, SortedChoices
from comm_collectives.planning.wire import ROUTES, Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What all ranks of a dispatch have to agree on, under the names that users know."""

    num_experts: int
    hidden_size: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    route: Route
    ranks_per_node: int
    payload: Payload
    quantize_backward: bool
    backend: str

    def arguments(self) -> tuple[Argument, ...]:
        """Return the terms as they are compared between ranks."""
        return (
            Argument("num_experts", self.num_experts),
            Argument("hidden size", self.hidden_size),
            Argument.of_dtype(self.dtype),
            Argument.of_dtype(self.weight_dtype, "dtype of topk_weights"),
            Argument("route", ROUTES.index(self.route), self.route),
            Argument("ranks_per_node", self.ranks_per_node),
            Argument("payload", get_args(Payload).index(self.payload), self.payload),
            Argument("quantize_backward", int(self.quantize_backward)),
            Argument("backend", int(self.backend != "torch"), self.backend),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """What combine needs of a dispatch. Opaque; also for `MoeOptions.reuse`.

    `number` is that of the dispatch among the calls of its group, 0 where nothing is exchanged.
    """

    routing: Routing
    choices: SortedChoices
    contract: Contract
    state: GroupState | None
    number: int
    expert_alignment: int
    num_rows: int
    timeout_s: float | None
    anchor: torch.Tensor

    def check_reused(
        self,
        contract: Contract,
        *,
        state: GroupState | None,
        alignment: int,
        topk_idx_TK: torch.Tensor,
    ) -> None:
        """Check that a dispatch may take over the layout of this one.

        Raises:
            ValueError: they differ in something.
        """
        names = [field.name for field in fields(Contract)]
        pairs = [(name, getattr(self.contract, name), getattr(contract, name)) for name in names]
        pairs.append(("expert_alignment", self.expert_alignment, alignment))
        for name, then, now in pairs:
            if now != then:
                raise CommValueError(
                    f"options.reuse is of a dispatch with {name}={then}, but here it is {now}; "
                    "dispatch without reuse"
                )
        if state is not self.state:
            raise CommValueError(
                "options.reuse is of a dispatch over another group; dispatch without reuse"
            )
        if not self.choices.describes(topk_idx_TK):
            raise CommValueError(
                "options.reuse is of a dispatch with other choices than this topk_idx of shape "
                f"{tuple(topk_idx_TK.shape)}; dispatch without reuse"
            )
