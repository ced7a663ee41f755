"""Events: how an allocator learns that work queued on a stream is done.

Invariant: a block that a second stream uses is handed out again only after an event that was
recorded on that stream, once the block was given back, is done.
"""

from abc import ABC, abstractmethod
from typing import Any


class StreamEvents(ABC):
    """What `TwoPoolAllocator.record_stream` needs of a device.

    An allocator calls these with its lock held: they must not call the allocator.
    """

    @abstractmethod
    def record(self, stream: int) -> Any:
        """An event behind all work that is queued on `stream` now. A stream that is gone is waited
        for as the whole device is; its event is done.
        """

    @abstractmethod
    def is_done(self, event: Any) -> bool:
        """Whether the work before the event is done, without waiting."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Return once the work before the event is done."""

    @abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured, from `stream` or from this thread's current one:
        events are then neither recorded nor asked.
        """
