"""One step of an allocation trace, which the allocator records and every other room reads.

A trace holds requests, so one recorded run can be replayed through any configuration and capacity;
what our own pool recorded also says where it placed them. Invariant: an event that exists has a
known action and whole numbers.

>>> TraceEvent(action="alloc", block_id=1, size_bytes=512).stream
0
"""

from dataclasses import dataclass
from typing import Literal, final

from gpu_alloc.errors import TraceError

_ACTIONS = ("alloc", "free", "mark")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One step: block `block_id` is taken with `size_bytes` for `stream`, or given back (its size
    is then ignored), or the program reached what `note` names ("mark").

    thread: which thread did it, counted from 0 as they appear.
    note: of a mark its name, of an allocation the line that asked for it, `file.py:12`.
    chunk, offset_bytes: where a pool placed the block, as the number of the chunk in the order in
        which chunks were taken, and the place in it; chunk -1: not known.

    Raises TraceError for an unknown action, a negative size or a field of a wrong type.
    """

    action: Literal["alloc", "free", "mark"]
    block_id: int = 0
    size_bytes: int = 0
    stream: int = 0
    thread: int = 0
    note: str = ""
    chunk: int = -1
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise TraceError(
                f"action {self.action!r} is unknown; expected 'alloc', 'free' or 'mark'"
            )
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not int:
                raise TraceError(
                    f"{name}={value!r} is a {type(value).__name__}; expected an integer"
                )
        if type(self.note) is not str:
            raise TraceError(f"note={self.note!r} is a {type(self.note).__name__}; expected text")
        if self.size_bytes < 0:
            raise TraceError(f"size_bytes={self.size_bytes} is negative; a size is 0 or more")


_NUMBERS = ("block_id", "size_bytes", "stream", "thread", "chunk", "offset_bytes")
