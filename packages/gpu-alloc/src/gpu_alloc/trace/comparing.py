"""Policies side by side: the smallest device on which each runs a trace, over the peak of live
bytes; and, for a snapshot of torch's, what torch itself reserved.

Invariant: the figure of a policy is a capacity on which it was replayed. Torch's is a peak of
reserved bytes without a limit, and so an upper bound of the device that torch needs.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.errors import check_kind
from gpu_alloc.trace.files import is_torch_snapshot, load_trace
from gpu_alloc.trace.replaying import minimal_capacity
from gpu_alloc.trace.torch_snapshot import device_history
from gpu_alloc.trace.tuning import tune

_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one policy needs for a trace, in bytes and over the trace's peak of live bytes."""

    policy: str
    capacity_bytes: int
    ratio: float


def compare(
    path: str | os.PathLike[str],
    policies: Mapping[str, AllocatorConfig],
    *,
    device: int | None = None,
) -> list[Comparison]:
    """The smallest device of each policy for the trace in a file, in the order given; then that of
    the settings that `tune` finds; then, of a torch snapshot, what torch reserved. `device` is one
    of a snapshot's.

    Raises as `load_trace`, `minimal_capacity` and `tune` do.
    """
    check_kind(policies, Mapping, "policies must map names to AllocatorConfigs")
    trace = load_trace(path, device=device)
    needs = {name: minimal_capacity(trace, config) for name, config in policies.items()}
    tuned = tune(trace)
    needs[f"tuned: {tuned.config.format()}"] = tuned.capacity_bytes
    if is_torch_snapshot(path):
        needs["torch, as it ran"] = torch_reserved_peak(path, device=device)
    live = tuned.peak_live_bytes
    return [
        Comparison(policy=n, capacity_bytes=size, ratio=size / live) for n, size in needs.items()
    ]


def torch_reserved_peak(
    snapshot: Mapping[str, Any] | str | os.PathLike[str], *, device: int | None = None
) -> int:
    """Most bytes that torch held in segments during the history of a snapshot."""
    entries, segments = device_history(snapshot, device)
    held = sum(segment["total_size"] for segment in segments)
    return max(_backwards(held, entries), default=held)


def _backwards(held: int, entries: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """From what is held at the end back to the beginning, of which only the changes are known."""
    yield held
    for entry in reversed(entries):
        held -= _SIGNS.get(entry["action"], 0) * entry["size"]
        yield held
