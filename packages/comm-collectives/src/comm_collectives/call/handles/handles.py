"""Collectives that run beside the program: a handle to wait on, and one thread per group.

Calls of a group keep their order, so a synchronous one waits its turn there. On CUDA the thread
works on a stream of its own: it starts after what the caller's stream had queued, and `wait` orders
the caller's stream behind it. If devices have one queue, the program waits until it has queued it.

    handle = all_reduce(x, async_op=True)
    y = other_work()
    total = handle.wait()
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Required, TypedDict, TypeVar, final

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import is_dense
from comm_collectives.call.devices import has_one_queue, refuse_captured
from comm_collectives.call.groups import Group, GroupState, Ordered, check_timeout
from comm_collectives.call.handles.caught import Caught
from comm_collectives.call.handles.walk import replace_tensors, tensors_in
from comm_collectives.call.handles.watch import Watch
from comm_collectives.call.handles.worker import Worker
from comm_collectives.call.signature import current_site, use_site
from comm_collectives.errors import CollectiveTimeoutError, MutatedInputError

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


class CallNow(TypedDict, total=False):
    """What every collective takes besides, for the type of the form that returns its result."""

    group: Group | None
    timeout_s: float | None
    async_op: Literal[False]


class CallLater(TypedDict, total=False):
    """The same for the form that returns a handle."""

    group: Group | None
    timeout_s: float | None
    async_op: Required[Literal[True]]


@dataclass(slots=True)
class DeferredGraph:
    """Nodes that a call on the group's thread leaves to the thread that gets its result.

    A backward runs nodes in the reverse order in which a thread made them. If the group's thread
    made some, that order would depend on how many nodes the ranks' programs made in between.
    """

    nodes: list[tuple[Tensors, Callable[[], Tensors]]] = field(default_factory=list)

    def add(self, outputs: Tensors, make: Callable[[], Tensors]) -> None:
        """Leave a node with these outputs for later."""
        self.nodes.append((outputs, make))

    def complete(self, value: T) -> T:
        """Make the nodes, and return the value with tensors that belong to the graph."""
        replaced: dict[int, torch.Tensor] = {}
        for outputs, make in self.nodes:
            with torch.enable_grad():
                made = make()
            replaced |= {id(old): new for old, new in zip(outputs, made, strict=True)}
        return replace_tensors(value, replaced) if replaced else value


_GRAPH: ContextVar[DeferredGraph | None] = ContextVar("comm_collectives_graph", default=None)


def deferred_graph() -> DeferredGraph | None:
    """Return where nodes of the graph are left for later: None but on a group's thread."""
    return _GRAPH.get()


def put_in_graph(outputs: Tensors, make: Callable[[], Tensors]) -> Tensors:
    """Make a node of the graph with these outputs: now or, on a group's thread, later."""
    deferred = deferred_graph()
    if deferred is None:
        return make()
    deferred.add(outputs, make)
    return outputs


@final
class Handle(Generic[T]):
    """A collective under way. Keep it, and leave the inputs unchanged, until `wait` has returned.

    The handle keeps the inputs alive.
    """

    def __init__(
        self,
        name: str,
        future: "Future[tuple[T, DeferredGraph]]",
        watch: Watch,
        event: "torch.Event | None" = None,
        absent: Callable[[], str] = str,
    ) -> None:
        self._name, self._absent = name, absent
        self._future = future
        self._watch = watch
        self._event = event
        self._results: list[T] = []

    @graph_break
    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result of the call. Not collective; may be called again.

        Args:
            timeout_s: limit in seconds of this wait; None waits for as long as the call itself may
                take, 0 not at all. The call goes on after a limit that passed.

        Raises:
            ValueError, TypeError: `timeout_s` is no time.
            CollectiveTimeoutError: the call was still under way.
            MutatedInputError: an input was changed in place meanwhile.
            CommError: what the call raised.
        """
        if self._results:
            return self._results[0]
        if timeout_s != 0:  # which only looks
            timeout_s = check_timeout(timeout_s)
        try:
            value, graph = self._future.result(timeout_s)
        except FutureTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{self._name} was still under way after {timeout_s:g} s{self._absent()}; wait "
                "again, or give the call itself a timeout_s"
            ) from error
        changed = self._watch.changed()
        if changed:
            raise MutatedInputError(
                f"{self._name}: input {changed[0]} was changed in place before wait() returned, so "
                "what was sent is not known; wait first, or give the call a copy"
            )
        if self._event is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(self._event)
            for tensor in tensors_in(value):
                # The memory was allocated on the group's stream and is now used on this one.
                if tensor.device.type != "cpu":
                    tensor.record_stream(stream)
        self._results.append(graph.complete(value))
        return self._results[0]

    @graph_break
    def is_done(self) -> bool:
        """Whether `wait` would return (or raise) without waiting for a peer."""
        return self._future.done()

    @staticmethod
    def finished(name: str, value: T) -> "Handle[T]":
        """Return a handle for what needed no other rank and is done."""
        future: Future[tuple[T, DeferredGraph]] = Future()
        future.set_result((value, DeferredGraph()))
        return Handle(name, future, Watch(()))

    def when_done(self, run: Callable[[], None]) -> None:
        """Call `run` when the call has ended: on the thread that ran it, or now if it has."""
        self._future.add_done_callback(lambda _: run())


@contextmanager
def turn(state: GroupState | None) -> Iterator[None]:
    """Have the turn of this thread in a group for a block: after what was started before.

    None is no group.
    """
    if state is None:
        yield
        return
    worker = state.worker
    if worker is None or not worker.is_here():
        state.users.add()
        if worker is not None and worker.is_busy:
            worker.submit(int).result()
    with state.lock:
        state.prepare()
        yield


def launch(
    state: Ordered,
    name: str,
    run: Callable[[], T],
    *,
    inputs: Sequence[object],
    async_op: bool,
) -> Any:
    """Run a call in the order of its group: now, or on the group's thread.

    Returns:
        What `run` returns, or with `async_op` a Handle that does.
    """
    if async_op:
        refuse_captured(name, "async_op=True runs it on another thread", "leave async_op out")
    worker = state.worker
    if worker is None or not worker.is_here():
        state.users.add()
    if not async_op and (worker is None or worker.is_here() or not worker.is_busy):
        with state.lock:
            state.prepare()
            return run()
    if worker is None:
        worker = state.worker = Worker(f"comm_collectives {state.name}", state)
    # What cannot be watched cannot be moved either: the call itself refuses it, on every rank.
    plain = [x for x in inputs if is_dense(x)]
    watch = Watch(plain)
    future, event = _submit(state, worker, run, plain)
    handle = Handle(name, future, watch, event, state.absent)
    return handle if async_op else handle.wait()


def launch_on(
    state: GroupState,
    worker: Worker,
    name: str,
    run: Callable[[], T],
    *,
    inputs: Sequence[torch.Tensor],
) -> Handle[T]:
    """Run on a thread of its own what has no place in the order of a group's calls.

    What it gives a device is queued where the caller's would be; whoever waits, on any stream, is
    ordered behind it.
    """
    site, grad = current_site(), torch.is_grad_enabled()
    stream = None if state.moves_on_host else torch.accelerator.current_stream()
    done = None if stream is None else torch.Event(device=stream.device)

    def run_there() -> tuple[T, DeferredGraph]:
        with use_site(site), stream or nullcontext():
            result = _run_apart(run, grad)
            if stream is not None:
                stream.record_event(done)
            return result

    return Handle(name, worker.submit(run_there), Watch(inputs), done)


def _submit(
    state: Ordered, worker: Worker, run: Callable[[], T], inputs: Sequence[torch.Tensor]
) -> "tuple[Future[tuple[T, DeferredGraph]], torch.Event | None]":
    site, grad = current_site(), torch.is_grad_enabled()
    device = next((x.device for x in inputs if x.device.type != "cpu"), None)

    def on_host() -> tuple[T, DeferredGraph]:
        with use_site(site), state.lock:
            state.prepare()
            return _run_apart(run, grad)

    if state.is_alone:  # nobody to wait for; what it allocates is this thread's
        done_here: Future[tuple[T, DeferredGraph]] = Future()
        done_here.set_result(on_host())
        return done_here, None
    if device is None:
        return worker.submit(on_host), None
    stream = worker.stream(device)
    done, ready = torch.Event(device=device), torch.accelerator.current_stream().record_event()
    for x in inputs:
        x.record_stream(stream)

    def on_device() -> tuple[T, DeferredGraph]:
        with stream:
            stream.wait_event(ready)
            result = on_host()
            stream.record_event(done)
            return result

    future = worker.submit(on_device)
    if has_one_queue():
        with Caught(passing=(KeyboardInterrupt,)):  # the handle raises it
            future.result()
    return future, done


def _run_apart(run: Callable[[], T], grad: bool) -> tuple[T, DeferredGraph]:
    graph = DeferredGraph()
    token = _GRAPH.set(graph)
    try:
        with torch.set_grad_enabled(grad):
            return run(), graph
    finally:
        _GRAPH.reset(token)
