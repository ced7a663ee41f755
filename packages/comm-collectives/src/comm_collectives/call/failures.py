"""Say what went wrong with a transfer: its kind by the backend's words, and who is to blame.

kind, what = classify(error, timeout_s)          # CollectiveTimeoutError, "timed out after 2 s"
raise kind(f"{call} {what}; {who_is_missing(state, report)}")
"""

from collections.abc import Sequence

from comm_collectives.call.control import Arrival, MailboxExchange
from comm_collectives.call.groups import GroupState
from comm_collectives.call.reports import GRACE_S, Report, ask_peers, has_arrived
from comm_collectives.call.signature import SignatureWords
from comm_collectives.errors import CollectiveTimeoutError, CommError, PeerFailedError

# Gloo closes a connection whose transfer ran into its limit; what comes later fails with this.
_CLOSED_WORDS = ("pair closure",)
_TIMEOUT_WORDS = ("timed out", "timeout")
_PEER_WORDS = ("connection closed", "connection reset", "broken pipe", "connection refused", "peer")
_LOOK_S = 0.02


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


def dead_ranks(state: GroupState, *, grace_s: float = 0.0) -> tuple[int, ...]:
    """Return the ranks (inside the group) whose process has ended, if this group can know.

    `grace_s` bounds the wait for a process that is ending, whose connections close a little before.
    """
    control = state.control
    if not isinstance(control, MailboxExchange):
        return ()
    clock = state.transport.clock
    deadline_s = clock.now_s() + grace_s
    while True:
        dead = control.mailbox.dead()
        if dead or clock.now_s() >= deadline_s:
            return dead
        clock.sleep(_LOOK_S)


def describe_absent(
    state: GroupState, arrival: Arrival, limit_s: float
) -> tuple[type[CommError], str]:
    """Return the kind of error and its text for a control exchange to which not all ranks came."""
    if arrival.dead:
        names = _names(state, arrival.dead)
        return PeerFailedError, f"lost a peer: {names} has ended or given up its group"
    others = [rank for rank in range(state.size) if rank != state.rank]
    gave_up = [rank for rank in arrival.withdrawn if rank != state.rank]
    if not arrival.missing:
        text = f"came too late: {_names(state, gave_up)} had given up waiting"
        if not gave_up:  # this rank did, and just then all had come
            late = _names(state, others)
            text = f"timed out after {limit_s:g} s; arrived too late: the last of {late}"
        return CollectiveTimeoutError, text
    arrived = [rank for rank in others if rank not in arrival.missing]
    missing = ", ".join(f"rank {state.ranks[r]}{_last_seen(state, r)}" for r in arrival.missing)
    what = f"timed out after {limit_s:g} s"
    if gave_up:
        what = f"timed out at {_names(state, gave_up)}, which gave up waiting"
    text = f"{what}; did not arrive: {missing}"
    if arrived:
        text += f"; arrived: {_names(state, arrived)}"
    return CollectiveTimeoutError, text


def _names(state: GroupState, ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {state.ranks[rank]}" for rank in ranks)


def who_is_missing(state: GroupState, own: Report) -> str:
    """Ask the store which ranks were in this call."""
    view = ask_peers(state, own)
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


def _last_seen(state: GroupState, rank: int) -> str:
    control = state.control
    if not isinstance(control, MailboxExchange):
        return ""
    number, head = control.mailbox.last_posted()[rank]
    if number == 0:
        return " (not seen in this group yet)"
    words = SignatureWords.unpack(head)
    return f" (last in {words.operation_name} call {words.number})"


def _elsewhere(report: Report | None) -> str:
    if report is None:
        return ""
    verb = "failed" if report.failed else "waited"
    return f" (last {verb} in {report.name} call {report.number} of group {report.group!r})"
