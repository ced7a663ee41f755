"""A place for every request of one recorded step, so that the next step needs no search for any.

What a step takes and gives back is packed with all lifetimes known: the largest first, each at the
lowest place that is free for as long as it lives. What outlives the step is not planned.

Invariant: two places share a byte only if the one request is freed before the other comes, and
both are of one stream.

>>> trace = [
...     TraceEvent(action="alloc", block_id=1, size_bytes=3 << 20),
...     TraceEvent(action="free", block_id=1),
...     TraceEvent(action="alloc", block_id=2, size_bytes=3 << 20),
...     TraceEvent(action="free", block_id=2),
... ]
>>> plan_step(trace).places
((3145728, 0, 0), (3145728, 0, 0))
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_alloc.errors import TraceError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.plan.lifetime_plan import END_OF_STEP, LifetimePlan, check_alignment_size

_SPAN = 64  # events, of which the placed blocks are kept together
_WEIGHTS_OF_LIFETIME = (0.0, 0.1, 0.25)
_NEAR = 1.001  # of the peak of live bytes: no further order is tried


class _Life(NamedTuple):
    size: int
    stream: int
    start: int
    end: int


def plan_step(
    trace: Sequence[TraceEvent],
    step: str | None = None,
    *,
    alignment_size: int = 512,
    larger_than_bytes: int = 1 << 20,
) -> LifetimePlan:
    """The plan of the step that begins at the mark `step` of a recorded trace.

    It ends at the mark "end of <step>", as `TraceRecorder.phase` sets it, or with the trace. None:
    the whole trace. alignment_size: that of the settings under which the plan is followed.
    larger_than_bytes: what is not larger is left to the small pool, so that a step that differs
    does not keep a page for every small block.

    Raises TraceError when the trace has no such mark, or the step frees nothing so
    large that it takes.
    """
    check_kind(trace, Iterable, "trace must be a sequence of TraceEvents")
    check_alignment_size(alignment_size)
    events = _of_step(trace, step)
    lives = [life for life in _lives(events, alignment_size) if life.size > larger_than_bytes]
    if not lives:
        raise TraceError(
            f"{'the trace' if step is None else repr(step)} frees nothing above "
            f"{larger_than_bytes} bytes that it takes; record a whole step, or give less"
        )
    by_stream: dict[int, list[int]] = {}
    for number, life in enumerate(lives):
        by_stream.setdefault(life.stream, []).append(number)
    places = [0] * len(lives)
    first = 0
    for numbers in by_stream.values():
        packed = _pack([lives[number] for number in numbers])
        for number, offset in zip(numbers, packed, strict=True):
            places[number] = first + offset
        first = max(places[number] + lives[number].size for number in numbers)
    return LifetimePlan(
        places=tuple(
            (life.size, life.stream, place) for life, place in zip(lives, places, strict=True)
        ),
        alignment_size=alignment_size,
        step=step or "",
    )


def _of_step(trace: Sequence[TraceEvent], step: str | None) -> Sequence[TraceEvent]:
    if step is None:
        return trace
    marks = {event.note: i for i, event in enumerate(trace) if event.action == "mark"}
    if step not in marks:
        steps = [repr(mark) for mark in sorted(marks) if not mark.startswith(END_OF_STEP)]
        has = ", ".join(steps) or "none, which TraceRecorder.phase makes"
        raise TraceError(f"the trace has no mark {step!r}; it has {has}")
    return trace[marks[step] : marks.get(END_OF_STEP + step, len(trace))]


def _lives(events: Sequence[TraceEvent], alignment_size: int) -> list[_Life]:
    """Of what is taken and given back among the events, in the order in which it is taken."""
    taken: dict[int, tuple[int, TraceEvent]] = {}
    lives = []
    for index, event in enumerate(events):
        if event.action == "alloc" and event.size_bytes:
            taken[event.block_id] = index, event
        elif event.action == "free" and event.block_id in taken:
            start, alloc = taken.pop(event.block_id)
            size = -(-alloc.size_bytes // alignment_size) * alignment_size
            lives.append(_Life(size, alloc.stream, start, index))
    return sorted(lives, key=lambda life: life.start)


def _pack(lives: Sequence[_Life]) -> list[int]:
    """The best of three greedy orders: by size, with lifetimes counting not, a little, more."""
    enough = _NEAR * _peak(lives)
    best: list[int] = []
    for weight in _WEIGHTS_OF_LIFETIME:
        packed = _pack_in_order(lives, weight)
        if not best or _top(lives, packed) < _top(lives, best):
            best = packed
        if _top(lives, best) <= enough:
            break
    return best


def _peak(lives: Sequence[_Life]) -> int:
    live_bytes = peak = 0
    changes = [(life.start, life.size) for life in lives]
    changes += [(life.end, -life.size) for life in lives]
    for _, size in sorted(changes):
        live_bytes += size
        peak = max(peak, live_bytes)
    return peak


def _top(lives: Sequence[_Life], offsets: Sequence[int]) -> int:
    return max(life.size + offset for life, offset in zip(lives, offsets, strict=True))


def _pack_in_order(lives: Sequence[_Life], weight: float) -> list[int]:
    offsets = [0] * len(lives)
    spans: dict[int, set[tuple[int, int, int, int]]] = {}  # offset, end of it, start, end
    ranks = [-life.size * (life.end - life.start) ** weight for life in lives]
    for number in sorted(range(len(lives)), key=ranks.__getitem__):
        life = lives[number]
        touched = range(life.start // _SPAN, life.end // _SPAN + 1)
        beside: set[tuple[int, int, int, int]] = set()
        for span in touched:
            beside |= spans.get(span, set())
        offset = 0
        for low, high, start, end in sorted(beside):
            if start < life.end and life.start < end:
                if low - offset >= life.size:
                    break
                offset = max(offset, high)
        offsets[number] = offset
        for span in touched:
            spans.setdefault(span, set()).add((offset, offset + life.size, life.start, life.end))
    return offsets
