"""Run one transfer to its end: start it, wait with a limit, and turn a failure into a named error.

Invariant: a call returns with its data in place, or raises a `CommError` naming this rank, the
call, its number, the group's ranks and (best effort) who did not arrive. It never waits for longer
than its limit (the group's own when none is given) plus the few seconds of the enquiry.

    call = Call(state, "all_to_all", timeout_s=30)
    call.run(lambda: dist.all_to_all_single(out, x, group=group, async_op=True), on_cpu=True)
"""

from collections.abc import Callable
from datetime import timedelta
from typing import final

import torch.distributed as dist

from comm_collectives.errors import CollectiveTimeoutError, CommError, PeerFailedError
from comm_collectives.groups import GroupState, check_timeout
from comm_collectives.reports import GRACE_S, PeersView, Report, ask_peers, has_arrived, post

# A rank that waits for longer than this says so in the store, so that a peer whose limit passes
# earlier does not count it among the missing. Shorter waits cost nothing.
_SLOW_S = 1.0
# Gloo closes a connection whose transfer ran into its limit; what comes later fails with this.
_CLOSED_WORDS = ("pair closure",)
_TIMEOUT_WORDS = ("timed out", "timeout")
_PEER_WORDS = ("connection closed", "connection reset", "broken pipe", "connection refused", "peer")


@final
class Call:
    """One numbered collective of one group on this rank; may run several exchanges in turn."""

    __slots__ = ("name", "number", "state", "timeout_s")

    def __init__(self, state: GroupState, name: str, *, timeout_s: float | None = None) -> None:
        check_timeout(timeout_s)
        self.state = state
        self.name = name
        self.timeout_s = timeout_s
        self.number = state.next_call()

    def run(self, start: Callable[[], dist.Work | None], *, on_cpu: bool) -> None:
        """Start an asynchronous collective and wait for it.

        On an accelerator without a limit the wait is only ordered on the stream, as torch does it.

        Raises:
            CommError: the collective failed; the subclass says how.
        """
        try:
            work = start()
            if work is not None:
                self._wait(work, on_cpu)
        except RuntimeError as error:
            raise self._explain(error) from error

    def _wait(self, work: dist.Work, on_cpu: bool) -> None:
        limit_s = self.timeout_s
        if not on_cpu:
            # A wait that runs into its limit aborts an NCCL communicator, so there is only one.
            wait_for(work, limit_s)
            return
        try:
            wait_for(work, _SLOW_S if limit_s is None else min(_SLOW_S, limit_s))
        except RuntimeError:
            if work.is_completed() or (limit_s is not None and limit_s <= _SLOW_S):
                raise
            post(self.state, self._report(failed=False))
            wait_for(work, None if limit_s is None else limit_s - _SLOW_S)

    def _report(self, *, failed: bool) -> Report:
        return Report(group=self.state.name, number=self.number, name=self.name, failed=failed)

    def _explain(self, error: RuntimeError) -> CommError:
        state, own = self.state, self._report(failed=True)
        kind, what = classify(error, self.timeout_s)
        head = (
            f"rank {state.global_rank}: {self.name} call {self.number} "
            f"of group {state.ranks} {what}"
        )
        if kind is CommError:
            post(state, own)
            return CommError(f"{head}: {first_line(error)}")
        view = ask_peers(state, own)
        return kind(f"{head}; {_who(state, own, view)}. Cause: {first_line(error)}")


def wait_for(work: dist.Work, timeout_s: float | None) -> None:
    """Wait for a transfer; None waits as long as the group allows."""
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def classify(error: RuntimeError, timeout_s: float | None) -> tuple[type[CommError], str]:
    """Tell a passed limit, a lost peer and a refused operation apart, by the backend's text."""
    text = str(error).lower()
    if any(word in text for word in _CLOSED_WORDS):
        return PeerFailedError, "has no connection to a peer since an earlier call timed out"
    if any(word in text for word in _TIMEOUT_WORDS):
        limit = "the group's limit" if timeout_s is None else f"{timeout_s:g} s"
        return CollectiveTimeoutError, f"timed out after {limit}"
    if any(word in text for word in _PEER_WORDS):
        return PeerFailedError, "lost a peer"
    return CommError, "failed"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, which is the one that says something."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _who(state: GroupState, own: Report, view: PeersView) -> str:
    others = [rank for rank in state.ranks if rank != state.global_rank]
    missing = [rank for rank in others if not has_arrived(view.reports.get(rank), own)]
    parts = []
    if view.problem is not None:
        parts.append(f"who did not arrive is not known ({view.problem})")
    elif missing:
        names = ", ".join(f"rank {rank}{_elsewhere(view.reports.get(rank))}" for rank in missing)
        parts.append(f"did not arrive: {names} (no report of this call within {GRACE_S:g} s)")
    else:
        parts.append("every rank of the group arrived")
    arrived = [rank for rank in others if rank not in missing]
    if arrived:
        parts.append("arrived: " + ", ".join(f"rank {rank}" for rank in arrived))
    return "; ".join(parts)


def _elsewhere(report: Report | None) -> str:
    if report is None:
        return ""
    verb = "failed" if report.failed else "waited"
    return f" (last {verb} in {report.name} call {report.number} of group {report.group!r})"
