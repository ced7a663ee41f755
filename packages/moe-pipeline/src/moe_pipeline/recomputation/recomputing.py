"""Activation recompute that never routes a token twice.

A forward that runs again to get its activations back may find other logits (another kernel, other
rounding), send a token to another expert, and give gradients of a function that nobody computed;
it also would count tokens twice. So what a layer decides is data on a tape that belongs to the
first forward and lives outside of what is recomputed: the second forward reads it.

Invariant: within one `recompute`, what a layer `recorded` in the first forward is the same object
in every later run of the function, however often it runs (`retain_graph`, early stop, nesting).

    y = recompute(block, x)              # instead of y = block(x)

    class Noisy(nn.Module):              # how a module takes part
        def forward(self, x):
            return x * recorded(self, lambda: torch.rand(()))

A tape lives as long as the graph of its first forward. It is found through a context variable, so
threads do not see each other's, and a backward on autograd's threads finds its own.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import TracebackType
from typing import Any, TypeVar, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comm_collectives.moe import DispatchHandle
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.routing_plan import RoutingPlan
from moe_pipeline.weight_grad import current_split

_Value = TypeVar("_Value")
_SAME_CALLS = (
    "the function has to make the same calls each time (and where it takes gradients itself, do "
    "not switch checkpoint's early stop off)"
)


def recompute(function: Callable[..., _Value], *args: Any, **kwargs: Any) -> _Value:
    """Return `function(*args, **kwargs)`; backward recomputes its activations.

    `torch.utils.checkpoint.checkpoint` in its form without reentrant autograd (so parameters get
    their gradients also if no input needs one, and frozen ones get none), together with a tape for
    `recorded`. Random numbers of torch's generators are the same in every run.

    Collective if the function is; then every rank has to recompute the same functions, and the
    backward repeats the exchanges of rows, but none of those that decide on routing.

    Args:
        function: makes the same calls in the same order each time that it runs with these
            arguments; may call `recompute` itself.
        args: of the function; tensors among them are kept for the backward.
        kwargs: of the function, likewise.
    """
    if not callable(function):
        raise MoETypeError(f"recompute needs a function, got a {type(function).__name__}")
    first, again = recompute_contexts()
    runs = iter([first])

    # The tape is put in force here and not by checkpoint, which in torch 2.11 leaves a
    # context open when the first forward raises. Also, it would take some kwargs for its own, and
    # only of tensors among its args it keeps version and random state of the device.
    names = tuple(name for name, value in kwargs.items() if isinstance(value, Tensor))
    tensors = [kwargs.pop(name) for name in names]
    num_args = len(args)

    def run(*given: Any) -> _Value:
        with next(runs, again):
            named = dict(zip(names, given[num_args:], strict=True))
            return function(*given[:num_args], **kwargs, **named)

    return checkpoint(run, *args, *tensors, use_reentrant=False)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make the `context_fn` of a `checkpoint(..., use_reentrant=False)` that others call.

    For code that wraps layers by itself: give it this function, so that its first forward records
    and its second replays. Without it a checkpoint routes tokens twice.
    """
    current = _CURRENT.get()
    # A tape within a tape: what surrounds this call may itself be recomputed, and then the first
    # forward of here is a replay.
    tape = _Tape() if current is None else current.inner_tape()
    replays = current is not None and current.replays
    # The second forward has to save what the first one saved: split in both, or in neither.
    return _Run(tape, replays=replays), _Run(tape, replays=True, split=current_split())


def is_replaying() -> bool:
    """Whether this is a recompute: the first forward has counted, drawn and decided already."""
    current = _CURRENT.get()
    return current is not None and current.replays


def recorded(owner: nn.Module, make: Callable[[], _Value]) -> _Value:
    """Return what `make` returns; in a recompute, the object that it returned the first time.

    Calls of one owner are matched in order. Outside of `recompute` it is `make()`.

    Args:
        owner: the module that asks.
        make: not called in a recompute. May communicate: each rank's first forward does.

    Raises:
        ValueError: the result holds a tensor that requires grad: its graph would hold the tape that
            holds it. Detach it.
        RuntimeError: the owner asks more often than in the first forward.
    """
    current = _CURRENT.get()
    if current is not None and current.replays:
        return cast(_Value, current.take(owner))
    value = make()
    _keep(owner, value)
    return value


def replayed_plan(owner: nn.Module) -> RoutingPlan | None:
    """Return the plan that this layer kept at this place of the first forward; None if this is it.

    Who gets one routes by it: the router takes its `topk_idx_TK` and `logits_TE`, the losses take
    `load_E` and `num_parts`, and the dispatch takes `handle` as `MoeOptions.reuse`; no count
    advances. A call that returns None is to be followed by one of `keep_plan`.
    """
    current = _CURRENT.get()
    if current is None or not current.replays:
        return None
    return cast(RoutingPlan, current.take(owner))


def keep_plan(owner: nn.Module, plan: RoutingPlan) -> None:
    """Keep a plan for `replayed_plan`, its handle without its graph.

    Outside a tape, and in a recompute, which has a plan, do nothing.
    """
    current = _CURRENT.get()
    if current is None or current.replays:
        return
    if plan.handle is not None:
        plan = replace(plan, handle=_without_graph(plan.handle))
    _keep(owner, plan)


@final
@dataclass(slots=True, eq=False)
class _Tape:
    """What one first forward decided: by owner, in order; and the tapes of calls within."""

    values: WeakKeyDictionary[nn.Module, list[object]] = field(default_factory=WeakKeyDictionary)
    inner: "list[_Tape]" = field(default_factory=list)


@final
class _Pass:
    """One run of the function over its tape; a recompute starts again at the beginning."""

    __slots__ = ("_num_inner", "_num_taken", "_split", "replays", "run", "surrounding", "tape")

    def __init__(self, run: "_Run", surrounding: "_Pass | None") -> None:
        self.run, self.surrounding = run, surrounding
        self.tape, self.replays = run.tape, run.replays
        self._num_taken: dict[int, int] = {}
        self._num_inner = 0
        self._split = None if run.split is None else run.split()

    def begin(self) -> None:
        """Put in force what the first forward was under."""
        if self._split is not None:
            self._split.__enter__()

    def end(self) -> None:
        """Put it out of force."""
        if self._split is not None:
            self._split.__exit__(None, None, None)

    def take(self, owner: nn.Module) -> object:
        index = self._num_taken.get(id(owner), 0)
        self._num_taken[id(owner)] = index + 1
        values = self.tape.values.get(owner, [])
        if index >= len(values):
            raise RuntimeError(
                f"recompute: {type(owner).__name__} asks for recorded value {index + 1}, but in "
                f"the first forward there were {len(values)}; {_SAME_CALLS}"
            )
        return values[index]

    def inner_tape(self) -> _Tape:
        if not self.replays:
            self.tape.inner.append(_Tape())
            return self.tape.inner[-1]
        index, inner = self._num_inner, self.tape.inner
        self._num_inner += 1
        if index >= len(inner):
            raise RuntimeError(
                f"recompute: call {index + 1} of recompute within another, but in the first "
                f"forward there were {len(inner)}; {_SAME_CALLS}"
            )
        return inner[index]


_CURRENT: ContextVar[_Pass | None] = ContextVar("moe_pipeline.recompute", default=None)


@final
class _Run(AbstractContextManager[None]):
    """Puts a tape in force; may be entered again, by any thread: it holds nothing of a pass."""

    def __init__(
        self,
        tape: _Tape,
        *,
        replays: bool,
        split: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.tape, self.replays, self.split = tape, replays, split

    def __enter__(self) -> None:
        current = _Pass(self, _CURRENT.get())
        current.begin()
        _CURRENT.set(current)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What was entered within and left open by an error ends too, and may end once more later.
        current = _CURRENT.get()
        ended = []
        while current is not None and current.run is not self:
            ended.append(current)
            current = current.surrounding
        if current is not None:
            for each in (*ended, current):
                each.end()
            _CURRENT.set(current.surrounding)


def _keep(owner: nn.Module, value: object) -> None:
    current = _CURRENT.get()
    if current is None:
        return
    for tensor in _tensors_in(value):
        if tensor.requires_grad:
            raise MoEValueError(
                f"{type(owner).__name__} records a tensor of shape {tuple(tensor.shape)} that "
                "requires grad, so that graph and tape would hold each other; detach it"
            )
    current.tape.values.setdefault(owner, []).append(value)


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors of a value that is made of tensors, tuples, lists, dicts and plans."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, DispatchHandle):
        yield value.anchor
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_in([getattr(value, each.name) for each in fields(value)])


def _without_graph(handle: DispatchHandle) -> DispatchHandle:
    """Return a handle that is only good for reuse: its anchor is no part of a graph.

    A tape with the anchor would be in a cycle through autograd's nodes, which Python's garbage
    collector cannot see.
    """
    return replace(handle, anchor=torch.zeros_like(handle.anchor, requires_grad=False))
