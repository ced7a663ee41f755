"""The arguments of one dispatch but for its rows: are they right, and which way do rows go.

Legend: T tokens, D hidden size, K choices per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from comm_collectives.base import check_dense
from comm_collectives.call.groups import Group, GroupState, check_integer
from comm_collectives.call.signature import Argument
from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.moe.deepep import DeepEpBackend
from comm_collectives.moe.options import MoeOptions
from comm_collectives.moe.routes import (
    LocalRouting,
    NodeRouting,
    RankRouting,
    Routing,
    counts_by_rank,
)
from comm_collectives.moe.rows import Payload, SortedChoices, sort_choices
from comm_collectives.planning.wire import ROUTES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSpec:
    """What a dispatch is given beside tensors; `state` is None where nothing is exchanged."""

    num_experts: int
    alignment: int
    options: MoeOptions
    group: Group | None
    state: GroupState | None

    def layout(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> tuple[Argument, ...]:
        """Check the arguments, for rows of that kind; return what the order of rows depends on.

        All but the last, the alignment, have to agree between ranks.

        Raises:
            ValueError, TypeError: an argument does not fit.
        """
        self._check_numbers()
        check_dense(topk_idx, "topk_idx")
        check_dense(topk_weights, "topk_weights")
        if dtype not in FLOATS or topk_weights.dtype not in FLOATS:
            raise CommTypeError(
                f"x is {dtype} and topk_weights {topk_weights.dtype}; both must be one of {FLOATS}"
            )
        if topk_idx.dtype != torch.int64:
            raise CommTypeError(f"topk_idx is {topk_idx.dtype}; convert to torch.int64")
        if not device == topk_idx.device == topk_weights.device:
            raise CommValueError(
                f"x is on {device}, topk_idx on {topk_idx.device} and topk_weights on "
                f"{topk_weights.device}; move them to one device"
            )
        if len(shape) != 2 or shape[1] == 0:
            raise CommValueError(f"x has shape {tuple(shape)}; give [tokens, hidden > 0]")
        chosen, tokens = tuple(topk_idx.shape), shape[0]
        if len(chosen) != 2 or chosen[0] != tokens:
            raise CommValueError(
                f"topk_idx has shape {chosen}; with {tokens} tokens in x give "
                f"[{tokens}, choices per token]"
            )
        if tuple(topk_weights.shape) != chosen:
            raise CommValueError(
                f"topk_weights has shape {tuple(topk_weights.shape)}, topk_idx {chosen}; "
                "make them equal"
            )
        options = self.options
        backend = "torch" if options.backend == "torch" else "deepep"
        return (
            Argument("num_experts", int(self.num_experts)),
            Argument("hidden size", shape[1]),
            Argument.of_dtype(dtype),
            Argument.of_dtype(topk_weights.dtype, "dtype of topk_weights"),
            Argument("route", ROUTES.index(options.route), options.route),
            Argument("ranks_per_node", int(options.ranks_per_node or 0)),
            Argument("payload", get_args(Payload).index(options.payload), options.payload),
            Argument("quantize_backward", int(options.quantize_backward)),
            Argument("backend", int(backend != "torch"), backend),
            Argument("expert_alignment", int(self.alignment)),
        )

    def route(
        self, layout: Sequence[Argument], topk_idx: torch.Tensor
    ) -> tuple[SortedChoices, Routing]:
        """Sort the choices by expert, and return the way of their rows, or that of `reuse`.

        Raises:
            ValueError: a choice is no expert, or `reuse` is of another dispatch.
        """
        options, state, alignment = self.options, self.state, int(self.alignment)
        if options.reuse is not None:
            options.reuse.check_reused(layout, state, topk_idx)
            return options.reuse.choices, options.reuse.routing
        choices = sort_choices(topk_idx, self.num_experts)
        if state is None:
            return choices, LocalRouting(choices, alignment)
        if isinstance(options.backend, DeepEpBackend):
            told = counts_by_rank(choices, state)
            return choices, options.backend.routing(topk_idx, told=told, alignment=alignment)
        if options.ranks_per_node is not None:
            return choices, NodeRouting(choices, state, alignment, int(options.ranks_per_node))
        shares_rows = options.route == "dedup"
        return choices, RankRouting(choices, state, alignment, shares_rows=shares_rows)

    def _check_numbers(self) -> None:
        if not isinstance(self.options, MoeOptions):
            raise CommTypeError(f"options is a {type(self.options).__name__}; give MoeOptions(...)")
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
        per_node = self.options.ranks_per_node
        if per_node is not None and self.state.size % per_node:
            raise CommValueError(
                f"the group has {self.state.size} ranks but ranks_per_node={per_node}; "
                f"choose a divisor of {self.state.size}"
            )
