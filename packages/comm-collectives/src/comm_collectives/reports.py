"""Find out, after a call has failed, which ranks were in it: through the default group's store.

Nothing is written while calls go well. A rank that has waited for a while, or whose call failed,
leaves one short report under its global rank; a rank that failed reads the reports of its peers
for a bounded time. A peer that reports this call or a later one had arrived; one that reports
nothing is stuck elsewhere or dead. Best effort: a store that is gone is said to be gone.

    view = ask_peers(state, Report(group="0", number=7, name="all_to_all", failed=True))
"""

import json
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from comm_collectives._torch_private import Store, default_store
from comm_collectives.groups import GroupState

GRACE_S = 2.0  # how long a failed rank waits for the reports of its peers
_POLL_S = 0.05
_KEY = "comm_collectives/report/{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a rank is: in call `number` of the group named `group`; waiting, or failed."""

    group: str
    number: int
    name: str
    failed: bool

    def to_json(self) -> str:
        """Return the report as it stands in the store."""
        fields = {"group": self.group, "number": self.number, "name": self.name}
        return json.dumps({**fields, "failed": self.failed})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(slots=True, kw_only=True)
class PeersView:
    """What the store told: the last report of each peer by global rank, and what went wrong."""

    reports: dict[int, Report] = field(default_factory=dict)
    problem: str | None = None


def post(state: GroupState, report: Report) -> None:
    """Leave a report without waiting for the store (which may be gone)."""
    threading.Thread(target=_post, args=(state.global_rank, report), daemon=True).start()


def ask_peers(state: GroupState, report: Report, *, grace_s: float = GRACE_S) -> PeersView:
    """Leave this rank's report and read those of the group's other ranks.

    Returns as soon as every peer has reported this call (or a later one), at the latest one second
    after `grace_s`. Runs in a thread of its own, since a store may hang.
    """
    view = PeersView()
    thread = threading.Thread(target=_poll, args=(state, report, grace_s, view), daemon=True)
    thread.start()
    thread.join(grace_s + 1.0)
    problem = "the store does not answer" if thread.is_alive() else view.problem
    return PeersView(reports=dict(view.reports), problem=problem)


def has_arrived(peer: Report | None, own: Report) -> bool:
    """Whether a peer's report shows that it entered the call of `own`."""
    return peer is not None and peer.group == own.group and peer.number >= own.number


def _post(global_rank: int, report: Report) -> None:
    try:
        default_store().set(_KEY.format(global_rank), report.to_json())
    except (RuntimeError, ValueError):
        return  # a lost report costs a name in a message; the call's own error is what counts


def _poll(state: GroupState, report: Report, grace_s: float, view: PeersView) -> None:
    deadline = time.monotonic() + grace_s
    try:
        store = default_store()
        store.set(_KEY.format(state.global_rank), report.to_json())
        missing = set(state.ranks) - {state.global_rank}
        while missing:
            for rank in sorted(missing):
                found = _read(store, rank)
                if found is not None:
                    view.reports[rank] = found
                    if has_arrived(found, report):
                        missing.discard(rank)
            if time.monotonic() > deadline:
                return
            if missing:
                time.sleep(_POLL_S)
    except (RuntimeError, ValueError) as error:
        lines = str(error).splitlines()
        view.problem = lines[0] if lines else type(error).__name__


def _read(store: Store, rank: int) -> Report | None:
    key = _KEY.format(rank)
    if not store.check([key]):
        return None
    store.set_timeout(timedelta(seconds=GRACE_S))
    return Report.from_json(store.get(key))
