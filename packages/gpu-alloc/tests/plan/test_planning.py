import random
from collections.abc import Iterator

import pytest

from gpu_alloc import TraceEvent, plan_step
from gpu_alloc.errors import AllocTypeError, AllocValueError, TraceError

MIB = 1 << 20


def random_step(rng: random.Random) -> Iterator[TraceEvent]:
    live: list[tuple[int, int]] = []
    for block in range(rng.randrange(1, 120)):
        stream = rng.randrange(2)
        live.append((block, stream))
        yield TraceEvent(
            action="alloc",
            block_id=block,
            size_bytes=rng.choice([rng.randrange(1, 9 * MIB), 2 * MIB]),
            stream=stream,
        )
        while live and rng.random() < 0.5:
            gone, stream = live.pop(rng.randrange(len(live)))
            yield TraceEvent(action="free", block_id=gone, stream=stream)
    for gone, _ in live[len(live) // 2 :]:
        yield TraceEvent(action="free", block_id=gone)


def test_blocks_that_live_together_share_no_byte_and_streams_none_at_all() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    for number in range(30):
        rng = random.Random(seed + number)
        trace = [TraceEvent(action="alloc", block_id=-1, size_bytes=1)]
        trace += [TraceEvent(action="free", block_id=-1), *random_step(rng)]
        plan = plan_step(trace, larger_than_bytes=0)
        freed = {event.block_id for event in trace if event.action == "free"}
        taken = [e for e in trace if e.action == "alloc" and e.block_id in freed]
        assert [p[:2] for p in plan.places] == [
            (-(-event.size_bytes // 512) * 512, event.stream) for event in taken
        ], f"seed {seed + number}"
        places = dict(zip((event.block_id for event in taken), plan.places, strict=True))
        live: dict[int, tuple[int, int]] = {}
        for event in trace:
            if event.action == "free":
                live.pop(event.block_id)
            elif event.block_id in places:
                size, _, start = places[event.block_id]
                for low, high in live.values():
                    assert start + size <= low or high <= start, f"seed {seed + number}"
                live[event.block_id] = start, start + size
        parts = plan.streams()
        for size, stream, start in plan.places:
            part = [s for s, first in parts if first <= start][-1]
            assert part == stream and size > 0, f"seed {seed + number}"


def test_only_the_named_step_is_planned() -> None:
    trace = []
    for step in range(3):
        trace.append(TraceEvent(action="mark", note=f"step {step}"))
        size = (step + 2) * MIB
        trace.append(TraceEvent(action="alloc", block_id=step, size_bytes=size))
        trace.append(TraceEvent(action="free", block_id=step))
        trace.append(TraceEvent(action="mark", note=f"end of step {step}"))
    plan = plan_step(trace, "step 1")
    assert plan.places == ((3 * MIB, 0, 0),)
    assert plan.step == "step 1"
    with pytest.raises(TraceError, match="no mark 'step 9'; it has"):
        plan_step(trace, "step 9")


def test_small_requests_and_those_that_outlive_the_step_are_left_out() -> None:
    trace = [
        TraceEvent(action="alloc", block_id=1, size_bytes=MIB),
        TraceEvent(action="alloc", block_id=2, size_bytes=4 * MIB),
        TraceEvent(action="free", block_id=1),
    ]
    with pytest.raises(TraceError, match="frees nothing above"):
        plan_step(trace)
    with pytest.raises(AllocValueError, match="alignment_size=0 is below 1"):
        plan_step(trace, alignment_size=0)
    with pytest.raises(AllocTypeError):
        plan_step(None)  # type: ignore[arg-type]


def test_a_stack_of_lifetimes_is_packed_to_its_peak() -> None:
    sizes = [3 * MIB, 5 * MIB, 2 * MIB, 8 * MIB]
    trace = [
        TraceEvent(action="alloc", block_id=i, size_bytes=size) for i, size in enumerate(sizes)
    ]
    trace += [TraceEvent(action="free", block_id=i) for i in reversed(range(len(sizes)))]
    assert plan_step(trace).size_bytes == sum(sizes)
