"""The handle of one call under NCCL's rules.

work = group.send([x], 1, 0)
work.wait()
"""

import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.distributed as dist

from devicetest.machine import Machine, Stream
from devicetest.nccl.exchange import NcclRuleError, Pending


@final
class Shelf:
    """What a collective on a stream of its own uses, kept until somebody has waited for it.

    Nobody waits for some; torch's watchdog keeps these until they have ended.
    """

    def __init__(self, tensors: list[torch.Tensor], machine: Machine, stream: Stream) -> None:
        self._tensors, self._machine, self._stream = tensors, machine, stream

    def clear(self) -> None:
        """Let go of them: whoever frees them now has to be ordered behind the collective."""
        self._tensors.clear()

    def keep_until_ended(self) -> None:
        """Let go of what is left when the collective has ended."""
        for tensor in self._tensors:
            self._machine.record_stream(tensor, self._stream)
        self._tensors.clear()


@final
class RuleWork(dist.Work):
    """As NCCL's: `wait()` lets the current stream wait, `wait(timeout)` stops the host."""

    def __init__(
        self,
        pending: Pending,
        *,
        limit_s: float | None,
        results: list[torch.Tensor],
        before_wait: Callable[[bool], None],
        expired: Callable[[], None],
    ) -> None:
        """Wrap a pending call.

        Args:
            before_wait: told at each wait whether it has a limit.
            expired: told of a wait whose limit has passed.
        """
        super().__init__()
        self._pending, self._limit_s, self._results = pending, limit_s, results
        self._before_wait, self._expired = before_wait, expired
        self._shelf: Shelf | None = None

    def keep(self, shelf: Shelf) -> None:
        """Keep what the call uses until it is waited for."""
        self._shelf = shelf
        weakref.finalize(self, shelf.keep_until_ended)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end.

        Raises:
            NcclRuleError: it never comes, or not within the group's limit or the one given.
        """
        limit_s = timeout.total_seconds()
        self._before_wait(limit_s > 0)
        try:
            self._pending.wait(limit_s if limit_s > 0 else self._limit_s)  # None: for ever
        except NcclRuleError:
            self._expired()
            raise
        if self._shelf is not None:
            self._shelf.clear()
        return True

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._pending.ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._pending.ended.is_set() and not self._pending.error

    def exception(self) -> Any:
        """Return what went wrong, None if nothing."""
        return RuntimeError(self._pending.error) if self._pending.error else None

    def get_future_result(self) -> Any:
        """Return a future that says whether it has ended, as NCCL's watchdog fills one."""
        return SimpleNamespace(done=self._pending.ended.is_set)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of these tensors; torch's own waits in the stream, this one here."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self._results)
        return future
