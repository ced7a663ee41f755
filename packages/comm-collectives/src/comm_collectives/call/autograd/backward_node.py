"""One autograd node for every collective, and how a rank takes part in backwards it never runs.

The backward of a collective is a collective: it has to run on every rank, also on one whose input
needs no gradient (the ranks tell each other, and then all get a node), and on one whose loss never
uses the output and drops it (then it takes part with a gradient of zeros). When zeros are right,
and when all get an error, says `PendingBackwards`.

    if flags & WANTS_GRAD:
        (y,) = attach((x,), (y,), call, Back(run=...))
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast, final
from weakref import finalize, ref

import torch
from torch.autograd.function import once_differentiable

from comm_collectives.base import dense, from_bytes, num_bytes
from comm_collectives.call import BACKWARD_OF, Call
from comm_collectives.call.autograd.passes import Origin, note_node
from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import deferred_graph, launch
from comm_collectives.call.signature import Argument, SignatureWords, Status
from comm_collectives.errors import CommError, LostGradientWarning
from comm_collectives.units import POLL_S

Gradients = tuple[torch.Tensor, ...]
_RETRY_S = 1.0  # how long a program may take to run a backward again after an exception


def _unchanged(grads: Gradients) -> Gradients:
    return grads


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """The backward of one call: from gradients of its outputs to gradients of its inputs.

    Attributes:
        run: collective work; gets contiguous gradients of the outputs and a call that has met.
        finish: what this rank alone does with what `run` returned.
        others_lose: whether gradients that come to this rank and go no further are missing in those
            of other ranks. Then the next call of the group is an error on every rank, where else
            there is a warning on this one.

    `run` is kept for as long as a peer may ask for it, so it holds no data.
    """

    run: Callable[[Gradients, Call], Gradients]
    finish: Callable[[Gradients], Gradients] = _unchanged
    others_lose: bool = False


def wants_grad(*inputs: torch.Tensor) -> bool:
    """Whether this rank needs a gradient of any of these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def attach(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], call: Call, back: Back
) -> tuple[torch.Tensor, ...]:
    """Make outputs of a call part of the graph; `inputs` are those that get a gradient.

    Every rank of the group has to do so if one does. An input that needs no gradient here is
    accompanied by an empty tensor that does, so that this rank takes part; a rank that records no
    gradients at the moment takes part with zeros.
    """
    state, origin, results = call.state, Origin.of(call), tuple(outputs)
    records = torch.is_grad_enabled()
    if state.size > 1:
        kinds = [(y.shape, y.dtype, y.device) for y in results]
        origin.owe(_Serving(origin, back, [records and x.requires_grad for x in inputs], kinds))
        _watch_over(state)
    if not records:
        state.pending.drop(call.number)
        return results
    alive, deferred = _Alive(state, call.number), deferred_graph()
    joins = torch.zeros(0, requires_grad=True, device="cpu")
    if deferred is None:
        return cast(Gradients, _Node.apply(joins, origin, back, alive, results, *inputs))
    deferred.add(results, lambda: _Node.apply(joins, origin, back, alive, results, *inputs))
    return results


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joins: torch.Tensor,
        origin: Origin,
        back: Back,
        alive: "_Alive",
        outputs: Gradients,
        *inputs: torch.Tensor,
    ) -> Gradients:
        ctx.set_materialize_grads(True)
        ctx.origin, ctx.back, ctx.alive = origin, back, alive
        ctx.when_pass_fails = origin.fail
        ctx.save_for_backward(joins)
        # A view of the bytes that arrived could not be changed in place by the caller.
        return tuple(y.data if y._is_view() else y for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        origin, back = ctx.origin, ctx.back
        note_node(ctx, origin)
        # Where activations are recomputed, asking for a saved tensor starts that: ahead of this
        # exchange on every rank, also on one that saved nothing between this node and the next.
        _ = ctx.saved_tensors
        contiguous = tuple(dense(grad) for grad in grads)
        gradients = launch(
            origin.state,
            f"{origin.name}{BACKWARD_OF}",
            lambda: run_backward(origin, back, contiguous),
            inputs=contiguous,
            async_op=False,
        )
        return (None, None, None, None, None, *back.finish(gradients))


def run_backward(origin: Origin, back: Back, grads: Gradients) -> Gradients:
    """Run the backward of a call on this rank, with the gradients that it has."""
    origin.state.pending.start(origin.number)
    call = Call(
        origin.state,
        f"{origin.name}{BACKWARD_OF}",
        arguments=(Argument("backward of call", origin.number),),
        timeout_s=origin.timeout_s,
        site=origin.site,
    )
    return back.run(grads, call)


@final
class _Serving:
    """Takes part in the backward of a call with gradients of zeros for its outputs.

    `needs` says which inputs need a gradient here, `kinds` shape, dtype and device of the outputs.
    """

    def __init__(
        self,
        origin: Origin,
        back: Back,
        needs: Sequence[bool],
        kinds: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
    ) -> None:
        self._origin, self._needs, self._kinds = origin, needs, kinds
        self._run, self._others_lose = back.run, back.others_lose  # and no data, as of `finish`

    def __call__(self, call: Call) -> None:
        # Bits of zeros are zeros in every dtype that has them.
        zeros = tuple(
            from_bytes(
                torch.zeros(num_bytes(dtype, shape), dtype=torch.uint8, device=device), dtype, shape
            )
            for shape, dtype, device in self._kinds
        )
        gradients, origin = self._run(zeros, call), self._origin
        pairs = zip(gradients, self._needs, strict=False)
        if not any(needed and bool(x.any()) for x, needed in pairs):
            return
        text = (
            f"{origin.name} call {origin.number} made at {origin.site.text}: other ranks sent "
            "gradients for its input, which are lost, since this rank's loss does not use its "
            "output; use it on every rank, for example by adding 0 * output.sum() to the loss"
        )
        if self._others_lose:
            origin.state.pending.lost = text
        else:
            rank = origin.state.global_rank
            warnings.warn(f"rank {rank}: {text}", LostGradientWarning, stacklevel=2)


@final
class _Alive:
    """Lives as long as a graph; when that ends without a backward, peers may still need one."""

    def __init__(self, state: GroupState, number: int) -> None:
        self._state, self._number = ref(state), number

    def __del__(self) -> None:
        state = self._state()
        if state is not None:
            state.pending.drop(self._number)


def _watch_over(state: GroupState) -> None:
    """Have a thread that answers for backwards that this rank will never run."""
    if state.responder is None:
        noticed = state.pending.noticed
        state.responder = threading.Thread(target=_respond, args=(ref(state), noticed), daemon=True)
        state.responder.start()
        # It waits for an entry, and ends when it finds the group gone.
        finalize(state, noticed.put, None).atexit = False


def _respond(state_of: "ref[GroupState]", noticed: "SimpleQueue[None]") -> None:
    """Look whether peers wait in a backward that will not come: they get zeros, or an error."""
    waited_s = pause_s = 0.0
    while True:
        if not pause_s:
            noticed.get()
        state = state_of()
        if state is None:
            return
        pause_s = POLL_S if state.pending.answerable() else 0.0
        if pause_s and state.lock.acquire(blocking=False):
            # A thread of this rank that holds the lock is in a call and answers by itself.
            try:
                gone = _awaited(state)
                waited_s = waited_s + pause_s if gone else 0.0
                if True in gone or waited_s > _RETRY_S:
                    Call(state, "an answer to", compares_site=False).answer()
            except (CommError, LostGradientWarning):
                pause_s = 0.0  # the peers have the same error, or the user wants warnings raised
            finally:
                state.lock.release()
        del state
        time.sleep(pause_s)


def _awaited(state: GroupState) -> list[bool]:
    """The backwards in which peers wait and which this rank will not run: is the graph gone."""
    answerable = state.pending.answerable()
    if not answerable:
        return []
    ahead = {} if state.frames is None else state.frames.ahead()
    words = [SignatureWords.unpack(frame.signature) for frame in ahead.values()]
    numbers = [head.arguments[0] for head in words if head.status & Status.BACKWARD]
    return [answerable[number] for number in numbers if number in answerable]
