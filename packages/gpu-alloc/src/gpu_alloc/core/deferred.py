"""Freed blocks that other streams may still be using, until events say that they are not.

A block goes through two states: given back, but its events not yet recorded (a graph is being
captured, into which an event would go); then waiting for its events, in the order of the frees.

Invariant: `done` returns each block once, after all events of its users are done.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, final

from gpu_alloc.core.block import Block
from gpu_alloc.sources import StreamEvents


@final
class DeferredFrees:
    """The blocks of one allocator that wait; it holds its lock around every call."""

    def __init__(self, events: StreamEvents) -> None:
        self._events = events
        self._unrecorded: deque[tuple[Block, frozenset[int]]] = deque()
        self._waiting: deque[tuple[Block, list[Any], frozenset[int]]] = deque()

    def __len__(self) -> int:
        return len(self._unrecorded) + len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the blocks that wait."""
        unrecorded = sum(block.size for block, _ in self._unrecorded)
        return unrecorded + sum(block.size for block, _, _ in self._waiting)

    def add(self, block: Block, streams: frozenset[int]) -> None:
        """Take a block that was given back and is in use on `streams`."""
        self._unrecorded.append((block, streams))

    def done(self, *, everything: bool = False, wait: bool = False) -> Iterator[Block]:
        """The blocks that no stream uses any more: of the oldest on, up to the first that waits;
        with `everything` also those behind it; with `wait` all, once their work is done. None
        while a graph is captured.
        """
        if self._captures(stream for _, streams in self._unrecorded for stream in streams):
            return
        while self._unrecorded:
            block, streams = self._unrecorded[0]  # it stays if an event cannot be recorded
            events = [self._events.record(stream) for stream in sorted(streams)]
            self._unrecorded.popleft()
            self._waiting.append((block, events, streams))
        if self._captures(stream for _, _, streams in self._waiting for stream in streams):
            return
        for _ in range(len(self._waiting)):
            block, events, streams = self._waiting[0]  # it stays if the wait is broken off
            if wait:
                for event in events:
                    self._events.wait(event)
            is_done = wait or all(self._events.is_done(event) for event in events)
            self._waiting.popleft()
            if is_done:
                yield block
            elif everything:
                self._waiting.append((block, events, streams))
            else:
                self._waiting.appendleft((block, events, streams))
                return

    def _captures(self, streams: Iterator[int]) -> bool:
        return any(self._events.is_capturing(stream) for stream in set(streams))
