"""What simulated ranks send each other beside their calls, against gloo: with the same ends."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from comm_collectives.base.transport.transport import Transport
from comm_collectives.call.failures import classify
from comm_collectives.call.groups.groups import group_state
from comm_collectives.errors import CommError
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

    def recv(self, size: int, limit: timedelta = _LIMIT) -> list[int]:
        flat = _bytes(size)
        self.transport.recv(flat, 0).wait(limit)  # type: ignore[union-attr]
        return flat.tolist()


def _bytes(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def _messages_to_one_peer_arrive_in_order(m: _Machine) -> object:
    if m.rank == 0:
        works = [m.transport.send(_bytes(3, value), 1) for value in (5, 6)]
        return [work.wait(_LIMIT) for work in works]  # type: ignore[union-attr]
    return [m.recv(3), m.recv(3)]


def _peer_dies_while_awaited(m: _Machine) -> object:
    if m.rank == 0:
        m.sleep(0.3)
        m.kill()
    return m.recv(3, timedelta(seconds=50))


def _told(experiment: Callable[[_Machine], object], machine: _Machine) -> object:
    """What the rank got, or the kind of its error."""
    try:
        return experiment(machine)
    except RuntimeError as error:
        return classify(error, None)[0].__name__


@pytest.mark.parametrize(
    "experiment",
    [
        _messages_to_one_peer_arrive_in_order,
        _peer_dies_while_awaited,
    ],
)
def test_simulated_messages_do_what_gloo_does(experiment: Callable[[_Machine], object]) -> None:
    def real(rank: int, world_size: int) -> object:
        def kill() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        return _told(experiment, _Machine(group_state(None).transport, rank, kill))

    def simulated(rank: SimRank) -> object:
        def kill() -> None:
            raise Killed

        return _told(experiment, _Machine(rank.group.state().transport, rank.rank, kill))

    wanted = [
        "ended" if outcome.error_type == "Died" else outcome.value
        for outcome in collect_ranks(real, 2, timeout_s=60)
    ]
    got = [
        "ended" if outcome.ending == "killed" else outcome.values[0]
        for outcome in simulate(simulated, 2, limit_s=60.0).outcomes
    ]
    assert got == wanted


def test_own_limit_of_a_group_closes_the_connections_of_that_rank() -> None:
    def call(rank: SimRank) -> list[object]:
        machine = _Machine(rank.group.state().transport, rank.rank, lambda: None)
        if rank.rank == 0:
            machine.sleep(10.0)

            def send(m: _Machine) -> None:
                m.transport.send(_bytes(3), 1)

            return [_told(send, machine)]

        limit = timedelta.max
        return [_told(lambda m: m.recv(3, limit), machine) for _ in range(2)]

    sender, receiver = simulate(call, 2, limit_s=2.0).outcomes
    assert receiver.values[0] == ["CollectiveTimeoutError", "PeerFailedError"]
    assert sender.values[0] == ["PeerFailedError"]


def test_simulated_ranks_have_no_device() -> None:
    def call(rank: SimRank) -> None:
        rank.group.state().transport.broadcast(_bytes(3), 0)

    assert isinstance(simulate(call, 2).outcomes[0].error, CommError)
