"""Backward passes of this rank that ran nodes of ours: did they end well, what did they leave out.

Torch calls what is queued with a pass when the pass ends well, and drops it uncalled when the pass
ends in an exception, before that reaches the program. A pass that fails before it comes to a node
of ours has nothing queued; what runs passes is wrapped, and tells the nodes above where it began.

Invariant: a graph of which a pass ran a part counts as touched, and after a pass that failed
everything owed on this rank counts as failed. Neither gets zeros; see `PendingBackwards`.

    note_node(ctx, origin)            # first thing in the backward of every node
    ctx.when_pass_fails = tell        # called when a pass fails that might have come to the node
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from weakref import WeakSet, WeakValueDictionary

from comm_collectives._torch_private import (
    at_end_of_backward,
    backward_pass_id,
    watch_failed_backwards,
)
from comm_collectives.call import Call
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import CallSite

_STATES: WeakSet[GroupState] = WeakSet()  # of the groups that ever owed a backward
_ORDER: Iterator[int] = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The forward call of a backward; `order` is its place among all such calls of the process."""

    state: GroupState
    name: str
    number: int
    site: CallSite
    timeout_s: float | None
    order: int = field(default_factory=lambda: next(_ORDER))

    @classmethod
    def of(cls, call: Call) -> "Origin":
        """Remember a call for its backward."""
        number, site, timeout_s = call.number, call.site, call.timeout_s
        return cls(state=call.state, name=call.name, number=number, site=site, timeout_s=timeout_s)

    def owe(self, serve: Callable[[Any], None]) -> None:
        """Note that this rank owes the backward; `serve` takes part in it with zeros."""
        _STATES.add(self.state)
        watch_failed_backwards(tell_of_failure)
        self.state.pending.add(self.number, serve, order=self.order)

    def fail(self) -> None:
        """Note that a pass has failed that might have come to the backward."""
        for state in _states_of(self.state.global_rank):
            state.pending.fail()


@final
class _Pass:
    """One backward pass and the nodes of ours that it ran, which have an `origin`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_ended = False
        self.nodes: list[Any] = []

    def __call__(self) -> None:
        """Note what the pass, which ended well, left out."""
        self._has_ended = True
        last = max(node.origin.order for node in self.nodes)
        if any(state.pending.lives_before(last) for state in _states_of(self._rank)):
            for node in _left_out(self.nodes):
                node.origin.state.pending.touch(node.origin.number)
        self.nodes = []

    def __del__(self) -> None:
        if not self._has_ended:
            for state in _states_of(self._rank):
                state.pending.fail()


_PASSES: WeakValueDictionary[int, _Pass] = WeakValueDictionary()  # torch holds those that run


def note_node(node: Any, origin: Origin) -> None:
    """Note that a node runs in the backward pass of this thread, before anything can fail.

    Nobody but torch may hold the pass, not even the frames in an exception's traceback.
    """
    number = backward_pass_id()
    if number not in _PASSES:
        begun = _PASSES[number] = _Pass(origin.state.global_rank)
        at_end_of_backward(begun)
        del begun
    _PASSES[number].nodes.append(node)


def tell_of_failure(outputs: Sequence[Any]) -> None:
    """Tell the nodes above that the pass from these tensors, or edges of a graph, has failed."""
    todo = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in outputs]
    seen: set[Any] = {None}
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        getattr(node, "when_pass_fails", int)()
        todo += [above for above, _ in node.next_functions]


def _states_of(rank: int) -> list[GroupState]:
    # Simulated ranks share a process.
    return [state for state in list(_STATES) if state.global_rank == rank]


def _left_out(ran: Sequence[Any]) -> Iterator[Any]:
    """The nodes of ours above those that ran, which did not run themselves."""
    kind, seen, todo = type(ran[0]), set(ran), list(ran)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.append(node)
            if type(node) is kind:
                yield node
