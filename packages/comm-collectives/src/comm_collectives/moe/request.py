"""The arguments of one dispatch but for its rows: are they right, and which way do rows go.

    spec = DispatchSpec(num_experts=8, alignment=1, options=options, group=group, state=state)
    contract = spec.contract(x.shape, x.dtype, x.device, topk_idx, topk_weights)
    choices, routing = spec.route(contract, topk_idx)

Legend: T tokens, D hidden size, K choices per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.base import check_dense
from comm_collectives.call.groups import Group, GroupState, check_integer
from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.moe.deepep import DeepEpBackend
from comm_collectives.moe.handle import Contract
from comm_collectives.moe.options import MoeOptions
from comm_collectives.moe.routes import (
    DedupRouting,
    FlatRouting,
    LocalRouting,
    NodeRouting,
    Routing,
    check_nodes,
    counts_by_rank,
)
from comm_collectives.moe.rows import SortedChoices, sort_choices

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSpec:
    """What a dispatch is given beside tensors; `state` is None where nothing is exchanged."""

    num_experts: int
    alignment: int
    options: MoeOptions
    group: Group | None
    state: GroupState | None

    def contract(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> Contract:
        """Check the arguments, for rows of that kind; return what has to agree.

        Raises:
            ValueError, TypeError: an argument does not fit.
        """
        self._check_numbers()
        _check_tensors(shape, dtype, device, topk_idx, topk_weights)
        options = self.options
        return Contract(
            num_experts=int(self.num_experts),
            hidden_size=shape[1],
            dtype=dtype,
            weight_dtype=topk_weights.dtype,
            route=options.route,
            ranks_per_node=int(options.ranks_per_node or 0),
            payload=options.payload,
            quantize_backward=options.quantize_backward,
            backend="deepep" if isinstance(options.backend, DeepEpBackend) else "torch",
        )

    def route(self, contract: Contract, topk_idx: torch.Tensor) -> tuple[SortedChoices, Routing]:
        """Sort the choices by expert, and return the way of their rows, or that of `reuse`.

        Raises:
            ValueError: a choice is no expert, or `reuse` is of another dispatch.
        """
        options, state, alignment = self.options, self.state, self.alignment
        reuse, backend = options.reuse, options.backend
        if reuse is not None:
            reuse.check_reused(contract, state=state, alignment=alignment, topk_idx_TK=topk_idx)
            return reuse.choices, reuse.routing
        choices = sort_choices(topk_idx, self.num_experts)
        if state is None:
            return choices, LocalRouting(choices, alignment)
        if isinstance(backend, DeepEpBackend):
            told = counts_by_rank(choices, state)
            return choices, backend.routing(topk_idx, told=told, alignment=alignment)
        if options.route == "flat":
            return choices, FlatRouting(choices, state, alignment)
        if options.route == "dedup":
            return choices, DedupRouting(choices, state, alignment)
        return choices, NodeRouting(choices, state, alignment, contract.ranks_per_node)

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


def _check_tensors(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
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
