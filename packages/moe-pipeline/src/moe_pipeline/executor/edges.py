"""How messages get from rank to rank: over process groups, or inside one process.

Each direction between two ranks is an edge, on which messages come in the order of the schedule. A
receiver checks what came against what the plan says comes next; where forward and backward share
a group it keeps a message of the other direction until its turn.

When a rank fails, it sends a failure notice on every edge and then listens on every edge until the
peer says the same or is gone. A rank that has not failed waits for one that has, or for one that
waits for it in turn; so the notice reaches all, each within one hop of the rank that it waits for,
and nobody has to look at a clock or a store while all goes well. Without backward messages go one
way only; there the last stage says at the end that all is well, and each tells the one before, so
that every rank has something to wait for.

    edges = GroupEdges(plan, 0, Transport(forward=pp, backward=pp, device=None, timeout_s=60))
    edges.begin()
    edges.send(action, message)
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, final

import torch.distributed as dist

from comm_collectives import (
    CollectiveTimeoutError,
    CommError,
    PeerFailedError,
)
from comm_collectives.p2p import SendHandle, expect_tensors
from moe_pipeline.executor.device_transfers import DeviceMoves, DeviceSend, find_swaps
from moe_pipeline.executor.execution_plan import RECEIVES, Edge, ExecutionPlan, other_end
from moe_pipeline.executor.slots import Slots
from moe_pipeline.executor.stage_message import (
    FailureNotice,
    StageMessage,
    pack_message,
    pack_notice,
    unpack,
)
from moe_pipeline.executor.transport import Channel, Transport
from moe_pipeline.schedules.table import Action

# Sends of an edge that its receiver has not taken. Holds their tensors' memory down; any number
# from 1 is free of deadlock for a schedule that passes check(send_buffers=1).
MAX_SENDS_UNDER_WAY = 4


@final
class EdgeBrokenError(Exception):
    """A transfer failed: `cause` names who is to blame, in the same words on every rank.

    `observed`: a peer is gone, maybe because of something that others know better.
    """

    def __init__(self, cause: str, *, observed: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.observed = observed


class Edges(Protocol):
    """What performs the transfers of a step."""

    def begin(self) -> None:
        """Start a step."""

    def ready(self, action: Action) -> bool:
        """Whether to perform `action` now; False lets the process go on with another row."""

    def send(self, action: Action, message: StageMessage) -> None:
        """Perform a send, without waiting for its receiver."""

    def post(self, action: Action) -> None:
        """Let the message of a receive come, while this rank computes."""

    def receive(self, action: Action) -> StageMessage:
        """Wait for the message of a receive that was posted."""

    def settle(self) -> None:
        """Wait until all sends of the step have ended."""

    def give_up(self, cause: str, *, observed: bool) -> str:
        """Tell everyone why this rank fails; returns the cause to report, "" if all can go on."""

    def name(self, rank: int) -> str:
        """What to call a rank of the schedule in messages."""


@final
class LocalEdges:
    """All ranks of a schedule in this process."""

    def __init__(self) -> None:
        self._arrived: dict[Action, StageMessage] = {}

    def begin(self) -> None:
        """Forget what a failed step left."""
        self._arrived.clear()

    def ready(self, action: Action) -> bool:
        """A receive waits for its send."""
        return action.kind not in RECEIVES or action in self._arrived

    def send(self, action: Action, message: StageMessage) -> None:
        """Put it where the receive finds it."""
        self._arrived[other_end(action)] = message

    def post(self, action: Action) -> None:
        """It is there: the receive waited for its send."""

    def receive(self, action: Action) -> StageMessage:
        """Take it."""
        return self._arrived.pop(action)

    def settle(self) -> None:
        """Nothing is under way."""

    def give_up(self, cause: str, *, observed: bool) -> str:
        """All ranks are this process: nothing to send, and all can go on."""
        return ""

    def name(self, rank: int) -> str:
        """The rank of the schedule."""
        return f"rank {rank}"


@final
class GroupEdges:
    """The edges of one rank of a schedule over process groups."""

    def __init__(self, plan: ExecutionPlan, rank: int, transport: Transport) -> None:
        self._plan, self._rank, self._transport = plan, rank, transport
        self._global_ranks = dist.get_process_group_ranks(transport.forward)
        self._under_way: dict[Edge, deque[SendHandle | DeviceSend]] = {}
        has_two = transport.backward is not transport.forward
        swaps = find_swaps(plan, rank, has_two=has_two) if transport.is_bound else {}
        self._moves = DeviceMoves(transport.device, swaps)
        self._slots = Slots()
        self._sent: Counter[Edge] = Counter()
        self._expected: dict[Edge, deque[Action]] = {}
        self._arrived: dict[Action, StageMessage] = {}
        self._posted: dict[Channel, Action] = {}  # the last receive of each that is not taken
        self._told: Channel | None = None  # where the peer has said why it gave up

    def begin(self) -> None:
        """Expect what the plan lists."""
        self._under_way = {edge: deque() for edge in self._plan.targets}
        self._sent.clear()
        self._expected = {edge: deque(row) for edge, row in self._plan.expected.items()}
        self._arrived.clear()
        self._posted.clear()
        self._moves.begin()
        self._slots.begin()
        for edge in self._expected:
            with self._naming("the first receives", edge.peer):
                self._expect_next(self._transport.channel(edge))

    def ready(self, action: Action) -> bool:
        """Nothing else is to be done meanwhile."""
        return True

    def send(self, action: Action, message: StageMessage) -> None:
        """Start the send; wait only for one that started long before."""
        edge = self._plan.edges[action]
        channel, limit_s = self._transport.channel(edge), self._transport.timeout_s
        apart, handles = self._transport.apart(edge), self._under_way[edge]
        slot = self._slots.of(other_end(action))
        with self._naming(str(action), edge.peer):
            packed = pack_message(action, message, apart, slot)
            handle = channel.send(packed.tensors, limit_s)
            self._sent[edge] += 1
            if not apart:
                handles.append(handle)
                self._settle(edge, MAX_SENDS_UNDER_WAY)
                return
            self._slots.saw(other_end(action), packed.announced)
            beside = packed.beside
            if slot is not None and slot != packed.announced:
                beside = self._moves.filling(slot)
            sending = DeviceSend(handle, beside)
            handles.append(sending)
            self._moves.send(action, sending, channel.peer, channel.group)
            while handles and handles[0].is_done():
                handles.popleft().wait()

    def post(self, action: Action) -> None:
        """Let the message come; one is read ahead on each channel, so wait for the one before.

        What travels on a device is received in the order of the schedule: the receives of what is
        expected are queued here; where nothing is, the host waits for the header first.
        """
        edge = self._plan.edges[action]
        channel = self._transport.channel(edge)
        if self._transport.apart(edge):
            coming = self._slots.of(action)
            if coming is None:
                self._await(action)
                coming = self._arrived[action].announced
            with self._naming(str(action), edge.peer):
                self._moves.receive(action, coming, channel.peer, channel.group)
            return
        before = self._posted.get(channel)
        if before is not None:
            self._await(before)
        self._posted[channel] = action

    def receive(self, action: Action) -> StageMessage:
        """Wait for the message; then free what the peer must have received before it sent this."""
        edge = self._plan.edges[action]
        self._await(action)
        channel = self._transport.channel(edge)
        if self._posted.get(channel) == action:
            del self._posted[channel]
        message, device = self._arrived.pop(action), self._transport.device
        with self._naming(str(action), edge.peer):
            if self._transport.apart(edge):
                came, slot = self._moves.take(action), self._slots.of(action)
                if slot is not None and slot != message.announced:
                    came = self._moves.placed(message.announced, message.brought)
                message = message.with_announced(came)
            for ours, count in self._plan.delivered[action].items():
                self._settle(ours, self._sent[ours] - count)
        if device is None:
            return message
        return replace(message, tensors=[t.to(device) for t in message.tensors])

    def settle(self) -> None:
        """Wait for every send that has not ended; without backward, for all later stages."""
        for edge in self._under_way:
            with self._naming("the last sends", edge.peer):
                self._settle(edge, 0)
        for giver, taker in self._plan.acknowledgements():
            peer = giver if taker == self._rank else taker
            channel, limit_s = self._transport.channel(Edge(peer, True)), self._transport.timeout_s
            with self._naming("the last sends", peer):
                if peer == taker:
                    channel.send(pack_notice(FailureNotice("")), limit_s).wait()
                else:
                    self._expect_well(channel)

    def name(self, rank: int) -> str:
        """The global rank and its stages."""
        stages = self._plan.stages_of(rank)
        word = "stage" if len(stages) == 1 else "stages"
        return f"rank {self._global_ranks[rank]} ({word} {', '.join(map(str, stages))})"

    def give_up(self, cause: str, *, observed: bool) -> str:
        """Tell all peers and hear them out, for some seconds at most."""
        limit_s = self._transport.grace_s
        deadline = time.monotonic() + limit_s
        heard: list[str] = []
        edges = {*self._plan.targets, *self._plan.expected}
        channels = {self._transport.channel(edge) for edge in edges}
        silent = channels - {self._told}
        threads = [
            *(threading.Thread(target=self._warn, args=(c, cause, limit_s)) for c in channels),
            *(threading.Thread(target=self._listen, args=(c, heard, deadline)) for c in silent),
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A peer that is gone may have failed for a reason that another peer knows.
        return heard[0] if observed and heard else cause

    def _await(self, action: Action) -> None:
        """Read until a message is there."""
        edge = self._plan.edges[action]
        with self._naming(str(action), edge.peer):
            while action not in self._arrived:
                self._read(action, edge)

    def _expect_well(self, channel: Channel) -> None:
        """Wait until the stages behind the channel's peer have ended."""
        notice = unpack(channel.receive(self._transport.timeout_s))
        if isinstance(notice, FailureNotice) and notice.cause:
            self._told = channel
            raise EdgeBrokenError(notice.cause)

    def _read(self, awaited: Action, edge: Edge) -> None:
        """Read one message of the edge's channel and keep it."""
        channel = self._transport.channel(edge)
        packed = channel.receive(self._transport.timeout_s)
        try:
            found = unpack(packed)
        except ValueError as error:
            raise EdgeBrokenError(f"{self.name(edge.peer)} sent nonsense: {error}") from error
        if isinstance(found, FailureNotice):
            self._told = channel
            raise EdgeBrokenError(found.cause)
        sent, message = found
        arrived = other_end(sent)
        row = self._expected.get(Edge(edge.peer, arrived.kind.value.endswith("F")))
        if not row or row[0] != arrived:
            raise EdgeBrokenError(
                f"{self.name(edge.peer)} sent {sent}, but {self.name(self._rank)} waits for "
                f"{other_end(awaited)}; do both run schedule {self._plan.schedule.name}?"
            )
        row.popleft()
        self._expect_next(channel)
        self._slots.saw(arrived, message.announced)
        self._arrived[arrived] = message

    def _expect_next(self, channel: Channel) -> None:
        """Let the channel's next message of this step, if there is one, arrive before its turn."""
        rows = self._expected.items()
        if any(row and self._transport.channel(edge) == channel for edge, row in rows):
            expect_tensors(src=channel.peer, group=channel.group)

    def _settle(self, edge: Edge, most: int) -> None:
        """Wait for the oldest sends of an edge until `most` are under way."""
        handles = self._under_way[edge]
        while len(handles) > most:
            handles[0].wait()
            handles.popleft()

    @contextmanager
    def _naming(self, what: str, peer: int) -> Iterator[None]:
        """Let an error of the transport say what failed, and with whom."""
        try:
            yield
        except CommError as error:
            raise self._broken(what, peer, error) from error

    def _broken(self, what: str, peer: int, error: CommError) -> EdgeBrokenError:
        name = self.name(peer)
        if isinstance(error, PeerFailedError):
            return EdgeBrokenError(f"{name} died or closed its connections", observed=True)
        me = self.name(self._rank)
        if isinstance(error, CollectiveTimeoutError):
            limit_s = self._transport.timeout_s
            limit = "the limit of its group" if limit_s is None else f"{limit_s:g} s"
            return EdgeBrokenError(f"{me} gave up in {what}: nothing from {name} within {limit}")
        return EdgeBrokenError(f"{me} failed in {what} with {name}: {error}")

    def _warn(self, channel: Channel, cause: str, limit_s: float) -> None:
        try:
            channel.send(pack_notice(FailureNotice(cause)), limit_s).wait()
        except CommError:
            return  # it is gone, or needs nothing of this rank any more

    def _listen(self, channel: Channel, heard: list[str], deadline: float) -> None:
        while time.monotonic() < deadline:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                notice = unpack(channel.receive(left_s))
            except (CommError, ValueError):
                return
            if isinstance(notice, FailureNotice) and notice.cause:
                heard.append(notice.cause)
                return
