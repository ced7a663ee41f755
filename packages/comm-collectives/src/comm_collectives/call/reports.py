"""Find out, after a call has failed, which ranks were in it: through the default group's store.

Nothing is written while calls go well. A rank that has waited for a while, or whose call failed,
leaves one short report under its global rank; a rank that failed reads the reports of its peers
for a bounded time. A peer that reports this call or a later one had arrived; one that reports
nothing is stuck elsewhere or dead. Best effort: a store that is gone is said to be gone.

    view = ask_peers(state, Report(group="0", number=7, name="all_to_all", failed=True))
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache

from comm_collectives._torch_private import Store, default_store
from comm_collectives.call.groups import GroupState
from comm_collectives.units import POLL_S

GRACE_S = 2.0  # how long a failed rank waits for the reports of its peers
_LONGEST_POLL_S = 0.4  # a rank that is not there after a while is asked for less often
ANSWER_S = 1.0  # how much longer than it should take a store may take
_KEY = "comm_collectives/report/{}"
_AWAITED_KEY = "comm_collectives/awaited/{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a rank is: in call `number` of the group named `group`; waiting, or failed.

    `text` describes the call and its arguments, or says why this rank refused them; calls with
    another fingerprint are other calls. `problem` is the class of the error in which it failed,
    `rank` the global one.
    """

    group: str
    number: int
    name: str
    failed: bool
    fingerprint: int = 0
    text: str = ""
    problem: str = ""
    rank: int = -1

    def to_json(self) -> str:
        """Return the report as it stands in the store."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    @lru_cache(maxsize=128)  # waiting ranks read the same reports again and again
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
    state.transport.clock.aside(lambda: _post(state, report), 0.0)


def ask_peers(state: GroupState, report: Report, *, grace_s: float = GRACE_S) -> PeersView:
    """Leave this rank's report and read those of the group's other ranks.

    Returns as soon as every peer has reported this call (or a later one), at the latest one second
    after `grace_s`. Runs in a thread of its own, since a store may hang.
    """
    view = PeersView()
    ended = state.transport.clock.aside(
        lambda: _poll(state, report, grace_s, view), grace_s + ANSWER_S
    )
    problem = view.problem if ended else "the store does not answer"
    return PeersView(reports=dict(view.reports), problem=problem)


def tell_awaited(state: GroupState, number: int) -> None:
    """Leave word that this rank waits in the backward of call `number`, without waiting for it."""

    def tell() -> None:
        try:
            store_of(state).set(_AWAITED_KEY.format(state.name), str(number))
        except (RuntimeError, ValueError):
            return  # the backward then waits for as long as it may

    state.transport.clock.aside(tell, 0.0)


def awaited_backward(state: GroupState) -> int:
    """Return the call in whose backward a rank of the group last said that it waits, or 0."""
    key = _AWAITED_KEY.format(state.name)
    try:
        store = store_of(state)
        return int(store.get(key)) if store.check([key]) else 0
    except (RuntimeError, ValueError):
        return 0


def has_arrived(peer: Report | None, own: Report) -> bool:
    """Whether a peer's report shows that it entered the call of `own`."""
    return peer is not None and peer.group == own.group and peer.number >= own.number


def _post(state: GroupState, report: Report) -> None:
    try:
        store_of(state).set(_KEY.format(state.global_rank), report.to_json())
    except (RuntimeError, ValueError):
        return  # a lost report costs a name in a message; the call's own error is what counts


def _poll(state: GroupState, report: Report, grace_s: float, view: PeersView) -> None:
    clock = state.transport.clock
    deadline_s, pause_s = clock.now_s() + grace_s, POLL_S
    try:
        store = store_of(state)
        store.set(_KEY.format(state.global_rank), report.to_json())
        missing = set(state.ranks) - {state.global_rank}
        while missing:
            for rank in sorted(missing):
                found = _read(store, rank)
                if found is not None:
                    view.reports[rank] = found
                    if has_arrived(found, report):
                        missing.discard(rank)
            if clock.now_s() > deadline_s:
                return
            if missing:
                clock.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
    except (RuntimeError, ValueError) as error:
        lines = str(error).splitlines()
        view.problem = lines[0] if lines else type(error).__name__


def store_of(state: GroupState) -> Store:
    """Return where the ranks of a group leave reports.

    Raises:
        ValueError: no process group has been initialised.
    """
    own = state.transport.store()
    return default_store() if own is None else own


def _read(store: Store, rank: int) -> Report | None:
    key = _KEY.format(rank)
    if not store.check([key]):
        return None
    return Report.from_json(store.get(key))
