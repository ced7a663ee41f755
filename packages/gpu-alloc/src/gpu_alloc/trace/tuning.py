"""The settings under which a trace needs the smallest device, found on its first steps.

A candidate is a way to make settings for a device of a given size, since a slab is as large as the
device lets it be. Candidates are ranked on the first part of a trace; the best are then measured on
all of it, so that the figure counts steps that the ranking has not seen. The default settings are
always measured.

Invariant: what is returned was replayed: `config` runs the whole trace on `capacity_bytes`, which
is no more than `minimal_capacity` of the default settings, if they keep to the calls there, but for
the 3% that mapped pages may need above settings that are fitted to the trace.

>>> step = [TraceEvent(action="alloc", block_id=1, size_bytes=3 << 20)]
>>> tune(step).capacity_bytes >> 20
4
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, final

from gpu_alloc.core import MIB, AllocatorConfig
from gpu_alloc.errors import AllocValueError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.sources import round_up
from gpu_alloc.trace.replaying import least_capacity
from gpu_alloc.trace.requests import GRANULARITY_BYTES, Requests

_FINALISTS = 64
_FEW_CALLS = 100  # of the source, which any trace may make
_LARGEST = 64  # times the peak of live bytes: what fails there fails everywhere
_CHUNKS_MB = (20, 64, 256)
_SMALL_MB = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SMALL_MB_BACK = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 64, 256)
_TIMES = (1, 2, 3)  # of the largest small request, that the pool of small ones grows by
_DEFAULT = "growth by the request"
_VIRTUAL = "virtual memory"
_NEAR = 1.03  # times a fitted device: what pages may need and be taken for it

Candidate = Callable[[int], AllocatorConfig]  # settings for a device of so many MiB
_Ranked = tuple[int, str, Candidate]  # bytes on the first part of the trace
_Won = tuple[int, int, str, Candidate]  # bytes on all of it, bytes on its first part


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `tune` found.

    name: of the candidate that won. capacity_bytes: the smallest device on which it runs the trace.
    peak_live_bytes: the floor. num_source_calls: how often memory was taken from the device or
    given back during the trace, each of which waits for the device. first_ratio, ratio: capacity
    over the peak of live bytes, on the first part of the trace, which the choice has seen, and on
    all of it.
    """

    name: str
    config: AllocatorConfig
    capacity_bytes: int
    peak_live_bytes: int
    num_source_calls: int
    first_ratio: float
    ratio: float

    def to_toml(self) -> str:
        """The settings as a file that `gpu_alloc.cupy.use` reads."""
        lines = [
            f"# {self.name}: {self.ratio:.3f} x the peak of live bytes, "
            f"on a device of {self.capacity_bytes} bytes",
            "[gpu_alloc]",
        ]
        for field in fields(self.config):
            lines.append(f"{field.name} = {str(getattr(self.config, field.name)).lower()}")
        return "\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_toml()` to a file."""
        check_kind(path, (str, os.PathLike), "path must be a str or a Path")
        Path(path).write_text(self.to_toml(), encoding="utf-8")


def candidates(requests: Requests) -> Mapping[str, Candidate]:
    """What is tried for a trace, by name."""
    found: dict[str, Candidate] = {
        _DEFAULT: partial(_of_size, AllocatorConfig()),
        "one pool, growth by the request": partial(
            _of_size, AllocatorConfig(small_pool_size_in_mb=0)
        ),
        "one slab for all": partial(_slab, AllocatorConfig(small_pool_size_in_mb=0)),
        "half a slab, then by the request": _half_slab,
        "idle chunks given back before growth": partial(
            _of_size, AllocatorConfig(free_when_no_cache_hit=True)
        ),
    }
    found["each large block taken and given back"] = partial(
        _of_size, AllocatorConfig(free_idle_chunk=True)
    )
    for chunk_mb in _CHUNKS_MB:
        config = AllocatorConfig(large_pool_auto_growth_chunk_size_in_mb=chunk_mb)
        found[f"growth by {chunk_mb} MiB"] = partial(_of_size, config)
    for size_mb in _SMALL_MB:
        config = AllocatorConfig(
            small_pool_size_in_mb=size_mb, small_pool_auto_growth_chunk_size_in_mb=size_mb
        )
        held = requests.run(config, None)[2].small.reserved_peak_bytes
        small_mb = round_up(held, GRANULARITY_BYTES) // MIB
        name = f"a slab beside a pool up to {size_mb} MiB"
        found[name] = partial(_slab, config, beside_mb=small_mb)
        found[f"{name} with a slab"] = partial(_slab, config, beside_mb=small_mb, small=True)
    for size_mb, times in product(_SMALL_MB_BACK, _TIMES):
        config = AllocatorConfig(
            small_pool_size_in_mb=size_mb,
            small_pool_auto_growth_chunk_size_in_mb=times * size_mb,
            free_when_no_cache_hit=True,
        )
        name = f"idle chunks given back before growth, beside a pool up to {size_mb} MiB"
        found[name if times == 1 else f"{name} in chunks of {times * size_mb}"] = partial(
            _of_size, config
        )
    return found


def _of_size(config: AllocatorConfig, device_mb: int) -> AllocatorConfig:
    return config


def _half_slab(device_mb: int) -> AllocatorConfig:
    return AllocatorConfig(large_pool_pre_alloc_in_mb=device_mb // 2)


def _slab(
    config: AllocatorConfig, device_mb: int, *, beside_mb: int = 0, small: bool = False
) -> AllocatorConfig:
    """A slab of what `beside_mb` leaves of the device, and with `small` one of those too."""
    return replace(
        config,
        large_pool_pre_alloc_in_mb=max(device_mb - beside_mb, 0),
        small_pool_pre_alloc_in_mb=min(beside_mb, device_mb) if small else 0,
    )


def tune(
    trace: Sequence[TraceEvent],
    *,
    first: float = 0.4,
    calls_per_event: float = 0.05,
    virtual_memory: bool = True,
) -> Tuned:
    """The candidate that runs `trace` on the smallest device, chosen on its `first` part.

    calls_per_event: how often, at most, memory may be taken from the device or given back, for each
        event of the trace. More of it needs a smaller device and takes longer.
    virtual_memory: whether `use_virtual_memory` is tried, too, for programs that run where pages
        can be mapped. It needs as little in runs that are not as the recorded one; what is fitted
        to one run does not, and is taken only where its device is more than 3% smaller.

    About 700 replays of the first part and 400 of the whole. Raises AllocValueError for a trace
    without allocations or a part outside (0, 1], TraceError as `replay` does.
    """
    check_kind(trace, Sequence, "trace must be a sequence of TraceEvents")
    check_kind(virtual_memory, bool, "virtual_memory must be True or False")
    _check_numbers(first, calls_per_event)
    requests = Requests(trace)
    live = requests.peak_live_bytes
    if not live:
        raise AllocValueError("the trace allocates nothing; record a program that does")
    beginning = Requests(trace[: max(int(len(trace) * first), 1)])
    live_first = max(beginning.peak_live_bytes, 1)
    ranked: list[_Ranked] = []
    tried = dict(candidates(beginning))
    if virtual_memory:
        tried[_VIRTUAL] = partial(_of_size, AllocatorConfig(use_virtual_memory=True))
    for name, candidate in tried.items():
        size = smallest_device(beginning, candidate, _Limits(calls_per_event, None))
        if size is not None:
            ranked.append((size, name, candidate))
    ranked.sort(key=lambda entry: entry[0])
    finalists = ranked[:_FINALISTS]
    # What did badly at the beginning may do best in the end; the defaults are what a user has.
    finalists += [entry for entry in ranked[_FINALISTS:] if entry[1] == _DEFAULT]
    won = _defaults(requests, finalists, calls_per_event)
    for size_first, name, candidate in finalists:
        limits = _Limits(calls_per_event, won[0] if won else None)
        size = smallest_device(requests, candidate, limits)
        if size is not None and (won is None or size < won[0]):
            won = (size, size_first, name, candidate)
    if won is None:
        raise AllocValueError("no candidate runs the trace on any device")
    won = _pages_if_near(requests, ranked, won, calls_per_event)
    size, size_first, name, candidate = won
    stats = requests.run(candidate(size // MIB), size)[2]
    return Tuned(
        name=name,
        config=candidate(size // MIB),
        capacity_bytes=size,
        peak_live_bytes=live,
        num_source_calls=stats.num_source_calls,
        first_ratio=size_first / live_first,
        ratio=size / live,
    )


def _pages_if_near(
    requests: Requests, ranked: Sequence[_Ranked], won: _Won, calls_per_event: float
) -> _Won:
    """Mapped pages, if they need little more than what won; they were not fitted to this trace."""
    for size_first, name, candidate in ranked:
        if name == _VIRTUAL:
            limits = _Limits(calls_per_event, int(_NEAR * won[0]))
            size = smallest_device(requests, candidate, limits)
            if size is not None:
                return size, size_first, name, candidate
    return won


def _check_numbers(first: float, calls_per_event: float) -> None:
    check_kind(first, (int, float), "first must be a number")
    check_kind(calls_per_event, (int, float), "calls_per_event must be a number")
    if not 0 < first <= 1:
        raise AllocValueError(f"first={first} is outside (0, 1]; use for example 0.4")
    if not calls_per_event >= 0:
        raise AllocValueError(f"calls_per_event={calls_per_event} is not 0 or more; 0.05 is usual")


def _defaults(
    requests: Requests, finalists: Sequence[_Ranked], calls_per_event: float
) -> _Won | None:
    """The default settings on the device that `minimal_capacity` names, if they keep to the calls.

    More memory may hurt, so that a search that begins elsewhere can end on a larger one.
    """
    for size_first, name, candidate in finalists:
        if name == _DEFAULT:
            size = least_capacity(requests, AllocatorConfig())
            calls = requests.run(AllocatorConfig(), size)[2].num_source_calls
            if calls <= _most_calls(requests, calls_per_event):
                return size, size_first, name, candidate
    return None


def _most_calls(requests: Requests, calls_per_event: float) -> float:
    return calls_per_event * requests.num_events + _FEW_CALLS


class _Limits(NamedTuple):
    """Of what a candidate may need: calls of the source for each event, bytes (None: any)."""

    calls_per_event: float
    at_most: int | None


def smallest_device(requests: Requests, candidate: Candidate, limits: _Limits) -> int | None:
    """Smallest device, in bytes, on which a candidate runs the requests; None when it is above
    what is allowed.
    """
    calls = _most_calls(requests, limits.calls_per_event)

    def runs(pages: int) -> bool:
        size = pages * GRANULARITY_BYTES
        _, oom, stats = requests.run(candidate(size // MIB), size)
        return oom is None and stats.num_source_calls <= calls

    fails = requests.peak_live_bytes // GRANULARITY_BYTES - 1
    works = 2 + 2 * max(fails, 1)
    if limits.at_most is not None:
        works = max(limits.at_most // GRANULARITY_BYTES, fails + 1)
    last = works if limits.at_most is not None else _LARGEST * works
    while not runs(works):
        if works >= last:
            return None
        works *= 2
    while works - fails > 1:
        middle = (works + fails) // 2
        if runs(middle):
            works = middle
        else:
            fails = middle
    return works * GRANULARITY_BYTES
