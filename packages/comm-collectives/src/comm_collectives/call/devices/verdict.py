"""What is wrong with something that a device does not end, from what the ranks say of themselves.

Pure: the same words give every rank the same kind of error.

    find_culprit(stuck, views={1: View()}, gone=frozenset(), is_late=True, ranks=(0, 1), limit_s=30)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    MismatchError,
    PeerFailedError,
)

DevicePlace = tuple[int, int]  # number of a call, and which of its transfers on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """What a device has not ended.

    Attributes:
        place: number 0 is a transfer between two ranks, which stands in no order of calls.
        word: the same on ranks that make the same call.
        text: the call with its arguments and line, for errors.
        peers: ranks inside the group without which it does not end.
    """

    place: DevicePlace
    word: int
    text: str
    peers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a rank has said of itself.

    Attributes:
        queued: the last place in the order of calls that its device was given.
        stuck: what its device has not ended for a while.
        elsewhere: what its devices have not ended in other groups.
        is_known: whether it has said anything since it was asked.
    """

    queued: DevicePlace = (0, 0)
    stuck: Stuck | None = None
    elsewhere: str = ""
    is_known: bool = False

    def asked(self) -> "View":
        """Return the same for a rank that has yet to answer."""
        return replace(self, is_known=False)


Verdict = tuple[type[CommError], str]


def find_culprit(
    stuck: Stuck,
    *,
    views: Mapping[int, View],
    gone: Collection[int],
    is_late: bool,
    ranks: Sequence[int],
    limit_s: float,
) -> Verdict | None:
    """Return the class and the text of the error, None while there may be none.

    Args:
        views: by rank inside the group, of all that `stuck` needs.
        gone: those whose process has ended.
        is_late: whether the limit is about to pass.
        ranks: what the ranks of the group are called in errors.
    """
    dead = sorted(stuck.peers & set(gone))
    if dead:
        return (
            PeerFailedError,
            f"lost a peer: {_names(dead, ranks)} has ended or given up its group",
        )
    others = {peer: view.stuck for peer, view in views.items() if peer in stuck.peers}
    differing = [
        f"rank {ranks[peer]}: {theirs.text}"
        for peer, theirs in sorted(others.items())
        if theirs is not None
        and stuck.place[0]
        and theirs.place == stuck.place
        and theirs.word != stuck.word
    ]
    if differing:
        return MismatchError, f"differs between ranks: here {stuck.text}; {'; '.join(differing)}"
    if not is_late:
        return None
    absent = [peer for peer in sorted(stuck.peers) if not _has_come(views[peer], stuck)]
    about = f"did not end on the device in {limit_s:g} s"
    if not absent:
        return (
            CollectiveTimeoutError,
            f"{about}, though all its ranks have queued it: a device, or the network between "
            f"devices, hangs ({stuck.text})",
        )
    told = ", ".join(f"rank {ranks[peer]} ({_where(views[peer])})" for peer in absent)
    return CollectiveTimeoutError, f"{about}; did not arrive: {told}; here {stuck.text}"


def _has_come(view: View, stuck: Stuck) -> bool:
    return bool(stuck.place[0]) and view.is_known and view.queued >= stuck.place


def _where(view: View) -> str:
    if not view.is_known:
        return "its process does not answer: it is stopped, or cannot be reached"
    place = f"last in call {view.queued[0]}" if view.queued[0] else "no call on its device yet"
    if view.stuck is not None:
        place += f", its device waits for {view.stuck.text}"
    return f"{place}, and waits for {view.elsewhere}" if view.elsewhere else place


def _names(peers: Sequence[int], ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {ranks[peer]}" for peer in peers)
