"""Shared memory of simulated ranks: the real `SharedMailbox` runs on it, only waiting is simulated.

page = Page(size=3)
mailbox = SharedMailbox(SimRegion(page, world, ranks=(0, 1, 2), index=1), clock=clock, look_s=...)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from comm_collectives.call.control import InlinePages, SharedMailbox
from comm_collectives.simulation.scheduler import Signal
from comm_collectives.simulation.world import World
from comm_collectives.units import POLL_S

_PAGE_BYTES = 1024


@final
class Page:
    """What is shared: the bytes, and a signal for each word on which somebody waits."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(bytearray(SharedMailbox.num_bytes(size)))
        num_bytes = InlinePages.num_bytes(size, _PAGE_BYTES)
        self.inline_pages = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        self._signals: dict[int, Signal] = {}

    def signal(self, index: int) -> Signal:
        """Return the signal of one word."""
        return self._signals.setdefault(index, Signal())

    def signals(self) -> Iterator[Signal]:
        """Yield everything that somebody may wait for."""
        yield from self._signals.values()


@final
class SimRegion:
    """A page as one rank sees it; `rank` is its number inside the group."""

    def __init__(self, page: Page, world: World, *, ranks: Sequence[int], index: int) -> None:
        self._page, self._world, self._ranks = page, world, ranks
        self.memory = page.memory
        self.rank = index
        self.size = len(ranks)

    def fence(self) -> None:
        """Where faults strike: what was stored so far can be seen, and the rank may end here."""
        post = self._world.operate(self._ranks[self.rank])
        if post.reached is not None:
            self._world.die(self._ranks[self.rank])

    def wait_until(self, index: int, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()`; False at the limit, or when there may be news of dead ranks."""
        if ready():
            return True
        scheduler, dead = self._world.scheduler, self.dead()
        until_s = scheduler.now_s + (min(timeout_s, POLL_S) if dead else timeout_s)
        while scheduler.now_s < until_s and self.dead() == dead:
            scheduler.block(self._page.signal(index), until_s)
            if ready():
                return True
        return False

    def wake(self, index: int) -> None:
        """Have those who wait on a word look again."""
        self._world.scheduler.fire(self._page.signal(index))

    def dead(self) -> tuple[int, ...]:
        """Other ranks whose process has ended."""
        dead = self._world.dead
        if not dead:
            return ()
        return tuple(i for i, rank in enumerate(self._ranks) if rank in dead and i != self.rank)

    def close(self) -> None:
        """A simulated rank leaves when its process ends."""
