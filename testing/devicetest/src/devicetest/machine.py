"""The state of all fake devices: streams with vector clocks, copies that are due, what was found.

A stream's clock says which work of other streams is known to be done before its next operation.
The host has one clock a thread. A copy that nobody has waited for is *due*: it runs as late as it
may, when a clock of the host reaches it or an operation touches the same device memory.

    machine = Machine(devices=1)
    side = machine.stream(0)
    side.wait_stream(machine.current_stream(0))
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from devicetest.findings import Access, Findings, Race, Sync, where

Clock = dict[int, int]


@dataclass(slots=True)
class DeviceMemory:
    """What happened to one storage since it was allocated."""

    index: int
    num_bytes: int
    birth: "Stream"
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    recorded: dict[int, "Stream"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Due:
    """A copy that has not happened: `memory` is the key of the device memory that it fills, `after`
    what its stream knew to be done, and itself.
    """

    number: int
    stream: int
    time: int
    after: Clock
    memory: int | None
    run: Callable[[], None]


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, machine: "Machine", *, blocking: bool = False) -> None:
        self._machine = machine
        self.blocking = blocking
        self.clock: Clock | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        """Remember what the stream will have done by now."""
        stream = stream or self._machine.current_stream()
        stream.tick()
        self.clock = dict(stream.clock)

    def wait(self, stream: "Stream | None" = None) -> None:
        """Let a stream wait."""
        (stream or self._machine.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether it has come to pass; the host may rely on it."""
        self._machine.host_waits(self.clock or {})
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        kind = "event.synchronize" if self.blocking else "event.synchronize (spinning)"
        self._machine.note_sync(kind)
        self._machine.host_waits(self.clock or {})

    def elapsed_time(self, other: "Event") -> float:
        """Return some milliseconds; time is not modelled."""
        return 1.0


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, machine: "Machine", index: int) -> None:
        self._machine = machine
        self.device = torch.device("cuda", index)
        self.device_index = index
        self.id = self.stream_id = self.cuda_stream = next(machine.numbers)
        self.clock: Clock = {}
        machine.streams[index].append(self)

    def tick(self) -> int:
        """Begin an operation: what the host has waited for came before it."""
        _merge(self.clock, self._machine.host_clock())
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here."""
        event = event or Event(self._machine)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Do nothing more before an event has come to pass."""
        if event.clock is None:
            self._machine.problems.append(f"wait for an event never recorded: {where()}")
        _merge(self.clock, event.clock or {})

    def wait_stream(self, other: "Stream") -> None:
        """Do nothing more before another stream has done what it has now."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        self._machine.note_sync("stream.synchronize")
        self._machine.host_waits(self.clock)

    def query(self) -> bool:
        """Whether all is done; the host may rely on it."""
        self._machine.host_waits(self.clock)
        return True

    def is_capturing(self) -> bool:
        """Whether this thread's stream is being captured."""
        return self._machine.is_capturing()

    def __enter__(self) -> "Stream":
        self._machine.stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.stack().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


class DeviceGenerator(torch.Generator):
    """A generator of random numbers that says it is a device's."""

    def __new__(cls, index: int) -> "DeviceGenerator":
        """Make one; its numbers are those of a generator of the CPU."""
        return super().__new__(cls)

    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The fake device."""
        return torch.device("cuda", self._index)


class Machine:
    """All devices of one `fake_cuda` block, and what was found on them.

    Attributes:
        found: races and other faults, of this process and of those forked from it.
        races: uses of device memory that nothing orders.
        syncs: what stopped the host.
        problems: other mistakes, one line each.
        counts: operations and copies by name.
        fail_page_locks: error code with which pinning fails; 0 lets it work.
        memory_bytes: of each device; what needs more raises torch's OutOfMemoryError.
        streams: those of each device; one lives on when its object is gone, as in CUDA.
    """

    def __init__(self, *, devices: int) -> None:
        self.found = Findings()
        self.races, self.problems = self.found.races, self.found.problems
        self.syncs: list[Sync] = []
        self.counts: dict[str, int] = {}
        self.fail_page_locks = 0
        self.memory_bytes = 1 << 40
        self.numbers = itertools.count(1)
        self.num_devices = devices
        self.allocated = [0] * devices
        self.peak = [0] * devices
        self.generators = tuple(map(DeviceGenerator, range(devices)))
        self.streams: list[list[Stream]] = [[] for _ in range(devices)]
        self._default = [Stream(self, index) for index in range(devices)]
        self._here = threading.local()
        self._lock = threading.RLock()
        self._due: list[_Due] = []
        self._memories: dict[int, DeviceMemory] = {}
        self._pinned: dict[int, int] = {}  # first address -> bytes
        self._set: set[int] = set()  # devices that threads of this process have set

    def forget(self) -> None:
        """Forget what was found, not what is under way."""
        self.found.forget()
        self.syncs.clear()
        self.counts.clear()

    def check(self) -> None:
        """Raise for faults that were found, of forked processes too.

        Raises:
            AssertionError: with a line for each.
        """
        found = self.found.all()
        if found:
            raise AssertionError("\n".join(["found on fake devices:", *found]))

    # ------------------------------------------------------------------ streams and the host

    def stream(self, device: Any = None, priority: int = 0) -> Stream:
        """Make a stream."""
        return Stream(self, self.index_of(device))

    def index_of(self, device: Any) -> int:
        """Return the number of a device; that of the thread's current one for None.

        Raises:
            RuntimeError: there is no such device; in CUDA's words.
        """
        named = device if isinstance(device, int | None) else torch.device(device).index
        if named is not None:
            if named not in range(self.num_devices):
                raise RuntimeError(
                    f"CUDA error: invalid device ordinal {named}; devices are 0 to "
                    f"{self.num_devices - 1}"
                )
            return named
        if self._set and 0 not in self._set and not self.stack() and self._here.device is None:
            thread, other = threading.current_thread().name, min(self._set)
            self.problems.append(
                f"{where()} means cuda:0 in thread {thread!r}, which has set no device, where "
                f"the process uses cuda:{other}"
            )
        return self.current_device()

    def stack(self) -> list[Stream]:
        """Return the streams that this thread has made current, the last one in force."""
        if not hasattr(self._here, "stack"):
            self._here.stack, self._here.device = [], None
        stack: list[Stream] = self._here.stack
        return stack

    def current_device(self) -> int:
        """Return this thread's current device."""
        stack = self.stack()
        return stack[-1].device_index if stack else self._here.device or 0

    def set_device(self, device: Any) -> None:
        """Change this thread's current device."""
        self.stack()
        self._here.device = self.index_of(device)
        self._set.add(self._here.device)

    def current_stream(self, device: Any = None) -> Stream:
        """Return this thread's current stream of a device."""
        index = self.index_of(device)
        mine = [stream for stream in self.stack() if stream.device_index == index]
        return mine[-1] if mine else self._default[index]

    def host_clock(self) -> Clock:
        """Return what this thread has waited for."""
        if not hasattr(self._here, "clock"):
            self._here.clock = {}
        clock: Clock = self._here.clock
        return clock

    def host_waits(self, clock: Clock) -> None:
        """Let this thread wait until the streams have come that far."""
        with self._lock:
            _merge(self.host_clock(), clock)
            self._run_due(lambda due: due.time <= clock.get(due.stream, 0))

    def synchronize(self, device: Any = None) -> None:
        """Wait for every stream of one device, as `torch.cuda.synchronize`."""
        index = self.index_of(device)
        self.note_sync("cuda.synchronize")
        for stream in list(self.streams[index]):
            self.host_waits(stream.clock)

    @contextlib.contextmanager
    def capture(self, steps: list[Callable[[], object]]) -> Iterator[None]:
        """Keep what this thread's device does inside, to be done again; see `graphs`."""
        self._here.steps = steps
        try:
            yield
        finally:
            self._here.steps = None

    def is_capturing(self) -> bool:
        """Whether this thread's stream is being captured."""
        return getattr(self._here, "steps", None) is not None

    def keep(self, step: Callable[[], object]) -> None:
        """Keep something that the device does for a graph, if one is being captured."""
        if self.is_capturing():
            self._here.steps.append(step)

    def note_sync(self, kind: str) -> None:
        """Remember what stops the host.

        Raises:
            RuntimeError: a graph is being captured, which it would end.
        """
        if self.is_capturing():
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {kind}, {where()}"
            )
        self.syncs.append(Sync(kind, where()))

    def count(self, name: str) -> None:
        """Count an operation."""
        self.counts[name] = self.counts.get(name, 0) + 1

    @contextlib.contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        """Let the random numbers drawn inside be those of a device's generator."""
        mine, host = self.generators[index], torch.default_generator
        with self._lock:
            before = host.get_state()
            host.set_state(mine.get_state())
            try:
                yield
                mine.set_state(host.get_state())
            finally:
                host.set_state(before)

    # ------------------------------------------------------------------ copies that are due

    def defer(self, stream: Stream, run: Callable[[], None], *, fills: torch.Tensor | None) -> None:
        """Let a copy happen when it must."""
        key = None if fills is None else _key(fills)
        with self._lock:
            time = stream.clock.get(stream.id, 0)
            due = _Due(next(self.numbers), stream.id, time, dict(stream.clock), key, run)
            self._due.append(due)

    def settle(self, inner: torch.Tensor) -> None:
        """Let copies happen that fill a memory which is about to be used, and those before them."""
        key, before = _key(inner), Clock()
        with self._lock:
            for due in self._due:
                if due.memory == key:
                    _merge(before, due.after)
            self._run_due(lambda due: due.time <= before.get(due.stream, 0))

    def _run_due(self, chosen: Callable[[_Due], bool]) -> None:
        now = [due for due in self._due if chosen(due)]
        self._due = [due for due in self._due if due not in now]
        for due in sorted(now, key=lambda due: due.number):
            due.run()

    # ------------------------------------------------------------------ memory

    def born(self, inner: torch.Tensor, index: int) -> None:
        """Take note of new device memory.

        Raises:
            torch.OutOfMemoryError: the device has not so much.
        """
        storage, key = inner.untyped_storage(), _key(inner)
        if key in self._memories:
            return
        if self.allocated[index] + storage.nbytes() > self.memory_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes. GPU {index} has "
                f"a total capacity of {self.memory_bytes} bytes"
            )
        stream = self.current_stream(index)
        memory = DeviceMemory(index, storage.nbytes(), stream)
        memory.write = Access(stream.id, stream.clock.get(stream.id, 0), where())
        with self._lock:
            self._memories[key] = memory
            self.allocated[index] += memory.num_bytes
            self.peak[index] = max(self.peak[index], self.allocated[index])
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        with self._lock:
            memory = self._memories.pop(key)
            self.allocated[memory.index] -= memory.num_bytes
        clock = dict(memory.birth.clock)
        # Torch has each recorded stream reach what it has now, with all that it waits for itself.
        for before in (self.host_clock(), *(each.clock for each in memory.recorded.values())):
            _merge(clock, before)
        for access in (*memory.reads.values(), *((memory.write,) if memory.write else ())):
            if clock.get(access.stream, 0) < access.time:
                self.races.append(Race("freed while another stream uses it", access.where, where()))

    def touch(self, inner: torch.Tensor, stream: Stream, *, writes: bool) -> None:
        """Let a stream's present operation use a memory; find what is not ordered before it."""
        self.settle(inner)
        memory = self._memories.get(_key(inner))
        if memory is None:
            return
        here = Access(stream.id, stream.clock.get(stream.id, 0), where())
        last = memory.write
        if last is not None and stream.clock.get(last.stream, 0) < last.time:
            kind = "write after write" if writes else "read after write"
            self.races.append(Race(kind, last.where, here.where))
        if not writes:
            memory.reads[stream.id] = here
            return
        for read in memory.reads.values():
            if stream.clock.get(read.stream, 0) < read.time:
                self.races.append(Race("write after read", read.where, here.where))
        memory.write, memory.reads = here, {}

    def record_stream(self, inner: torch.Tensor, stream: Stream) -> None:
        """As `Tensor.record_stream`."""
        memory = self._memories.get(_key(inner))
        if memory is not None:
            memory.recorded[stream.id] = stream

    # ------------------------------------------------------------------ pinned host memory

    def page_lock(self, address: int, num_bytes: int) -> int:
        """As `cudaHostRegister`; an error stays behind until the thread's next operation."""
        if self.fail_page_locks:
            self._here.error = self.fail_page_locks
            return self.fail_page_locks
        self._pinned[address] = num_bytes
        return 0

    def page_unlock(self, address: int) -> int:
        """As `cudaHostUnregister`."""
        if self._pinned.pop(address, None) is None:
            self.problems.append(f"memory is unpinned that was not pinned: {where()}")
            return 713
        return 0

    def allocate_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin the memory of a new tensor for as long as it lives."""
        if self.fail_page_locks:
            raise RuntimeError(f"CUDA error: page-locking failed with {self.fail_page_locks}")
        address = tensor.data_ptr()
        self._pinned[address] = tensor.untyped_storage().nbytes()
        weakref.finalize(tensor.untyped_storage(), self._pinned.pop, address, None)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether host memory is pinned."""
        address = tensor.data_ptr()
        return any(begin <= address < begin + size for begin, size in list(self._pinned.items()))

    def raise_left_error(self) -> None:
        """Raise what a failed call has left behind in this thread, once."""
        error = getattr(self._here, "error", 0)
        if error:
            self._here.error = 0
            raise RuntimeError(f"CUDA error: code {error}, left behind by an earlier call")


def _key(inner: torch.Tensor) -> int:
    return int(inner.untyped_storage()._cdata)


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in list(other.items()):
        into[stream] = max(into.get(stream, 0), time)
