"""One step of an allocation trace, which the allocator records and every other room reads.

A trace holds requests, not placements, so one recorded run can be replayed through any
configuration and capacity. Invariant: an event that exists has a known action and whole numbers.

>>> TraceEvent(action="alloc", block_id=1, size_bytes=512).stream
0
"""

from dataclasses import dataclass
from typing import Literal, final

from gpu_alloc.errors import TraceError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One step: block `block_id` is taken with `size_bytes` for `stream`, or given back (its size
    is then ignored).

    Raises TraceError for an unknown action, a negative size or a field that is no
    integer.
    """

    action: Literal["alloc", "free"]
    block_id: int
    size_bytes: int
    stream: int = 0

    def __post_init__(self) -> None:
        if self.action not in ("alloc", "free"):
            raise TraceError(f"action {self.action!r} is unknown; expected 'alloc' or 'free'")
        for name, value in (
            ("block_id", self.block_id),
            ("size_bytes", self.size_bytes),
            ("stream", self.stream),
        ):
            if type(value) is not int:
                raise TraceError(
                    f"{name}={value!r} is a {type(value).__name__}; expected an integer"
                )
        if self.size_bytes < 0:
            raise TraceError(f"size_bytes={self.size_bytes} is negative; a size is 0 or more")
