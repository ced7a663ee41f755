"""What this rank knows of a process group: its place in it, its transport, and its call numbers.

Call numbers count this package's calls in one group. Ranks run the same program, so an error can
say `all_to_all call 7` and mean the same call on every rank.

    state = group_state(None)
    state.rank, state.size, state.next_call()
"""

import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from numbers import Real
from operator import index
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config

from comm_collectives._torch_private import Store, default_store, graph_break, process_groups
from comm_collectives.base.streams import SocketStreams, Streams
from comm_collectives.base.transport import ScratchPool, TorchTransport, Transport
from comm_collectives.call.agreement import AgreementPolicy, History, PendingBackwards
from comm_collectives.call.frames import Frames
from comm_collectives.call.signature import Argument
from comm_collectives.errors import CommError, CommTypeError, CommValueError
from comm_collectives.threads import Threads


class Ordered:
    """What makes its calls one after another; `ranks` are what its ranks are called in errors."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.size = len(ranks)
        self.lock = threading.RLock()  # held by the thread that is in a call
        self.frames: Frames | None = None  # of calls on the host; None before the first one
        self.worker: Any = None  # a handles.Worker, which is made on top of this
        self.last_call = 0
        self.is_alone = False  # the other ranks do not exist; see `simulation.stand_alone`
        self.users = Threads()  # those of the program that make calls or transfers
        self.questions: Any = None  # a pairs.Questions, made on top of this: who waits here

    def next_call(self) -> int:
        """Number of the collective that starts now (from 1)."""
        self.last_call += 1
        return self.last_call

    def prepare(self) -> None:
        """Before a call, with the lock held: tell peers that questions of before are over."""
        if self.questions is not None and self.questions.is_owed:
            self.questions.give_back()

    def absent(self) -> str:
        """Say who has not come to the call under way, as far as is known."""
        late = [] if self.frames is None else self.frames.behind(self.last_call)
        names = ", ".join(f"rank {self.ranks[rank]}" for rank in late)
        return f"; did not arrive: {names}" if late else ""


@final
class GroupState(Ordered):
    """A process group as this rank sees it. `rank` is inside the group, `ranks` are global."""

    may_share_memory = True  # whether it is worth asking if all ranks are on one host

    def __init__(
        self,
        *,
        rank: int,
        ranks: tuple[int, ...],
        name: str,
        transport: Transport,
        backend_of: Mapping[str, str],
        groups: "Callable[[], Sequence[GroupState]] | None" = None,
    ) -> None:
        super().__init__(name, ranks)
        self._groups = groups  # all of this rank
        self.rank = rank
        self.process = os.getpid()  # a child that is forked later is no rank
        self.transport = transport
        self.backend_of = backend_of
        self.scratch = ScratchPool()
        self.openings = 0  # how often frames were opened
        self.asks_for_memory = False  # the ranks have yet to find out if they share memory
        self.policy = AgreementPolicy()
        self.pending = PendingBackwards()  # that this rank owes
        self.history = History()  # the calls since the last comparison, where not all are compared
        self.lane: Any = None  # a pairs.Lane, made on top of this: what two ranks send each other
        self.launches: Any = None  # a devices.Launches, made on top of this
        # Opens streams for ranks that are no processes, and start no threads of their own either.
        self.opener: Callable[[str], Streams] | None = None
        self.hire: Callable[[], Any] | None = None  # likewise, what runs jobs as a handles.Worker
        self.responder: threading.Thread | None = None  # for backwards whose graph is gone
        self.given_up: list[object] = []  # failed transfers whose buffers may still be in use
        self.failed_calls: list[int] = []  # in which this rank failed
        # Told of each all-to-all: the call's name and the bytes for each rank.
        self.observers: list[Callable[[str, Sequence[int]], None]] = []

    def siblings(self) -> "Sequence[GroupState]":
        """Return what this rank knows of all its groups, this one among them."""
        return [self] if self._groups is None else self._groups()

    def store(self) -> Store:
        """Return where the ranks find each other, and report failures.

        Raises:
            ValueError: no process group has been initialised.
        """
        own = self.transport.store()
        return default_store() if own is None else own

    def open_streams(self, purpose: str) -> Streams:
        """Open streams to all ranks; `purpose` is used only once. Not collective."""
        if self.opener is not None:
            return self.opener(purpose)
        # A rank that ended before its first call left no stream that could break.
        return SocketStreams(
            rank=self.rank,
            size=self.size,
            store=self.store(),
            key=f"{self.name}/{purpose}",
            has_lost=self.transport.has_lost if self.backend_of.get("cpu") == "gloo" else None,
        )

    def reach(self) -> Frames:
        """Return the frames of the calls, opened if they are not. Not collective."""
        if self.frames is None:
            self.openings += 1
            streams = self.open_streams(f"calls/{self.openings}")
            self.frames, self.asks_for_memory = Frames(streams, self.transport.clock), True
        return self.frames

    @property
    def global_rank(self) -> int:
        """This rank's number in the default group."""
        return self.ranks[self.rank]

    def transport_type(self, device: torch.device) -> str:
        """Device type on which the bytes of a tensor on `device` travel: the same on every rank.

        Gloo copies CUDA tensors through the host in any case, so they are staged there; a tensor
        whose device has no backend travels on the device that has one.
        """
        if device.type in self.backend_of and self.backend_of[device.type] != "gloo":
            return device.type
        return self.control_type

    @property
    def moves_on_host(self) -> bool:
        """Whether all data travels by way of the host, where every call is compared."""
        return all(self.transport_type(torch.device(kind)) == "cpu" for kind in self.backend_of)

    @property
    def control_type(self) -> str:
        """Device type for small control messages: the host if the group can, else its device."""
        return "cpu" if "cpu" in self.backend_of else next(iter(self.backend_of))


class CustomGroup(ABC):
    """A group that is not torch's; every function here takes it where it takes a ProcessGroup."""

    @abstractmethod
    def state(self) -> GroupState:
        """Return what this rank knows of the group; always the same object."""


Group = dist.ProcessGroup | CustomGroup

# Call numbers belong to a group, and a group has no slot of its own for them.
_STATES: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default group for None.

    Raises:
        ValueError: there is no default group, or this rank is not a member.
    """
    if group is None:
        if not dist.is_initialized():
            raise CommValueError(
                "group=None means the default process group, but there is none; "
                "call torch.distributed.init_process_group first or pass group="
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise CommValueError(
            f"group={group!r} is not a ProcessGroup of which this rank is a member; "
            "call only on the ranks that new_group was given"
        )
    return group


def group_state(group: Group | None) -> GroupState:
    """Return what this rank knows of `group`, or of the default group; as `resolve_group`.

    Raises:
        CommError: this process was forked from one that has used the group.
    """
    if isinstance(group, CustomGroup):
        return group.state()
    resolved = resolve_group(group)
    state = _STATES.get(resolved)
    if state is None:
        backend_of = dict(item.split(":") for item in get_backend_config(resolved).split(","))
        moves_device = any(k != "cpu" and b != "gloo" for k, b in backend_of.items())
        new = GroupState(
            rank=resolved.rank(),
            ranks=tuple(dist.get_process_group_ranks(resolved)),
            name=resolved.group_name,
            transport=TorchTransport(resolved, moves_device=moves_device),
            backend_of=backend_of,
            groups=_states_of_process,
        )
        # Two threads may come at once, and have to find the same.
        state = _STATES.setdefault(resolved, new)
    if state.process != os.getpid():
        raise CommError(
            f"group {state.ranks} belongs to the process of which this one was forked, whose "
            "messages it would take; call there, or start a process that makes groups of its own"
        )
    return state


def _states_of_process() -> list[GroupState]:
    """All groups of this process that move data on the host, and all that were used."""
    found = []
    for group in process_groups():
        with suppress(RuntimeError, ValueError, KeyError):  # one that is being destroyed
            state = group_state(group)
            if state.moves_on_host or state.frames is not None:
                found.append(state)
    return found


@graph_break
def set_agreement(policy: AgreementPolicy, *, group: Group | None = None) -> None:
    """Say when the ranks of a group compare their calls. Every rank has to, at the same point.

    Args:
        policy: the same on every rank.
        group: None is the default group.

    Raises:
        TypeError: `policy` is not an AgreementPolicy.
    """
    if not isinstance(policy, AgreementPolicy):
        raise CommTypeError(f"policy is a {type(policy).__name__}; give an AgreementPolicy")
    group_state(group).policy = policy


def wire_device_argument(state: GroupState, device: torch.device) -> Argument:
    """Return the kind of device on which a tensor on `device` travels, for ranks to agree on."""
    return _device_argument(state.transport_type(device))


@cache
def _device_argument(kind: str) -> Argument:
    return Argument("device", zlib.crc32(kind.encode()), kind)


def check_integer(value: Any, name: str) -> None:
    """Raise TypeError if an argument is no integer, of Python or of another library."""
    try:
        index(value)
    except TypeError as error:
        kind = type(value).__name__
        raise CommTypeError(f"{name}={value!r} is a {kind}; give an integer") from error


def check_root(state: GroupState, rank: int, name: str) -> None:
    """Raise TypeError if `rank` is no integer, ValueError if it is not a rank of the group."""
    check_integer(rank, name)
    if not 0 <= rank < state.size:
        raise CommValueError(
            f"{name}={rank} is not a rank of a group of {state.size}; give 0..{state.size - 1}"
        )


def check_peer(state: GroupState, peer: int, name: str) -> None:
    """As `check_root`, and raise ValueError if `peer` is this rank."""
    check_root(state, peer, name)
    if peer == state.rank:
        raise CommValueError(f"{name}={peer} is this rank itself; hand the tensors over directly")


def check_timeout(timeout_s: float | None) -> float | None:
    """Return a time limit, of Python's or another library's numbers, as what can be waited for.

    Raise TypeError if it is no number, ValueError if it cannot be waited for.
    """
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, Real):
        raise CommTypeError(
            f"timeout_s={timeout_s!r} is a {type(timeout_s).__name__}; give seconds, or None for "
            "the group's own limit"
        )
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise CommValueError(
            f"timeout_s={timeout_s} must be positive and at most {threading.TIMEOUT_MAX:.0e}, or "
            "None for the group's own limit"
        )
    return float(timeout_s)
