"""Simulated wires against gloo: the same experiments on both, with the same ends."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from comm_collectives.base.transport.transport import Transport
from comm_collectives.call.failures import classify
from comm_collectives.call.groups.groups import group_state
from comm_collectives.simulation.run import SimRank, simulate
from comm_collectives.simulation.world import Killed
from ranktest import collect_ranks

_LIMIT = timedelta(seconds=1.0)


class _Machine:
    """What an experiment does besides transfers: for real, or in virtual time."""

    def __init__(self, transport: Transport, rank: int, kill: Callable[[], None]) -> None:
        self.transport, self.rank, self.kill = transport, rank, kill

    def sleep(self, duration_s: float) -> None:
        self.transport.clock.sleep(duration_s)

    def swap(self, value: int = 0) -> list[int]:
        got = _bytes(8)
        self.transport.exchange(got, _bytes(8, value), [4, 4], [4, 4]).wait(_LIMIT)  # type: ignore[union-attr]
        return got.tolist()

    def broadcast(self, size: int) -> list[int]:
        flat = _bytes(size, 7 * (1 - self.rank))
        self.transport.broadcast(flat, 0).wait(_LIMIT)  # type: ignore[union-attr]
        return flat.tolist()


def _bytes(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def _exchange(m: _Machine) -> object:
    return m.swap(m.rank + 1)


def _other_kinds_of_operation(m: _Machine) -> object:
    try:
        if m.rank == 0:
            return m.swap()
        return m.transport.all_gather(_bytes(8), _bytes(4)).wait(_LIMIT)  # type: ignore[union-attr]
    finally:
        m.sleep(0.5)  # else the process that gives up first takes its connections along


def _peer_dies_while_awaited(m: _Machine) -> object:
    if m.rank == 1:
        m.sleep(0.3)
        m.kill()
    return m.swap()


def _peer_sends_and_dies_before_the_other_comes(m: _Machine) -> object:
    if m.rank == 1:
        m.transport.exchange(_bytes(8), _bytes(8), [4, 4], [4, 4])
        m.sleep(0.3)
        m.kill()
    m.sleep(0.8)
    return m.swap()


def _source_of_a_broadcast_loses_a_receiver(m: _Machine) -> object:
    if m.rank == 1:
        m.sleep(0.3)
        m.kill()
    return m.broadcast(8)


def _shorter_message_than_expected(m: _Machine) -> object:
    return m.broadcast(4 if m.rank == 0 else 8)[:4]


def _longer_message_than_expected(m: _Machine) -> object:
    return m.broadcast(8 if m.rank == 0 else 4)


def _all_reduce(m: _Machine) -> object:
    flat = torch.tensor([1.5 + m.rank, 4.0 - m.rank])
    m.transport.all_reduce(flat, "max").wait(_LIMIT)  # type: ignore[union-attr]
    return flat.tolist()


def _messages_to_one_peer_arrive_in_order(m: _Machine) -> object:
    if m.rank == 0:
        works = [m.transport.send(_bytes(3, value), 1) for value in (5, 6)]
        return [work.wait(_LIMIT) for work in works]  # type: ignore[union-attr]
    got = [_bytes(3), _bytes(3)]
    for flat in got:
        m.transport.recv(flat, 0).wait(_LIMIT)  # type: ignore[union-attr]
    return [flat.tolist() for flat in got]


def _wait_gives_up_and_the_operation_still_ends(m: _Machine) -> object:
    if m.rank == 1:
        m.sleep(1.5)
        return m.swap(3)
    got = _bytes(8)
    work = m.transport.exchange(got, _bytes(8, 2), [4, 4], [4, 4])
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(_LIMIT)  # type: ignore[union-attr]
    work.wait(_LIMIT)  # type: ignore[union-attr]
    return got.tolist()


def _told(experiment: Callable[[_Machine], object], machine: _Machine) -> object:
    """What the rank got, or the kind of its error."""
    try:
        return experiment(machine)
    except RuntimeError as error:
        return classify(error, None)[0].__name__


_EXPERIMENTS = (
    *(_exchange, _other_kinds_of_operation, _peer_dies_while_awaited),
    *(_peer_sends_and_dies_before_the_other_comes, _source_of_a_broadcast_loses_a_receiver),
    *(_shorter_message_than_expected, _longer_message_than_expected, _all_reduce),
    *(_messages_to_one_peer_arrive_in_order, _wait_gives_up_and_the_operation_still_ends),
)


@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_simulated_wires_do_what_gloo_does(experiment: Callable[[_Machine], object]) -> None:
    def real(rank: int, world_size: int) -> object:
        faulthandler.disable()  # gloo aborts in some experiments, and that is no news

        def kill() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        return _told(experiment, _Machine(group_state(None).transport, rank, kill))

    def simulated(rank: SimRank) -> object:
        def kill() -> None:
            raise Killed

        return _told(experiment, _Machine(rank.group.state().transport, rank.rank, kill))

    started = time.monotonic()
    wanted = [
        "ended" if outcome.error_type == "Died" else outcome.value
        for outcome in collect_ranks(real, 2, timeout_s=30)
    ]
    assert time.monotonic() - started < 25
    got = [
        "ended" if outcome.ending in ("killed", "aborted") else outcome.values[0]
        for outcome in simulate(simulated, 2, shared_memory=False).outcomes
    ]
    assert got == wanted


def test_own_limit_of_a_group_closes_the_connections_of_that_rank() -> None:
    def call(rank: SimRank) -> list[str]:
        machine = _Machine(rank.group.state().transport, rank.rank, lambda: None)
        if rank.rank == 1:
            machine.sleep(10.0)

        def swap(m: _Machine) -> None:
            m.transport.exchange(_bytes(8), _bytes(8), [4, 4], [4, 4]).wait()  # type: ignore[union-attr]

        return [str(_told(swap, machine)) for _ in range(2)]

    first, second = simulate(call, 2, limit_s=2.0, shared_memory=False).outcomes
    assert first.values[0] == ["CollectiveTimeoutError", "PeerFailedError"]
    assert second.values[0] == ["PeerFailedError", "PeerFailedError"]
