"""MoE dispatch and combine: bring each token's row to its experts, and their results back.

Terms are DeepEP's. The backward of one is the other, and both exchanges of the backward run on
every rank, also on one without tokens or rows, whatever the experts did with an empty input: an
empty tensor ties each combine to its dispatch in the autograd graph.

    d = dispatch(x_TD, topk_idx_TK, topk_weights_TK, num_experts=64, group=ep_group)
    y_RD = experts(d.x, d.num_tokens_per_expert) * d.topk_weights[:, None]
    out_TD = combine(y_RD, d.handle)

Legend: T tokens, D hidden size, K choices per token, R received rows, E experts.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from comm_collectives.calls import Call
from comm_collectives.counts import Signature, exchange_counts
from comm_collectives.groups import GroupState, check_timeout, group_state
from comm_collectives.routing import (
    Label,
    Routing,
    SortedChoices,
    group_routing,
    local_routing,
    wire_columns,
)
from comm_collectives.routing_plan import plan_routing
from comm_collectives.wire import check_dense, dtype_code

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WANTS_GRAD = 1  # flag in the count exchange: this rank will run a backward


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHandle:
    """What combine needs of a dispatch. Opaque; belongs to one dispatch."""

    routing: Routing
    num_rows: int
    timeout_s: float | None
    anchor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows for the local experts, sorted by expert, then source rank, then the source's order.

    Attributes:
        x: [R, D] rows; padding rows are zero.
        topk_weights: [R] routing weight of each row, differentiable; 0 for padding.
        num_tokens_per_expert: rows of each local expert, padding included; sums to R.
        handle: for `combine`.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: tuple[int, ...]
    handle: DispatchHandle


def dispatch(
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    expert_alignment: int = 1,
    timeout_s: float | None = None,
) -> Dispatched:
    """Bring each token's row to the ranks that hold its experts.

    Collective over `group`: every rank must call, also one without tokens. Experts are split
    evenly: rank r of the group holds experts r * E / W up to (r + 1) * E / W. Two exchanges:
    counts, then rows and weights together; the backward reuses the counts and needs one.

    Args:
        x_TD: [T, D] float16, bfloat16, float32 or float64; T may differ between ranks and be 0.
        topk_idx_TK: [T, K] int64, expert numbers in 0..num_experts-1.
        topk_weights_TK: [T, K] floating; carried along, not applied.
        num_experts: E, a multiple of the group's size.
        group: None means that this rank holds all experts: nothing is exchanged, and no process
            group is needed.
        expert_alignment: pad each expert's rows to a multiple of this; an expert without rows stays
            empty.
        timeout_s: limit in seconds of each exchange, also in backward and for combine; None is the
            group's own limit.

    Raises:
        ValueError, TypeError: arguments that do not fit; the group's other ranks then raise
            PeerFailedError in the same call.
        MismatchError: ranks differ in hidden size or dtypes.
        CommError: an exchange failed; see the subclasses.
    """
    check_timeout(timeout_s)
    _check_numbers(num_experts, expert_alignment)
    args = (x_TD, topk_idx_TK, topk_weights_TK)
    resolved, state = (None, None) if group is None else group_state(group)
    if resolved is None or state is None or state.size == 1:
        choices = _sort_choices(*args, num_experts)
        rows = [choices.counts_E]
        plan = plan_routing(rows, rows, weights_per_row=1, alignment=expert_alignment)
        routing, seed = local_routing(choices, plan), None
    else:
        call = Call(state, "dispatch (counts)", timeout_s=timeout_s)
        routing, seed = _agree(args, num_experts, expert_alignment, resolved, call)
    x_RD, weights_R, anchor = _Dispatch.apply(x_TD, topk_weights_TK, seed, routing, timeout_s)
    handle = DispatchHandle(
        routing=routing,
        num_rows=x_RD.shape[0],
        timeout_s=timeout_s,
        anchor=anchor,
    )
    return Dispatched(
        x=x_RD,
        topk_weights=weights_R,
        num_tokens_per_expert=routing.num_tokens_per_expert,
        handle=handle,
    )


def combine(
    y_RD: torch.Tensor, handle: DispatchHandle, *, timeout_s: float | None = None
) -> torch.Tensor:
    """Bring the experts' rows back and sum those of each token, in the order of its choices.

    Collective over the group of the dispatch. The sum does not depend on the number of ranks: one
    rank and many give the same bits (float16 and bfloat16 are summed in float32 where torch's
    EmbeddingBag does).

    Args:
        y_RD: [R, D'] rows in the order of `Dispatched.x`, weights already applied, same floating
            dtype on every rank; padding rows are ignored.
        handle: of the dispatch.
        timeout_s: limit in seconds; None is the limit given to dispatch.

    Returns:
        [T, D'] of y's dtype.

    Raises:
        ValueError, TypeError: `y_RD` does not fit the handle.
        CommError: the exchange failed; see the subclasses.
    """
    check_timeout(timeout_s)
    check_dense(y_RD, "y_RD")
    if y_RD.dim() != 2 or y_RD.shape[0] != handle.num_rows:
        raise ValueError(
            f"y_RD has shape {tuple(y_RD.shape)}; the dispatch gave {handle.num_rows} rows, "
            f"so pass [{handle.num_rows}, hidden size], padding rows included"
        )
    if y_RD.dtype not in _FLOATS:
        raise TypeError(f"y_RD is {y_RD.dtype}; combine sums, so give one of {_FLOATS}")
    anchor = handle.anchor
    if handle.routing.exchanges and torch.is_grad_enabled() and not anchor.requires_grad:
        # Experts with parameters want a gradient on some ranks; a rank without rows joins in.
        anchor = torch.zeros(0, device=y_RD.device, requires_grad=True)
    limit_s = handle.timeout_s if timeout_s is None else timeout_s
    return cast(torch.Tensor, _Combine.apply(y_RD, anchor, handle.routing, limit_s))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        seed: torch.Tensor | None,
        routing: Routing,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.routing, ctx.timeout_s = routing, timeout_s
        x_RD, weights_R = routing.to_experts(
            x_TD.detach(), weights_TK.detach(), Label(name="dispatch", timeout_s=timeout_s)
        )
        return x_RD, weights_R, x_TD.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x_RD: torch.Tensor, grad_weights_R: torch.Tensor, _anchor: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_x_TD, grad_weights_TK = ctx.routing.to_tokens(
            grad_x_RD.contiguous(),
            grad_weights_R.contiguous(),
            Label(name="dispatch (backward)", timeout_s=ctx.timeout_s),
        )
        return grad_x_TD, grad_weights_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_RD: torch.Tensor,
        anchor: torch.Tensor,
        routing: Routing,
        timeout_s: float | None,
    ) -> torch.Tensor:
        ctx.routing, ctx.timeout_s = routing, timeout_s
        label = Label(name="combine", timeout_s=timeout_s)
        return routing.rows_to_tokens(y_RD.detach().contiguous(), label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        label = Label(name="combine (backward)", timeout_s=ctx.timeout_s)
        return ctx.routing.rows_to_experts(grad_TD, label), None, None, None


def _agree(
    args: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_experts: int,
    alignment: int,
    group: dist.ProcessGroup,
    call: Call,
) -> tuple[Routing, torch.Tensor | None]:
    """Exchange counts and plan; the tensor, if any, makes this rank take part in the backward."""
    state = call.state
    num_local = _experts_per_rank(num_experts, state)
    x_TD, _, weights_TK = args
    refused: Exception | None = None
    signature = Signature(words=(0, 0, 0), text="nothing usable")
    device = torch.device(state.control_type)
    counts_E: tuple[int, ...] = (0,) * num_experts
    try:
        choices = _sort_choices(*args, num_experts)
        counts_E = choices.counts_E
        signature = _signature(x_TD, weights_TK)
        if x_TD.device.type == state.transport_type(x_TD.device):
            device = x_TD.device
    except (TypeError, ValueError) as error:
        refused = error
    wants_grad = refused is None and (x_TD.requires_grad or weights_TK.requires_grad)
    counts = exchange_counts(
        call,
        group,
        [counts_E[at : at + num_local] for at in range(0, num_experts, num_local)],
        signature=signature,
        device=device,
        flags=_WANTS_GRAD if wants_grad and torch.is_grad_enabled() else 0,
        refused=refused,
    )
    columns = wire_columns(x_TD.shape[1], x_TD.element_size(), weights_TK.element_size())
    plan = plan_routing(
        [counts_E[at : at + num_local] for at in range(0, num_experts, num_local)],
        counts.rows,
        weights_per_row=columns * x_TD.element_size() // weights_TK.element_size(),
        alignment=alignment,
    )
    joins = bool(counts.flags & _WANTS_GRAD) and torch.is_grad_enabled()
    seed = torch.zeros(0, device=x_TD.device, requires_grad=True) if joins else None
    return group_routing(choices, plan, group, state), seed


def _signature(x_TD: torch.Tensor, weights_TK: torch.Tensor) -> Signature:
    hidden = x_TD.shape[1]
    return Signature(
        words=(hidden, dtype_code(x_TD.dtype), dtype_code(weights_TK.dtype)),
        text=f"rows of {hidden} x {x_TD.dtype} with {weights_TK.dtype} weights "
        "(elements, dtype number, dtype number)",
    )


def _sort_choices(
    x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> SortedChoices:
    _check_inputs(x_TD, topk_idx_TK, weights_TK)
    flat = topk_idx_TK.reshape(-1)
    try:
        counts = torch.bincount(flat, minlength=num_experts)
    except RuntimeError as error:  # bincount refuses negative numbers, which costs no pass of ours
        lowest = int(flat.min())
        if lowest >= 0:
            raise
        raise ValueError(
            f"topk_idx holds {lowest}; every choice must be an expert in 0..{num_experts - 1}"
        ) from error
    if counts.numel() > num_experts:
        raise ValueError(
            f"topk_idx holds {counts.numel() - 1} but num_experts={num_experts}; "
            f"every choice must be an expert in 0..{num_experts - 1}"
        )
    return SortedChoices(
        order_N=torch.argsort(flat, stable=True),
        num_choices=topk_idx_TK.shape[1],
        counts_E=tuple(counts.tolist()),
    )


def _check_inputs(x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
    check_dense(x_TD, "x")
    check_dense(topk_idx_TK, "topk_idx")
    check_dense(weights_TK, "topk_weights")
    if x_TD.dtype not in _FLOATS or weights_TK.dtype not in _FLOATS:
        raise TypeError(
            f"x is {x_TD.dtype} and topk_weights {weights_TK.dtype}; both must be one of {_FLOATS}"
        )
    if topk_idx_TK.dtype != torch.int64:
        raise TypeError(f"topk_idx is {topk_idx_TK.dtype}; convert to torch.int64")
    if x_TD.dim() != 2 or x_TD.shape[1] == 0:
        raise ValueError(f"x has shape {tuple(x_TD.shape)}; give [tokens, hidden size > 0]")
    shape = tuple(topk_idx_TK.shape)
    if len(shape) != 2 or shape[0] != x_TD.shape[0] or shape[1] == 0:
        raise ValueError(
            f"topk_idx has shape {shape}; with {x_TD.shape[0]} tokens in x give "
            f"[{x_TD.shape[0]}, choices per token > 0]"
        )
    if tuple(weights_TK.shape) != shape:
        raise ValueError(
            f"topk_weights has shape {tuple(weights_TK.shape)}, topk_idx {shape}; make them equal"
        )
    if not x_TD.device == topk_idx_TK.device == weights_TK.device:
        raise ValueError(
            f"x is on {x_TD.device}, topk_idx on {topk_idx_TK.device} and topk_weights on "
            f"{weights_TK.device}; move them to one device"
        )


def _check_numbers(num_experts: int, alignment: int) -> None:
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    if alignment < 1:
        raise ValueError(f"expert_alignment={alignment} must be at least 1")


def _experts_per_rank(num_experts: int, state: GroupState) -> int:
    if num_experts % state.size:
        raise ValueError(
            f"the group has {state.size} ranks but num_experts={num_experts}; "
            f"choose a number of ranks that divides {num_experts}"
        )
    return num_experts // state.size
