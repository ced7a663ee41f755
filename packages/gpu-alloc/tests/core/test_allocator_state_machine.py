"""Random operations against a model that knows only requests, addresses and the snapshot.

After every operation the independent checker runs: no overlap, alignment, full cover, merged
neighbours, free lists equal to the free blocks. Every placement is compared with the best fit found
by a linear scan, and every failure with what the source could still have given. Blocks are used on
other streams, whose events end when the test says so; finalizers free while memory is taken.

The compiled core does all of it beside the Python core: `Both` compares each result, error, report,
counter and snapshot. `benchmarks/gpu_alloc_sound.py` runs the same with 10^6 operations.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    AllocError,
    ChunkSource,
    OutOfMemoryError,
    Snapshot,
    TwoPoolAllocator,
    check_snapshot,
)
from gpu_alloc.errors import AllocValueError
from gpu_alloc.native import NativeAllocator, NativeUnavailableError, native_library
from gpu_alloc.plan import LifetimePlan
from gpu_alloc.sources import StreamEvents

MIB = 1 << 20
STREAMS = st.integers(0, 2)
SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 2 * MIB),
    st.sampled_from([MIB - 1, MIB, MIB + 1, 2 * MIB, 4 * MIB]),
    st.integers(MIB, 9 * MIB),
)

_SETTINGS: dict[str, list[Any]] = {
    "small_pool_size_in_mb": [1, 1, 2],
    "small_pool_auto_growth_chunk_size_in_mb": [0, 1, 2, 6],
    "large_pool_auto_growth_chunk_size_in_mb": [0, 3, 8],
    "small_pool_pre_alloc_in_mb": [0, 0, 2],
    "large_pool_pre_alloc_in_mb": [0, 0, 4],
    "alignment_size": [1, 64, 512],
    "free_idle_chunk": [False, True],
    "free_when_no_cache_hit": [False, True],
    "memory_limit_in_mb": [0, 0, 7, 20],
}
_PAGES = [512, 4096, 2 * MIB]
CONFIGS = st.builds(
    AllocatorConfig, **{name: st.sampled_from(values) for name, values in _SETTINGS.items()}
)
PICKS = st.integers(0, 1 << 20)


def _fits(snapshot: Snapshot, pool: str, stream: int, size: int) -> list[tuple[int, int]]:
    """(size, address) of every run of free blocks of `pool` that `stream`, and no other, used."""
    found = []
    for chunk in snapshot.chunks:
        run_ptr = run_size = 0
        for block in chunk.blocks if chunk.pool == pool else ():
            if block.is_free and block.stream in (stream, None):
                run_ptr, run_size = run_ptr or block.ptr, run_size + block.size
            else:
                found.append((run_size, run_ptr))
                run_ptr = run_size = 0
        found.append((run_size, run_ptr))
    return [(run_size, ptr) for run_size, ptr in found if run_size >= max(size, 1)]


def drawn_plan(seed: int, alignment: int) -> LifetimePlan:
    """Places of up to three streams, which overlap within each at random."""
    rng = random.Random(seed)
    places, first = [], 0
    for stream in rng.sample(range(3), rng.randrange(1, 4)):
        end = first
        for _ in range(rng.randrange(1, 6)):
            size = rng.choice([alignment, 4096, MIB, rng.randrange(1, 4 * MIB)])
            size = -(-size // alignment) * alignment
            offset = first + rng.choice([0, rng.randrange(2 * MIB)]) // alignment * alignment
            places += [(size, stream, offset)] * rng.randrange(1, 3)
            end = max(end, offset + size)
        first = end
    rng.shuffle(places)
    return LifetimePlan(places=tuple(places), alignment_size=alignment)


class Finalizing(ChunkSource):
    """Invented addresses; while a chunk is taken or given back, a finalizer may free blocks."""

    def __init__(self, inner: AddressSource) -> None:
        self.alignment_bytes = inner.alignment_bytes
        self.granularity_bytes = inner.granularity_bytes
        self.inner = inner
        self.finalize: Callable[[], None] = lambda: None

    def acquire(self, size_bytes: int) -> int | None:
        self.finalize()
        return self.inner.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        self.finalize()
        self.inner.release(ptr, size_bytes)


class Work(StreamEvents):
    """Events of streams whose work ends when `finish` is called; or never, while one captures."""

    def __init__(self) -> None:
        self.unfinished: set[tuple[int, int]] = set()
        self.num_recorded = 0
        self.capturing: int | None = None

    def record(self, stream: int) -> tuple[int, int]:
        assert self.capturing is None or self.capturing != stream
        self.num_recorded += 1
        event = (stream, self.num_recorded)
        self.unfinished.add(event)
        return event

    def is_done(self, event: tuple[int, int]) -> bool:
        assert self.capturing != event[0]
        return event not in self.unfinished

    def wait(self, event: tuple[int, int]) -> None:
        self.unfinished.discard(event)

    def is_capturing(self, stream: int) -> bool:
        return stream == self.capturing

    def finish(self, stream: int) -> None:
        self.unfinished = {event for event in self.unfinished if event[0] != stream}


class World:
    """An allocator with what it stands on."""

    def __init__(
        self,
        kind: type[TwoPoolAllocator] | type[NativeAllocator],
        config: AllocatorConfig,
        capacity_bytes: int,
        page_bytes: int,
    ) -> None:
        self.address = AddressSource(capacity_bytes, granularity_bytes=page_bytes)
        self.source = Finalizing(self.address)
        self.work = Work()
        self.allocator = kind(self.source, config, on_exhausted=lambda: None, events=self.work)

    def finalize(self, ptr: int) -> None:
        """Free this the next time that the source is asked for something."""
        before = self.source.finalize

        def finalize() -> None:
            self.source.finalize = lambda: None
            before()
            self.allocator.free(ptr)

        self.source.finalize = finalize


class Both:
    """Every core there is, each in a world of its own; what they answer must be the same."""

    def __init__(self, kinds: list[Any], config: AllocatorConfig, *where: int) -> None:
        made = [self._outcome(lambda k=kind: World(k, config, *where)) for kind in kinds]
        if isinstance(made[0], OutOfMemoryError):
            assert all(str(m) == str(made[0]) for m in made)
            raise made[0]
        self.worlds: list[World] = made
        self.address, self.work = self.worlds[0].address, self.worlds[0].work

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of all and return what they return, or raise what they raise."""
        found = [
            self._outcome(lambda a=w.allocator: getattr(a, name)(*arguments, **named))
            for w in self.worlds
        ]
        for other in found[1:]:
            if isinstance(found[0], AllocError):
                expected = (type(found[0]), str(found[0]))
                assert (type(other), str(other)) == expected, f"{other!r}, expected {found[0]!r}"
            else:
                assert other == found[0], name
        if isinstance(found[0], AllocError):
            raise found[0]
        return found[0]

    def each(self, action: Callable[[World], object]) -> None:
        for world in self.worlds:
            action(world)

    def snapshot(self) -> Snapshot:
        found = [w.allocator.snapshot() for w in self.worlds]
        for other in found[1:]:
            assert other.chunks == found[0].chunks
            assert check_snapshot(other) == []
        return found[0]

    @staticmethod
    def _outcome(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except AllocError as error:
            return error


class AllocatorMachine(RuleBasedStateMachine):
    kinds: tuple[Any, ...] = (TwoPoolAllocator,)

    @initialize(
        config=CONFIGS,
        capacity_mb=st.integers(0, 40),
        page_bytes=st.sampled_from(_PAGES),
    )
    def make(self, config: AllocatorConfig, capacity_mb: int, page_bytes: int) -> None:
        where = (capacity_mb * MIB, page_bytes)
        self.config = config
        try:
            self.both = Both(list(self.kinds), config, *where)
        except OutOfMemoryError:
            self.config = AllocatorConfig()
            self.both = Both(list(self.kinds), self.config, *where)
        self.live: dict[int, tuple[int, int, int]] = {}  # ptr -> size, padded size, stream
        self.plan: LifetimePlan | None = None
        self.served: dict[tuple[int, int], int] = {}  # since the step began
        self.leaving: set[int] = set()  # freed, and perhaps in use by a stream or a finalizer

    @rule(pick=PICKS, stops=st.sampled_from([False, False, True]))
    def follow(self, pick: int, stops: bool) -> None:
        plan = None if stops else drawn_plan(pick, self.config.alignment_size)
        try:
            self.both.call("follow", plan)
        except AllocValueError:
            assert self.plan is not None
            return
        except OutOfMemoryError:
            plan = None
        self.plan, self.served = plan, {}

    @rule()
    def begin_step(self) -> None:
        self.both.call("begin_step")
        self.served = {}

    @rule(pick=PICKS)
    def malloc_as_planned(self, pick: int) -> None:
        if self.plan is not None:
            size, stream, _ = self.plan.places[pick % len(self.plan.places)]
            self.malloc(size, stream)

    def _planned(self, snapshot: Snapshot, padded: int, stream: int) -> tuple[int, bool] | None:
        """Where the plan has the next such request, and whether nothing is there."""
        ranges = [chunk for chunk in snapshot.chunks if chunk.pool == "planned"]
        if not ranges or self.plan is None:
            return None
        offsets = [o for size, owner, o in self.plan.places if (size, owner) == (padded, stream)]
        number = self.served.get((padded, stream), 0)
        if number >= len(offsets):
            return None
        ptr = ranges[0].ptr + offsets[number]
        used = [b for b in ranges[0].blocks if not b.is_free]
        return ptr, all(b.ptr + b.size <= ptr or ptr + padded <= b.ptr for b in used)

    @rule(size=SIZES, stream=STREAMS)
    def malloc(self, size: int, stream: int) -> None:
        alignment = self.config.alignment_size
        padded = -(-size // alignment) * alignment
        before = self.both.snapshot()
        home = "small" if padded <= self.config.small_pool_size_in_mb * MIB else "large"
        fits = _fits(before, home, stream, padded)
        held = self.both.address.used_bytes
        planned = self._planned(before, padded, stream)
        follows, placed, _ = self.both.call("plan_use")
        try:
            ptr, given = self.both.call("malloc", size, stream)
        except OutOfMemoryError:
            assert size > 0
            assert not fits
            assert planned is None or not planned[1]
            self._check_that_nothing_fits(stream, padded)
            return
        if size == 0:
            assert (ptr, given) == (0, 0)
            return
        assert given == padded
        limit = self.both.call("__getattribute__", "limit_bytes")
        used = self.both.address.used_bytes
        assert not limit or used <= max(held, limit), "grew beyond the limit"
        if follows:
            self.served[padded, stream] = self.served.get((padded, stream), 0) + 1
        if self.both.call("plan_use").num_planned > placed:
            assert planned is not None and planned[0] == ptr, "not where it was planned"
        elif planned is not None and planned[1]:
            raise AssertionError("not where it was planned, though the place was free")
        elif fits:
            best_size, best_ptr = min(fits)
            assert best_ptr <= ptr
            assert ptr + padded == best_ptr + best_size, "not the best fit"
        self.live[ptr] = (size, padded, stream)
        self.leaving.discard(ptr)

    def _check_that_nothing_fits(self, stream: int, padded: int) -> None:
        after = self.both.snapshot()
        for pool in ("small", "large", "planned"):
            assert not _fits(after, pool, stream, padded)
        assert all(any(not block.is_free for block in chunk.blocks) for chunk in after.chunks), (
            "idle memory was kept"
        )
        address = self.both.address
        page = address.granularity_bytes
        need = address.used_bytes + -(-padded // page) * page
        limit = self.both.call("__getattribute__", "limit_bytes")
        assert need > (address.capacity_bytes or 0) or (limit and need > limit)

    def _picked(self, pick: int) -> int:
        return sorted(self.live)[pick % len(self.live)]

    @rule(pick=PICKS)
    def free(self, pick: int) -> None:
        if self.live:
            ptr = self._picked(pick)
            del self.live[ptr]
            self.leaving.add(ptr)
            self.both.call("free", ptr)

    @rule(pick=PICKS)
    def free_in_a_finalizer(self, pick: int) -> None:
        """The next time that the source is asked for something."""
        if self.live:
            ptr = self._picked(pick)
            del self.live[ptr]
            self.leaving.add(ptr)
            self.both.each(lambda world: world.finalize(ptr))

    @rule(pick=PICKS, stream=STREAMS)
    def use_on_another_stream(self, pick: int, stream: int) -> None:
        if self.live:
            ptr = self._picked(pick)
            self.both.call("record_stream", ptr, stream)

    @rule(stream=STREAMS)
    def finish_the_work_of_a_stream(self, stream: int) -> None:
        self.both.each(lambda world: world.work.finish(stream))

    @rule(stream=st.sampled_from([None, None, 1]))
    def capture(self, stream: int | None) -> None:
        def capture(world: World) -> None:
            world.work.capturing = stream

        self.both.each(capture)

    @rule(include=st.booleans(), stream=st.sampled_from([None, None, 0, 1]))
    def release_idle(self, include: bool, stream: int | None) -> None:
        before = self.both.address.used_bytes
        released = self.both.call("release_idle", include_pre_allocated=include, stream=stream)
        assert before - released >= self.both.address.used_bytes

    @rule(limit_mb=st.sampled_from([0, 5, 30]))
    def set_limit(self, limit_mb: int) -> None:
        self.both.call("set_limit", limit_mb * MIB)

    @rule()
    def reset_peaks(self) -> None:
        self.both.call("reset_peaks")

    @rule(record=st.booleans())
    def record_a_trace(self, record: bool) -> None:
        events = self.both.call("stop_recording")
        assert events is not None
        if record:
            self.both.call("start_recording")
            self.both.call("mark", "here")

    @invariant()
    def memory_is_sound(self) -> None:
        snapshot = self.both.snapshot()
        assert check_snapshot(snapshot) == []
        in_use = {
            block.ptr: (block.requested_bytes, block.size, block.stream)
            for chunk in snapshot.chunks
            for block in chunk.blocks
            if not block.is_free
        }
        assert {ptr: in_use.get(ptr) for ptr in self.live} == self.live
        assert in_use.keys() - self.live.keys() <= self.leaving
        stats = self.both.call("stats")
        assert stats.requested_bytes == sum(requested for requested, _, _ in in_use.values())
        assert stats.allocated_bytes == sum(size for _, size, _ in in_use.values())
        assert stats.requested_peak_bytes >= stats.requested_bytes
        assert stats.reserved_bytes == self.both.address.used_bytes
        assert stats.reserved_bytes == sum(chunk.size for chunk in snapshot.chunks)
        assert stats.reserved_peak_bytes >= stats.reserved_bytes >= stats.allocated_bytes


def run_machine(machine: type[AllocatorMachine], *, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None
        ),
    )


def _drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A rule of the machine, and what to call it with."""
    action = rng.random()
    pick, stream = rng.randrange(1 << 20), rng.randrange(3)
    sizes = [rng.randrange(3001), rng.randrange(2 * MIB), rng.choice([MIB - 1, MIB, MIB + 1])]
    if action < 0.4:
        return "malloc", {"size": rng.choice([*sizes, rng.randrange(9 * MIB)]), "stream": stream}
    if action < 0.7:
        return "free", {"pick": pick}
    rules: list[tuple[str, dict[str, Any]]] = [
        ("free_in_a_finalizer", {"pick": pick}),
        ("use_on_another_stream", {"pick": pick, "stream": stream}),
        ("finish_the_work_of_a_stream", {"stream": stream}),
        ("capture", {"stream": rng.choice([None, None, 1])}),
        ("release_idle", {"include": pick % 2 == 0, "stream": rng.choice([None, None, 0, 1])}),
        ("set_limit", {"limit_mb": rng.choice([0, 5, 30])}),
        ("reset_peaks", {}),
        ("follow", {"pick": pick, "stops": pick % 3 == 0}),
        ("begin_step", {}),
        *[("malloc_as_planned", {"pick": pick})] * 6,
        ("record_a_trace", {"record": pick % 2 == 0}),
    ]
    return rng.choice(rules)


def run_drawn(machine: type[AllocatorMachine], seed: int, steps: int) -> None:
    """The machine's rules in a random order, without hypothesis, which costs more than they do:
    for benchmarks/gpu_alloc_sound.py.
    """
    rng = random.Random(seed)
    config = {name: rng.choice(values) for name, values in _SETTINGS.items()}
    now = machine()
    capacity_mb, page_bytes = rng.randrange(41), rng.choice(_PAGES)
    now.make(AllocatorConfig(**config), capacity_mb, page_bytes)
    for step in range(steps):
        name, arguments = _drawn(rng)
        try:
            getattr(now, name)(**arguments)
            now.memory_is_sound()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}, {name}: {error}") from error


def test_random_operations_keep_memory_sound() -> None:
    run_machine(AllocatorMachine, examples=30, steps=40)


class BothCoresMachine(AllocatorMachine):
    kinds = (TwoPoolAllocator, NativeAllocator)


def test_the_compiled_core_decides_as_the_python_core_at_every_operation() -> None:
    try:
        native_library()
    except NativeUnavailableError as error:
        pytest.skip(f"no compiled core: {error}")
    run_machine(BothCoresMachine, examples=40, steps=40)
    seed = random.SystemRandom().randrange(1 << 30)
    for number in range(20):
        run_drawn(BothCoresMachine, seed + number, 50)
