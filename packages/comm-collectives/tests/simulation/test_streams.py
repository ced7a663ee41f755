"""Simulated streams against TCP: the same experiments on both, with the same ends."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.base.streams.sockets import SocketStreams
from comm_collectives.base.streams.streams import Streams
from comm_collectives.call.signature import call_site
from comm_collectives.simulation.faults import FaultSchedule
from comm_collectives.simulation.group import SimGroup
from comm_collectives.simulation.run import SimRank, simulate
from comm_collectives.simulation.streams import SimStreams
from comm_collectives.simulation.world import Killed
from ranktest import collect_ranks

_LONG = 3_000_000  # more than any stream holds


class _Side:
    """One rank's streams, and what else an experiment does: for real, or in virtual time."""

    def __init__(
        self, streams: Streams, sleep: Callable[[float], None], kill: Callable[[], None]
    ) -> None:
        self.streams, self.sleep, self.kill = streams, sleep, kill

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self.streams.send_some(1, view) :]
            self.streams.wait([], [1], 0.1)

    def recv(self, size: int) -> bytes:
        into = bytearray(size)
        view = memoryview(into)
        while len(view):
            got = self.streams.recv_some(0, view)
            view = view[got:]
            if not got and 0 in self.streams.gone() and not self.streams.recv_some(0, view):
                return bytes(into[: size - len(view)])
            self.streams.wait([0], [], 0.1)
        return bytes(into)


def _bytes_arrive_once_and_in_order(side: _Side) -> object:
    data = bytes(range(251)) * (_LONG // 251)
    if side.streams.rank == 0:
        side.send(data)
        return side.sleep(1.0)  # a rank that ends takes its connections along
    return side.recv(len(data)) == data


def _what_was_sent_before_a_death_still_arrives(side: _Side) -> object:
    if side.streams.rank == 0:
        side.send(b"last words")
        side.sleep(0.3)
        side.kill()
    side.sleep(1.0)
    return side.recv(100), side.streams.gone()


def _death_ends_a_wait(side: _Side) -> object:
    if side.streams.rank == 0:
        side.send(b"x")
        side.sleep(0.3)
        side.kill()
    side.recv(1)
    while not side.streams.gone():
        side.streams.wait([0], [], 20.0)
    return side.streams.recv_some(0, memoryview(bytearray(1)))


def _what_goes_to_the_dead_is_taken(side: _Side) -> object:
    if side.streams.rank == 1:
        side.recv(1)
        side.kill()
    side.send(b"x")
    side.sleep(1.0)
    side.send(bytes(_LONG))
    return side.streams.gone()


def _closed_streams_are_gone_for_the_others(side: _Side) -> object:
    if side.streams.rank == 0:
        side.send(b"x")
        side.streams.close()
        side.sleep(1.0)
        return None
    side.recv(1)
    while not side.streams.gone():
        side.streams.wait([0], [], 20.0)
    return side.streams.gone()


@pytest.mark.parametrize(
    "experiment",
    [
        _bytes_arrive_once_and_in_order,
        _what_was_sent_before_a_death_still_arrives,
        _death_ends_a_wait,
        _what_goes_to_the_dead_is_taken,
        _closed_streams_are_gone_for_the_others,
    ],
)
def test_simulated_streams_do_what_tcp_does(experiment: Callable[[_Side], object]) -> None:
    def real(rank: int, world_size: int) -> object:
        store = dist.distributed_c10d._get_default_store()
        streams = SocketStreams(rank=rank, size=world_size, store=store, key="experiment")
        side = _Side(streams, time.sleep, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return experiment(side)

    def simulated(rank: SimRank) -> object:
        def kill() -> None:
            raise Killed

        return experiment(_Side(_streams(rank.group), rank.sleep, kill))

    wanted = [
        "ended" if outcome.error_type == "Died" else outcome.value
        for outcome in collect_ranks(real, 2, timeout_s=60)
    ]
    got = [
        "ended" if outcome.ending == "killed" else outcome.values[0]
        for outcome in simulate(simulated, 2, shared_memory=False).outcomes
    ]
    assert got == wanted


def _streams(group: SimGroup) -> SimStreams:
    frames = group.state().frames
    assert frames is not None and isinstance(frames.streams, SimStreams)
    return frames.streams


def _ends(seed: int) -> object:
    """How calls end under faults of a seed, to the moment and the letter."""

    def reduce(rank: SimRank) -> torch.Tensor:
        with call_site("reduce"):
            return cc.all_reduce(torch.ones(3) * rank.rank, group=rank.group)

    def swap(rank: SimRank) -> torch.Tensor:
        with call_site("swap"):
            return cc.all_to_all(torch.ones(rank.size, 5000), group=rank.group)

    faults = FaultSchedule.random(seed, 7, 3)
    result = simulate([reduce, swap, reduce], 7, faults=faults, seed=seed, shared_memory=False)
    return result.elapsed_s, [(one.ending, str(one.error)) for one in result.outcomes]


def test_frames_sent_to_all_ranks_at_once_meet_the_faults_of_those_sent_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = [_ends(seed) for seed in range(12)]
    begin = SimStreams.__init__

    def one_by_one(streams: SimStreams, *args: object, **kwargs: object) -> None:
        begin(streams, *args, **kwargs)  # type: ignore[arg-type]
        streams.send_each = None

    monkeypatch.setattr(SimStreams, "__init__", one_by_one)
    assert [_ends(seed) for seed in range(12)] == at_once
