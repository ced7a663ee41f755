"""One message between two ranks as its user sees it: its name in errors, and the handle of a send.

handle = lane.send("isend_tensors", [x], peer, limit_s=None)
handle.wait()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base.transport import Pending, classify, wait_for
from comm_collectives.call.groups import GroupState
from comm_collectives.call.handles import Awaiting
from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    PeerFailedError,
    first_line,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Message `place` of those under `key` from `src` to `dst` (ranks inside the group).

    `holds` says that it can be waited for with nothing else to do; `awaiting` who does, if a thread
    of this package waits for it.
    """

    name: str
    state: GroupState
    src: int
    dst: int
    key: int
    place: int
    limit_s: float | None
    holds: bool = True
    awaiting: Awaiting | None = None

    @property
    def peer(self) -> int:
        """The other rank, inside the group."""
        return self.src if self.dst == self.state.rank else self.dst

    def late(self) -> CommError:
        """Return the error for a peer that did not come."""
        limit = "the group's limit" if self.limit_s is None else f"{self.limit_s:g} s"
        return CollectiveTimeoutError(f"{self} timed out after {limit}{self._blame()}")

    def lost(self) -> CommError:
        """Return the error for a peer that is gone."""
        return PeerFailedError(
            f"{self} lost a peer{self._blame()}: it has ended, or left the group"
        )

    def explain(self, error: RuntimeError) -> CommError:
        """Return the error for what a backend said of data on a device."""
        kind, what = classify(error, self.limit_s)
        blame = "" if kind is CommError else self._blame()
        return kind(f"{self} {what}{blame}. Cause: {first_line(error)}")

    def _blame(self) -> str:
        return "" if self.src < 0 else f"; rank {self.state.ranks[self.peer]} did not do its part"

    def __str__(self) -> str:
        ranks = self.state.ranks
        number = f"tag {-self.key - 1}" if self.key < 0 else f"transfer {self.place}"
        source = "any rank" if self.src < 0 else f"rank {ranks[self.src]}"
        return (
            f"rank {self.state.global_rank}: {self.name}, {number} from {source} to rank "
            f"{ranks[self.dst]} of group {ranks}"
        )


@final
class SendHandle:
    """A send under way. Leave the tensors unchanged until `wait` has returned."""

    def __init__(
        self,
        transfer: Transfer,
        works: list[Pending],
        finish: Callable[[Transfer], None],
        is_done: Callable[[], bool],
        kept: Sequence[torch.Tensor],
    ) -> None:
        self.transfer = transfer
        self._works, self._finish, self._is_done = works, finish, is_done
        self._kept = kept

    @graph_break
    def wait(self) -> None:
        """Wait until the tensors may be changed. Not collective; may be called again.

        Raises:
            CommError: the transfer failed; the text names both ranks and the transfer.
        """
        self._finish(self.transfer)
        try:
            while self._works:
                wait_for(self._works[0], self.transfer.limit_s)
                del self._works[0]
        except RuntimeError as error:
            raise self.transfer.explain(error) from error
        self._kept = ()

    def is_done(self) -> bool:
        """Whether the tensors may be changed."""
        return self._is_done() and all(work.is_completed() for work in self._works)
