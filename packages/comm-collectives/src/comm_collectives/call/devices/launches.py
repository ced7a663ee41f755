"""What a group's device was given and has not ended, and a thread that says who holds it up.

Each rank's thread tells the others what its device waits for, once that takes longer than usual,
and answers those who ask. It reads no device: whether something has ended is known to torch's own
watchdog. Whoever is dead, elsewhere or absent is named on every rank, at the latest a little before
the watchdog would end the process; the communicator is aborted, so that the program comes back from
where it waits, and every later call of the group raises the error.

    launches = Launches.of(state)
    launches.run(call, start, (7, 0))        # check(), start(), and keep an eye on what it returns
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol, final
from weakref import WeakSet, ref

from comm_collectives._torch_private import completion_of
from comm_collectives.base.transport import Pending
from comm_collectives.call.devices.flight_record import unfinished_work
from comm_collectives.call.devices.graphs import is_captured, refuse_captured
from comm_collectives.call.devices.reports import Reports
from comm_collectives.call.devices.verdict import DevicePlace, Stuck, Verdict, View, find_culprit
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import current_site
from comm_collectives.errors import ERROR_NAMED, CommError

_TICK_S = 0.25
_SLOW_S = 1.0  # from when on a device is said to wait
_HOLDS_S = 3.0  # for how long an answer is believed
_LATEST_S = 10.0  # how long before the limit, at most, the error is raised
_LOG = logging.getLogger("comm_collectives")
_MAKING = threading.Lock()
_WATCHED: "WeakSet[Launches]" = WeakSet()

Start = Callable[[], Sequence[Pending | None]]  # starts transfers that a device makes


class Maker(Protocol):
    """What gives a device something to do: a call, or a transfer between two ranks."""

    name: str
    timeout_s: float | None

    def word(self) -> int:
        """Return what is the same on all ranks that make the same call."""

    def describe(self) -> str:
        """Say what it is, with arguments and line."""


@final
class _Launch:
    """One thing that a device was given."""

    def __init__(self, maker: Maker, place: DevicePlace, peers: Iterable[int]) -> None:
        self.maker, self.place, self.peers = maker, place, frozenset(peers)
        self.began_s = time.monotonic()
        self._ends: list[Callable[[], bool]] | None = None

    def started(self, works: Sequence[Pending]) -> None:
        """Take note of what the device does; of nothing, if it was refused."""
        self._ends = [completion_of(work) for work in works]

    def has_ended(self) -> bool:
        """Whether the device has done all of it; does not ask the device."""
        return self._ends is not None and all(ended() for ended in self._ends)

    def stuck(self) -> Stuck:
        """Say what it is, for other ranks."""
        maker = self.maker
        return Stuck(place=self.place, word=maker.word(), text=maker.describe(), peers=self.peers)


@final
class Launches:
    """The device's side of one group on this rank."""

    def __init__(self, state: GroupState) -> None:
        self._state = ref(state)
        self._ranks, self._own, self._name = state.ranks, state.rank, state.name
        self._limit_s, self._transport = state.transport.limit_s, state.transport
        self._reports = Reports(state.open_streams("devices"))
        self._open: list[_Launch] = []
        self._lock = threading.Lock()
        self._queued: DevicePlace = (0, 0)
        self._views = dict.fromkeys(self._reports.peers, View())
        self._gone_since_s: dict[int, float] = {}
        self._told: dict[str, Any] = {}
        self._has_asked: _Launch | None = None
        self._silent: list[int] = []  # who did not answer
        self._asked_s = 0.0  # what others wait for may have changed since
        self._ask_every_s = max(_HOLDS_S, self._limit_s / 8)
        self.failure: Verdict | None = None
        _WATCHED.add(self)
        name = f"comm_collectives {self._name}: devices"
        threading.Thread(target=_look_after, args=(ref(self),), name=name, daemon=True).start()

    @staticmethod
    def of(state: GroupState) -> "Launches | None":
        """Return those of a group, made when its device gets its first work; None if alone."""
        found: Launches | None = state.launches
        if found is None and state.size > 1 and state.hire is None:
            with _MAKING:
                found = state.launches = state.launches or Launches(state)
        return found

    @staticmethod
    def of_call(state: GroupState, call: Maker) -> "Launches | None":
        """As `of`; None in the capture of a graph, whose replays nobody looks after.

        Raises:
            CommValueError: the call has a limit, and is captured.
        """
        if not is_captured():
            return Launches.of(state)
        if call.timeout_s is not None:
            refuse_captured(call.name, "a replay has no timeout_s", "leave timeout_s out")
        return None

    def check(self) -> None:
        """Raise what was found wrong with the group's device.

        Raises:
            CommError: who is dead, does something else, or did not come.
        """
        if self.failure is not None:
            kind, text = self.failure
            raise kind(text)

    def run(
        self, maker: Maker, start: Start, place: DevicePlace, peers: Iterable[int] | None = None
    ) -> list[Pending]:
        """Give the device something to do, and look after it; `peers`: all others, if None.

        Raises:
            CommError: as `check`.
        """
        self.check()
        launch = _Launch(maker, place, self._reports.peers if peers is None else peers)
        with self._lock:
            self._open.append(launch)
            self._queued = max(self._queued, place)
        try:
            works = [work for work in start() if work is not None]
        except BaseException:
            launch.started(())
            raise
        launch.started(works)
        return works

    def look(self) -> None:
        """Exchange what is new, and find out what is wrong. By the thread alone."""
        with self._lock:
            self._open = [launch for launch in self._open if not launch.has_ended()]
            oldest = self._open[0] if self._open else None
        stuck, age_s, now_s = None, 0.0, time.monotonic()
        if oldest is not None:
            age_s = now_s - oldest.began_s
            stuck = oldest.stuck() if age_s > _SLOW_S else None
        is_new = oldest is not self._has_asked or now_s - self._asked_s > self._ask_every_s
        self._tell(stuck, asks=stuck is not None and is_new)
        if is_new:
            self._asked_s = now_s
        for peer, said in self._reports.pump(_TICK_S):
            self._hear(peer, said)
        if stuck is None or oldest is None or self.failure is not None:
            self._has_asked, self._silent = None, []
            return
        self._has_asked = oldest
        has_waited = now_s - self._asked_s >= _SLOW_S  # they had time to answer
        if has_waited:
            self._silent = [peer for peer, view in self._views.items() if not view.is_known]
        if oldest.has_ended():
            return
        is_late = age_s > self._limit_s - min(_LATEST_S, self._limit_s / 4)
        found = find_culprit(
            stuck,
            views=self._views,
            gone=self._gone(),
            is_late=is_late and has_waited,
            ranks=self._ranks,
            limit_s=self._limit_s,
        )
        if found is not None:
            kind, text = found
            self._fail(kind, f"rank {self._ranks[self._own]}: {stuck.text} {text}")

    def waits_for(self) -> str:
        """Say for what the device, or the host, has waited for long, and for whom; "" if not."""
        now_s = time.monotonic()
        with self._lock:
            oldest = next((each for each in self._open if not each.has_ended()), None)
        if oldest is None or now_s - oldest.began_s < _SLOW_S:
            return self._host_waits_for()
        text = f"{oldest.maker.describe()} in group {self._ranks}"
        names = ", ".join(f"rank {self._ranks[p]}" for p in self._silent if p in oldest.peers)
        return f"{text}, where no process of {names} answers" if names else text

    def _host_waits_for(self) -> str:
        state = self._state()
        frames = None if state is None else state.frames
        if state is None or frames is None or not frames.late:
            return ""
        if state.transport.clock.now_s() - frames.waits_since_s < _SLOW_S:
            return ""
        late = ", ".join(f"rank {self._ranks[peer]}" for peer in frames.late)
        return f"{late} in call {state.last_call} of group {self._ranks} on the host"

    def _tell(self, stuck: Stuck | None, *, asks: bool) -> None:
        """Tell the others what is new here, and ask them for the same if this device waits."""
        said: dict[str, Any] = {"queued": self._queued, "elsewhere": self._elsewhere()}
        if stuck is not None:
            said["stuck"] = [stuck.place, stuck.word, stuck.text]
        if asks:
            self._views = {peer: view.asked() for peer, view in self._views.items()}
        if stuck is not None and (asks or said != self._told):
            self._reports.tell(said | {"asks": asks})
            self._told = said

    def _elsewhere(self) -> str:
        with _MAKING:
            others = [each for each in _WATCHED if each is not self]
        return "; ".join(filter(None, (each.waits_for() for each in others)))

    def _hear(self, peer: int, said: dict[str, Any]) -> None:
        if "failed" in said:
            kind, text = said["failed"]
            if self.failure is None:
                self._fail(ERROR_NAMED.get(kind, CommError), text)
            return
        stuck = None
        if "stuck" in said:
            place, word, text = said["stuck"]
            stuck = Stuck(place=tuple(place), word=word, text=text)
        self._views[peer] = View(
            queued=tuple(said["queued"]), stuck=stuck, elsewhere=said["elsewhere"], is_known=True
        )
        if said.get("asks"):
            answer = {"queued": self._queued, "elsewhere": self._elsewhere()}
            self._reports.tell(self._told if "stuck" in self._told else answer, peer)

    def _gone(self) -> set[int]:
        """The ranks that have ended a while ago: what they had queued would have ended too."""
        state, now_s = self._state(), time.monotonic()
        frames = None if state is None else state.frames
        gone = {*self._reports.gone(), *(() if frames is None else frames.streams.gone())}
        before = self._gone_since_s  # without those that have only changed their streams
        self._gone_since_s = {peer: before.get(peer, now_s) for peer in gone}
        return {peer for peer, since in self._gone_since_s.items() if now_s - since > _SLOW_S}

    def _fail(self, kind: type[CommError], text: str) -> None:
        self.failure = kind, f"{text}; the group's communicator on the device is aborted"
        _LOG.error("%s: %s", kind.__name__, self.failure[1])
        self._reports.tell({"failed": [kind.__name__, text]})
        self._reports.pump(0.0)
        # After the others were told: reading the recorder asks the device.
        try:
            if recorded := unfinished_work(self._name):
                self.failure = kind, f"{self.failure[1]}; {recorded}"
                _LOG.error("%s", recorded)
        finally:
            self._transport.abort()


@final
class _OfPair:
    """A transfer of a device between this rank and another one."""

    timeout_s: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def word(self) -> int:
        """Transfers are not compared here."""
        return 0

    def describe(self) -> str:
        """Say what it is."""
        return self.name


@final
class _Checked:
    """A transfer whose `wait` raises what was found wrong with its group's device meanwhile."""

    def __init__(self, work: Pending, launches: Launches) -> None:
        self._work, self._launches = work, launches

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """See Pending."""
        has_ended = self._work.wait(timeout) if timeout else self._work.wait()
        self._launches.check()
        return has_ended

    def is_completed(self) -> bool:
        """See Pending."""
        return self._work.is_completed()


def launch_transfers(state: GroupState, what: str, peer: int, start: Start) -> list[Pending]:
    """Start transfers of a device: `what` they are ("send to", "recv from"), `peer` in the group.

    Until they have ended they are looked after: if the peer is gone or does not do its part, the
    group's communicator is aborted, and `wait` and all calls of the group raise an error with its
    name.

    Raises:
        CommError: what was found wrong with the group's device; or the transfer is refused.
    """
    launches = None if is_captured() else Launches.of(state)
    if launches is None:
        return [work for work in start() if work is not None]
    text = f"{what} rank {state.ranks[peer]}, at {current_site().text},"
    works = launches.run(_OfPair(text), start, (0, 0), [peer])
    return [_Checked(work, launches) for work in works]


def _look_after(of: "ref[Launches]") -> None:
    while (launches := of()) is not None:
        launches.look()
        del launches
