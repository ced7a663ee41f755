"""MoE dispatch and combine: bring each token's row to its experts, and their results back.

Terms are DeepEP's. The backward of one is the other, and both exchanges of the backward run on
every rank, also on one without tokens or rows, whatever the experts did with an empty input: an
empty tensor ties each combine to its dispatch in the autograd graph.

    d = dispatch(x, topk_idx, topk_weights, num_experts=64, group=ep_group)
    y = experts(d.x, d.num_tokens_per_expert) * d.topk_weights[:, None]
    out = combine(y, d.handle)

Legend: T tokens, D hidden size, K choices per token, R received rows, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_dense
from comm_collectives.call import Call, Checks, Refusal
from comm_collectives.call.autograd import Back, attach
from comm_collectives.call.devices import refuse_captured
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import Handle, launch, turn
from comm_collectives.call.signature import Argument, Status
from comm_collectives.errors import CommTypeError, CommValueError
from comm_collectives.moe.deepep import DeepEpBackend
from comm_collectives.moe.handle import DispatchHandle
from comm_collectives.moe.options import DEFAULT_OPTIONS, MoeOptions
from comm_collectives.moe.request import FLOATS, DispatchSpec
from comm_collectives.moe.routes import Carried, Leg

_T = TypeVar("_T")
_Run = Callable[[Carried, Call | None], Carried]


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


@graph_break
def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    group: Group | None = None,
    expert_alignment: int = 1,
    options: MoeOptions = DEFAULT_OPTIONS,
) -> Dispatched:
    """Bring each token's row to the ranks that hold its experts.

    Collective over `group`: every rank must call, also one without tokens. Experts are split
    evenly: rank r of the group holds experts r * E / W up to (r + 1) * E / W. Counts are exchanged,
    then rows and weights together (twice on the hierarchical route); the backward reuses the
    counts.

    Args:
        x: [T, D] float16, bfloat16, float32 or float64; T may differ between ranks and be 0.
        topk_idx: [T, K] int64, expert numbers in 0..num_experts-1, or -1 for no expert: nothing
            travels for that choice and its weight gets zero gradient. K may be anything, also 0,
            and a token may choose an expert more than once.
        topk_weights: [T, K] floating; carried along, not applied.
        num_experts: E, a multiple of the group's size.
        group: None means that this rank holds all experts: nothing is exchanged, and no process
            group is needed.
        expert_alignment: pad each expert's rows to a multiple of this; an expert without rows stays
            empty.
        options: route, payload, limits; see `MoeOptions`.

    Raises:
        ValueError, TypeError: arguments that do not fit; between ranks these are RefusedError and
            RefusedTypeError, raised on every rank.
        MismatchError: ranks differ in hidden size, dtypes, num_experts or options.
        CommError: an exchange failed; see the subclasses.
    """
    spec = _spec(num_experts, expert_alignment, options, group)
    with turn(spec.state):
        return _dispatch(x, topk_idx, topk_weights, spec)


@graph_break
def dispatch_async(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    group: Group | None = None,
    expert_alignment: int = 1,
    options: MoeOptions = DEFAULT_OPTIONS,
) -> Handle[Dispatched]:
    """As `dispatch`, but return at once; the handle's `wait` returns the rows. Collective."""
    spec = _spec(num_experts, expert_alignment, options, group)

    def run() -> Dispatched:
        return _dispatch(x, topk_idx, topk_weights, spec)

    return _start(spec.state, "dispatch", run, x, topk_idx, topk_weights)


@graph_break
def combine(
    y: torch.Tensor, handle: DispatchHandle, *, timeout_s: float | None = None
) -> torch.Tensor:
    """Bring the experts' rows back and sum those of each token.

    Collective over the group of the dispatch, and so is its backward: gradients of the rows that
    this rank's experts made come that way, whoever's tokens they are. So every rank's loss has to
    use the result; `0 * out.sum()` is enough. If gradients are lost because one does not, the next
    call of the group raises a RefusedError on every rank.

    On the flat route a token's rows are summed in the order of its choices and the sum does not
    depend on the number of ranks: one rank and many give the same bits. On the others they are
    summed per rank (and node) first, by expert, then over these. Sums of 16 bits travel rounded.

    Args:
        y: [R, D'] rows in the order of `Dispatched.x`, weights already applied, same floating
            dtype on every rank; padding rows are ignored.
        handle: of the dispatch.
        timeout_s: limit in seconds; None is the limit given to dispatch.

    Returns:
        [T, D'] of y's dtype; zeros for a token without experts.

    Raises:
        ValueError, TypeError: `y` does not fit; on every rank where ranks compare this call.
        MismatchError: ranks differ in hidden size, dtype or the dispatch whose handle they give.
        CommError: the exchange failed; see the subclasses.
    """
    _check_handle(handle)
    with turn(handle.state):
        return _combine(y, handle, timeout_s)


@graph_break
def combine_async(
    y: torch.Tensor, handle: DispatchHandle, *, timeout_s: float | None = None
) -> Handle[torch.Tensor]:
    """As `combine`, but return at once; the handle's `wait` returns the sums. Collective."""
    _check_handle(handle)
    return _start(handle.state, "combine", lambda: _combine(y, handle, timeout_s), y)


def refuse_combine(handle: DispatchHandle, error: BaseException) -> Handle[torch.Tensor]:
    """Take part in the combine of a dispatch whose experts failed here: all ranks raise."""
    if handle.state is None:
        raise error

    def run() -> torch.Tensor:
        try:
            raise CommValueError(f"the experts raised {type(error).__name__}: {error}") from error
        except CommValueError as refused:
            return _combine(handle.anchor, handle, None, refused)

    return _start(handle.state, "combine", run)


def _start(
    state: GroupState | None, name: str, run: Callable[[], _T], *inputs: object
) -> Handle[_T]:
    """Run on the group's thread, or now if nothing is exchanged; inputs are checked later."""
    if state is None:
        return Handle.finished(name, run())
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return launch(state, name, run, inputs=tensors, async_op=True)  # type: ignore[no-any-return]


def _spec(
    num_experts: int, alignment: int, options: MoeOptions, group: Group | None
) -> DispatchSpec:
    given = None if group is None else group_state(group)
    return DispatchSpec(
        num_experts=num_experts,
        alignment=alignment,
        options=options,
        group=group,
        state=given if given is not None and given.size > 1 else None,
    )


def _dispatch(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, spec: DispatchSpec
) -> Dispatched:
    options, state = spec.options, spec.state
    refuse_captured("dispatch", "its host reads how many rows go to each expert")
    with Checks() as checks:
        check_dense(x, "x")
        layout = spec.layout(x.shape, x.dtype, x.device, topk_idx, topk_weights)
        if isinstance(options.backend, DeepEpBackend) and state is not None:
            options.backend.check(x, topk_idx, topk_weights, group=spec.group)
        choices, routing = spec.route(layout, topk_idx)
        reused = Argument("reused dispatch call", options.reuse.number if options.reuse else 0)
        checks.arguments = (*layout[:-1], reused)
    call = _begin(checks, state, "dispatch", getattr(options, "timeout_s", None))
    teaches = routing if options.reuse is None else None
    wants = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
    flags = Status.WANTS_GRAD if wants else 0
    leg = Leg("dispatch", options.payload, call, flags=flags, teaches=teaches)
    rows = routing.to_experts((x.detach(), topk_weights.detach()), leg)
    outputs = (*rows, x.new_zeros(0))
    if leg.flags & Status.WANTS_GRAD:
        payload = options.back_payload  # the options are not kept: they may hold a handle

        def back(grads: Carried, call: Call | None) -> Carried:
            return routing.to_tokens(grads[:2], Leg("dispatch_backward", payload, call))

        if call is None:
            outputs = _Local.apply(back, outputs, x, topk_weights)
        else:
            outputs = attach((x, topk_weights), outputs, call, Back(run=back))
    x_RD, weights_R, anchor = outputs
    handle = DispatchHandle(
        routing=routing,
        choices=choices,
        layout=layout,
        back_payload=options.back_payload,
        state=state,
        number=0 if call is None else call.number,
        num_rows=x_RD.shape[0],
        timeout_s=options.timeout_s,
        anchor=anchor,
    )
    return Dispatched(
        x=x_RD,
        topk_weights=weights_R,
        num_tokens_per_expert=routing.num_tokens_per_expert,
        handle=handle,
    )


def _combine(
    y: torch.Tensor, handle: DispatchHandle, timeout_s: float | None, refused: Refusal = None
) -> torch.Tensor:
    routing = handle.routing
    with Checks(refused) as checks:
        _check_rows(y, handle)
        checks.arguments = (
            Argument("dispatch call", handle.number),
            Argument("hidden size", y.shape[1]),
            Argument.of_dtype(y.dtype),
        )
    limit_s = handle.timeout_s if timeout_s is None else timeout_s
    call = _begin(checks, handle.state, "combine", limit_s)
    wants = torch.is_grad_enabled() and (y.requires_grad or handle.anchor.requires_grad)
    leg = Leg("combine", "full", call, flags=Status.WANTS_GRAD if wants else 0)
    outputs = routing.to_tokens((y.detach().contiguous(),), leg)
    if leg.flags & Status.WANTS_GRAD:
        payload = handle.back_payload

        def back(grads: Carried, call: Call | None) -> Carried:
            rows = routing.to_experts(grads, Leg("combine_backward", payload, call))
            return (*rows, rows[0].new_zeros(0))

        if call is None:
            outputs = _Local.apply(back, outputs, y, handle.anchor)
        else:  # gradients of these rows go on to the tokens, which are other ranks' too
            outputs = attach((y, handle.anchor), outputs, call, Back(run=back, others_lose=True))
    return outputs[0]


def _begin(
    checks: Checks, state: GroupState | None, name: str, timeout_s: float | None
) -> Call | None:
    """Begin a call, in which all ranks raise what one refuses; None where nothing is exchanged."""
    if state is not None:
        return checks.call(state, name, timeout_s)
    if checks.refused is not None:
        raise checks.refused
    return None


class _Local(torch.autograd.Function):
    """The node of a movement within one rank."""

    @staticmethod
    def forward(ctx: Any, back: _Run, outputs: Carried, *inputs: torch.Tensor) -> Carried:
        ctx.back = back
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.back(tuple(grad.contiguous() for grad in grads), None))


def _check_handle(handle: object) -> None:
    if not isinstance(handle, DispatchHandle):
        raise CommTypeError(f"handle is a {type(handle).__name__}; give that of the dispatch")


def _check_rows(y: torch.Tensor, handle: DispatchHandle) -> None:
    check_dense(y, "y")
    if y.dim() != 2 or y.shape[0] != handle.num_rows or y.shape[1] == 0:
        raise CommValueError(
            f"y has shape {tuple(y.shape)}; the dispatch gave {handle.num_rows} rows, "
            f"so pass [{handle.num_rows}, hidden size > 0], padding rows included"
        )
    if y.dtype not in FLOATS:
        raise CommTypeError(f"y is {y.dtype}; combine sums, so give one of {FLOATS}")
