"""Reduce gradients while the backward still makes the others.

Gradients are packed into buckets in the reverse order of the parameters, which is about the order
in which a backward makes them. A bucket whose gradients are all there is reduced on the group's own
thread, in the same order of buckets on every rank, while the backward goes on.

Invariant: after the block every parameter that had a gradient on any rank holds the reduced one on
every rank. A parameter without one on this rank (an expert without tokens) counts as zeros, so no
rank waits for another.

    reducer = overlap_gradients(model.parameters(), group=dp_group, op="avg")
    with reducer:
        loss.backward()
    optimizer.step()

Who sums gradients elsewhere, over several backwards, says where they lie and when one is complete:

    reducer = overlap_gradients(params, group=dp_group, op="sum", gradient_of=buffers.__getitem__)
    with reducer:
        ...                             # reducer.ready(param), once for a parameter
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import final

import torch
from torch.utils.hooks import RemovableHandle

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_dense, check_tensors
from comm_collectives.call.groups import Group, check_timeout, group_state
from comm_collectives.call.handles import Handle
from comm_collectives.call.signature import CallSite, current_site, use_site
from comm_collectives.collectives.arithmetic import NO_FACTOR
from comm_collectives.collectives.buckets import BUCKET_BYTES, fill_buckets, pack, unpack
from comm_collectives.collectives.reduction import all_reduce, check_op
from comm_collectives.errors import CommTypeError, CommValueError


@graph_break
def overlap_gradients(
    params: Iterable[torch.nn.Parameter],
    *,
    group: Group | None = None,
    op: str = "avg",
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float | None = None,
    gradient_of: Callable[[torch.nn.Parameter], torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> "GradientOverlap":
    """Return a block in which gradients are reduced over the ranks as the backward makes them.

    Not collective; entering and leaving the block is, on every rank of the group. Use a group of
    its own (`torch.distributed.new_group`) if the backward itself makes calls in the group, since
    ranks may reach them and a full bucket in different orders.

    Args:
        params: the parameters, in the same order on every rank. Those that need no gradient are
            left out.
        group: None is the default group.
        op: "avg" or "sum".
        bucket_bytes: the most that a bucket holds; a larger gradient has a bucket of its own.
        timeout_s: limit in seconds for each bucket; None is the group's own limit.
        gradient_of: where a parameter's gradient lies, in its shape, on every rank; `ready` then
            says that it is complete. None: in `grad`, complete after one backward.
        dtype: in which gradients travel and are reduced; None: that of the parameters, or of what
            `gradient_of` returns.

    Raises:
        ValueError: no parameter needs a gradient, one occurs twice, or an argument is out of range.
        TypeError: an item is no tensor, the op is not defined for a dtype, or `dtype` holds no such
            gradients.
    """
    group_state(group)  # a group of which this rank is no member is a mistake here and now
    check_timeout(timeout_s)
    if not isinstance(params, Iterable):
        raise CommTypeError(f"params is a {type(params).__name__}; give model.parameters()")
    params = list(params)
    check_tensors(params, are_used=False)
    chosen = [p for p in params if p.requires_grad]
    if not chosen:
        raise CommValueError("no parameter needs a gradient; give parameters with requires_grad")
    if len({id(p) for p in chosen}) < len(chosen):
        raise CommValueError("a parameter occurs twice; give each one once")
    if op not in NO_FACTOR:
        raise CommValueError(f"op={op!r} is unknown here; choose one of {', '.join(NO_FACTOR)}")
    travelling = {p: _as_it_travels(p, gradient_of, dtype) for p in chosen}
    for tensor in travelling.values():
        check_op(tensor.dtype, op)
    owner = {id(tensor): p for p, tensor in travelling.items()}
    parts = fill_buckets([travelling[p] for p in reversed(chosen)], bucket_bytes)
    buckets = [_Bucket([owner[id(t)] for t in part], gradient_of, part[0].dtype) for part in parts]

    def reduce(flat: torch.Tensor, site: CallSite) -> Handle[torch.Tensor]:
        with use_site(site), torch.no_grad():
            return all_reduce(flat, op=op, group=group, timeout_s=timeout_s, async_op=True)

    return GradientOverlap(buckets, reduce, observes=gradient_of is None)


def _as_it_travels(
    param: torch.nn.Parameter,
    gradient_of: Callable[[torch.nn.Parameter], torch.Tensor] | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """A tensor without memory, of the shape and dtype of what is sent for a parameter.

    Raises:
        ValueError, TypeError: what `gradient_of` returns, or `dtype`, holds no gradient of it.
    """
    grad = param if gradient_of is None else gradient_of(param)
    check_dense(grad, "what gradient_of returns", is_used=False)
    if grad.shape != param.shape:
        raise CommValueError(
            f"gradient_of returns shape {list(grad.shape)} for a parameter of {list(param.shape)}"
        )
    sent = dtype or grad.dtype
    if not isinstance(sent, torch.dtype) or _kind(sent) != _kind(grad.dtype):
        raise CommTypeError(
            f"dtype={dtype!r} holds no gradients of {grad.dtype}; give one that does"
        )
    return torch.empty_like(param, dtype=sent, device="meta")


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


@final
class _Bucket:
    """Gradients that travel together in one dtype, and how many of them are there."""

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        gradient_of: Callable[[torch.nn.Parameter], torch.Tensor] | None,
        dtype: torch.dtype,
    ) -> None:
        self.params = params
        self.ready: set[int] = set()
        self._gradient_of, self._dtype = gradient_of, dtype

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.params)

    def pack(self) -> torch.Tensor:
        """Gradients in one flat tensor; of `grad`, then for each whether there was one."""
        if self._gradient_of is not None:
            return pack([self._gradient_of(p).to(self._dtype) for p in self.params])
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        for grad in grads:
            check_dense(grad, "a gradient")
        there = torch.tensor([p.grad is not None for p in self.params])
        return pack([t.to(grads[0].device, self._dtype) for t in (*grads, there)])

    def unpack(self, flat: torch.Tensor) -> None:
        """Store what came back, except where no rank had a gradient."""
        if self._gradient_of is not None:
            for param, grad in zip(self.params, unpack(flat, self.params), strict=True):
                self._gradient_of(param).detach().copy_(grad)
            return
        packed, there = flat.tensor_split([-len(self.params)])
        grads = unpack(packed, self.params)
        for param, grad, was_there in zip(self.params, grads, there.tolist(), strict=True):
            if not was_there:
                continue
            if param.grad is None:
                param.grad = grad.to(param.dtype, copy=True)
            else:
                param.grad.detach().copy_(grad)


@final
class GradientOverlap(AbstractContextManager["GradientOverlap"]):
    """A block around a backward; may be entered once for every step."""

    def __init__(
        self,
        buckets: list[_Bucket],
        reduce: Callable[[torch.Tensor, CallSite], Handle[torch.Tensor]],
        *,
        observes: bool,
    ) -> None:
        self._buckets = buckets
        self._observes = observes
        self._reduce = reduce
        self._bucket_of = {id(p): bucket for bucket in buckets for p in bucket.params}
        self._hooks: list[RemovableHandle] = []
        self._handles: list[Handle[torch.Tensor]] = []
        self._num_started = 0
        self._site: CallSite | None = None

    @property
    def num_started(self) -> int:
        """How many buckets are on their way or done, in this block or the last one."""
        return self._num_started or len(self._handles)

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return len(self._buckets)

    def __enter__(self) -> "GradientOverlap":
        if self._site is not None:
            raise CommValueError("the block is already open; leave it before entering it again")
        self._site = current_site()
        self._handles, self._num_started = [], 0
        for bucket in self._buckets:
            bucket.ready.clear()
            for param in bucket.params if self._observes else ():
                hook = param.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        site, self._site = self._site, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if error is not None or site is None:
            return  # the peers get the error of a rank that does not come
        self._start(site, all_of_them=True)
        for bucket, handle in zip(self._buckets, self._handles, strict=True):
            bucket.unpack(handle.wait())
        self._num_started, self._handles = len(self._handles), []  # with the flat tensors

    def ready(self, param: torch.nn.Parameter) -> None:
        """Say that the gradient is complete and stays as it is; with `gradient_of`.

        Not collective. Those for which nobody says so are complete when the block is left.

        Raises:
            ValueError: no block is open, gradients are observed, the parameter is none of the given
                ones, or it is said a second time.
        """
        if self._observes or self._site is None:
            told = "observed as it comes" if self._observes else "not reduced outside the block"
            raise CommValueError(
                f"the gradient is {told}; call ready inside the block, of a reducer that was given "
                "gradient_of"
            )
        if id(param) not in self._bucket_of:
            raise CommValueError("the parameter is none of those that the reducer was given")
        self._on_gradient(param)

    def _on_gradient(self, param: torch.Tensor) -> None:
        bucket = self._bucket_of[id(param)]
        if id(param) in bucket.ready:
            raise CommValueError(
                "a second backward ran inside the block, after gradients of the first were sent; "
                "put only the last backward of a step into the block, or say by ready(param), once "
                "a block, when the gradient of several is complete"
            )
        bucket.ready.add(id(param))
        if self._site is not None:
            self._start(self._site)

    def _start(self, site: CallSite, *, all_of_them: bool = False) -> None:
        """Send the buckets that are next in order and full."""
        for bucket in self._buckets[len(self._handles) :]:
            if not (bucket.is_full or all_of_them):
                return
            self._handles.append(self._reduce(bucket.pack(), site))
