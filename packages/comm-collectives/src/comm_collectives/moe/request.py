"""The arguments of one dispatch: are they right, do the other ranks agree, which way do rows go.

A rank whose arguments are wrong still meets the others, so that all of them raise.

    request = Request(x=x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=8, ...)
    agreed = request.agree(state)
    agreed.routing.to_experts(x, topk_weights, leg)

Legend: T tokens, D hidden size, K choices per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from comm_collectives.base import check_dense
from comm_collectives.call import Call, exchange_counts
from comm_collectives.call.autograd import wants_grad
from comm_collectives.call.groups import Group, GroupState, check_integer
from comm_collectives.call.signature import Argument, Status
from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.moe.deepep import DeepEpBackend
from comm_collectives.moe.handle import Contract
from comm_collectives.moe.options import MoeOptions
from comm_collectives.moe.routes import (
    DedupRequest,
    FlatRequest,
    NodeRequest,
    RouteRequest,
    Routing,
    check_nodes,
    counts_by_rank,
    local_routing,
)
from comm_collectives.moe.rows import SortedChoices, plan_placing, sort_choices

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedRoute:
    """What the ranks came to: the way of the rows, and flags of all ranks or-ed.

    `call` is the call of the dispatch, None where nothing is exchanged.
    """

    contract: Contract
    choices: SortedChoices
    routing: Routing
    flags: int
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `dispatch`; `state` is None where nothing is exchanged."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int
    alignment: int
    options: MoeOptions
    group: Group | None
    state: GroupState | None

    def agree_alone(self) -> AgreedRoute:
        """Check, and route within this rank, which holds all experts.

        Raises:
            ValueError, TypeError: an argument does not fit.
        """
        contract, choices = self._checked()
        reuse = self.options.reuse
        if reuse is not None:
            routing = reuse.routing
        else:
            placing = plan_placing([choices.counts_E], alignment=self.alignment)
            routing = local_routing(choices, placing)
        return AgreedRoute(contract=contract, choices=choices, routing=routing, flags=self._flags)

    def agree(self, state: GroupState) -> AgreedRoute:
        """Check, tell the other ranks, and hear from them. Collective.

        Raises:
            RefusedError, RefusedTypeError, MismatchError: on every rank; see `dispatch`.
        """
        reuse = self.options.reuse
        try:
            contract, choices = self._checked()
        except (TypeError, ValueError) as error:
            call = self._call(state, ())
            if reuse is None:
                exchange_counts(call, [()] * state.size, refused=error)
            flags_of_all(call, 0, error)
            raise  # not reached: both raise what was refused
        call = self._call(state, contract.arguments())
        if reuse is not None:
            routing, flags = reuse.routing, flags_of_all(call, self._flags)
        else:
            route_request = self._route_request(choices, state)
            counts = exchange_counts(call, route_request.counts, flags=self._flags)
            routing = route_request.routing(counts.rows, alignment=self.alignment)
            flags = counts.flags
        return AgreedRoute(
            contract=contract, choices=choices, routing=routing, flags=flags, call=call
        )

    @property
    def _flags(self) -> int:
        return Status.WANTS_GRAD if wants_grad(self.x, self.topk_weights) else 0

    def _call(self, state: GroupState, arguments: tuple[Argument, ...]) -> Call:
        reuses = Argument("reuse given", int(self.options.reuse is not None))
        return Call(
            state, "dispatch", arguments=(*arguments, reuses), timeout_s=self.options.timeout_s
        )

    def _checked(self) -> tuple[Contract, SortedChoices]:
        """Check all arguments; return what has to agree, and the choices sorted by expert."""
        self._check_numbers()
        self._check_tensors()
        self._check_shapes()
        options = self.options
        if isinstance(options.backend, DeepEpBackend) and self.state is not None:
            options.backend.check(self.x, self.topk_idx, self.topk_weights, group=self.group)
        contract = Contract(
            num_experts=int(self.num_experts),
            hidden_size=self.x.shape[1],
            dtype=self.x.dtype,
            weight_dtype=self.topk_weights.dtype,
            route=options.route,
            ranks_per_node=int(options.ranks_per_node or 0),
            payload=options.payload,
            quantize_backward=options.quantize_backward,
            backend="deepep" if isinstance(options.backend, DeepEpBackend) else "torch",
        )
        if options.reuse is None:
            return contract, sort_choices(self.topk_idx, self.num_experts)
        options.reuse.check_reused(
            contract, state=self.state, alignment=self.alignment, topk_idx_TK=self.topk_idx
        )
        return contract, options.reuse.choices

    def _route_request(self, choices: SortedChoices, state: GroupState) -> RouteRequest:
        """Return what the choices ask for on the route of the options."""
        backend = self.options.backend
        if isinstance(backend, DeepEpBackend):
            return DeepEpRequest(choices, state, backend, self.topk_idx)
        if self.options.route == "flat":
            return FlatRequest(choices, state)
        if self.options.route == "dedup":
            return DedupRequest(choices, state)
        return NodeRequest(choices, state, self.options.ranks_per_node or 1)

    def _check_numbers(self) -> None:
        check_integer(self.num_experts, "num_experts")
        check_integer(self.alignment, "expert_alignment")
        if self.num_experts < 1:
            raise CommValueError(f"num_experts={self.num_experts} must be at least 1")
        if self.alignment < 1:
            raise CommValueError(f"expert_alignment={self.alignment} must be at least 1")
        if self.state is None:
            return
        if self.num_experts % self.state.size:
            raise CommValueError(
                f"the group has {self.state.size} ranks but num_experts={self.num_experts}; "
                f"choose a number of ranks that divides {self.num_experts}"
            )
        if self.options.ranks_per_node is not None:
            check_nodes(self.options.ranks_per_node, self.state.size)

    def _check_tensors(self) -> None:
        x, topk_idx, topk_weights = self.x, self.topk_idx, self.topk_weights
        check_dense(x, "x")
        check_dense(topk_idx, "topk_idx")
        check_dense(topk_weights, "topk_weights")
        if x.dtype not in FLOATS or topk_weights.dtype not in FLOATS:
            raise CommTypeError(
                f"x is {x.dtype} and topk_weights {topk_weights.dtype}; both must be one of "
                f"{FLOATS}"
            )
        if topk_idx.dtype != torch.int64:
            raise CommTypeError(f"topk_idx is {topk_idx.dtype}; convert to torch.int64")
        if not x.device == topk_idx.device == topk_weights.device:
            raise CommValueError(
                f"x is on {x.device}, topk_idx on {topk_idx.device} and topk_weights on "
                f"{topk_weights.device}; move them to one device"
            )

    def _check_shapes(self) -> None:
        if self.x.dim() != 2 or self.x.shape[1] == 0:
            raise CommValueError(f"x has shape {tuple(self.x.shape)}; give [tokens, hidden > 0]")
        shape, tokens = tuple(self.topk_idx.shape), self.x.shape[0]
        if len(shape) != 2 or shape[0] != tokens:
            raise CommValueError(
                f"topk_idx has shape {shape}; with {tokens} tokens in x give "
                f"[{tokens}, choices per token]"
            )
        if tuple(self.topk_weights.shape) != shape:
            raise CommValueError(
                f"topk_weights has shape {tuple(self.topk_weights.shape)}, topk_idx {shape}; "
                "make them equal"
            )


@final
class DeepEpRequest(RouteRequest):
    """Each rank is told the choices for each of its experts; DeepEP itself finds out the rest."""

    def __init__(
        self,
        choices: SortedChoices,
        state: GroupState,
        backend: DeepEpBackend,
        topk_idx_TK: torch.Tensor,
    ) -> None:
        self._backend, self._topk_idx_TK = backend, topk_idx_TK
        self._num_experts = len(choices.counts_E)
        self.counts = counts_by_rank(choices, state)

    def routing(self, received: Sequence[Sequence[int]], *, alignment: int) -> Routing:
        """Return the routing, given what each rank told this one."""
        return self._backend.routing(
            self._topk_idx_TK,
            num_experts=self._num_experts,
            counts_L=[sum(column) for column in zip(*received, strict=True)],
            alignment=alignment,
        )


def flags_of_all(call: Call, flags: int, refused: ValueError | TypeError | None = None) -> int:
    """Return the flags of all ranks or-ed, in a call that exchanges no counts. Collective.

    Where the ranks do not meet for it, nobody knows whether another rank wants a gradient, so every
    rank that records gradients takes part in the backward.

    Raises:
        RefusedError, RefusedTypeError, MismatchError: see `Call.meet`.
    """
    if call.is_due():
        return call.meet(status=flags, refused=refused).flags
    call.go_alone(refused)
    return Status.WANTS_GRAD if torch.is_grad_enabled() else 0
