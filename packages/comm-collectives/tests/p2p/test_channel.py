"""Messages between two ranks are taken by what they are, whoever reads the wire."""

import threading

import torch

from comm_collectives.base.transport.header import IS_GRADIENT
from comm_collectives.call.groups.groups import GroupState, group_state
from comm_collectives.p2p.channel import Channel, Transfer
from ranktest import run_ranks


def _transfer(state: GroupState, src: int, number: int) -> Transfer:
    return Transfer(name="test", state=state, src=src, dst=1 - src, number=number, limit_s=20.0)


def test_gradients_are_kept_for_who_wants_them() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        state = group_state(None)
        channel = Channel.of(state, 1 - rank)
        assert Channel.of(state, 1 - rank) is channel
        if rank == 1:
            for number in (3, 1, 2):
                channel.give_gradient([torch.tensor(10.0 * number)], _transfer(state, 0, number))
            works, _ = channel.send([torch.tensor(5.0)], _transfer(state, 1, 1))
            for work in works:
                work.wait()
            return []
        channel.forget(2)
        taken = [
            channel.take(_transfer(state, 0, 1), gradient=True),
            channel.take(_transfer(state, 1, 1)),
            channel.take(_transfer(state, 0, 3), gradient=True),
        ]
        assert [message.header.flags for message in taken] == [IS_GRADIENT, 0, IS_GRADIENT]
        return [message.tensors[0].item() for message in taken]

    assert run_ranks(fn, 2)[0] == [10, 5, 30]


def test_threads_that_wait_for_one_peer_share_the_wire() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        state = group_state(None)
        channel = Channel.of(state, 1 - rank)
        numbers = list(range(1, 9))
        if rank == 1:
            for number in reversed(numbers):
                channel.give_gradient([torch.tensor(float(number))], _transfer(state, 0, number))
            assert channel.take(_transfer(state, 0, 1)).tensors == []
            return []
        found: dict[int, float] = {}

        def take(number: int) -> None:
            message = channel.take(_transfer(state, 0, number), gradient=True)
            found[number] = message.tensors[0].item()

        threads = [threading.Thread(target=take, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        works, _ = channel.send([], _transfer(state, 0, 1))
        for work in works:
            work.wait()
        return [found[number] for number in numbers]

    assert run_ranks(fn, 2)[0] == list(range(1, 9))


def test_messages_of_several_threads_do_not_mix() -> None:
    def fn(rank: int, world_size: int) -> None:
        state = group_state(None)
        channel = Channel.of(state, 1 - rank)
        numbers = list(range(1, 41))
        if rank == 0:
            for number in numbers:
                message = channel.take(_transfer(state, 0, number), gradient=True)
                assert message.tensors[0].tolist() == [number] * number
            return

        def give(part: list[int]) -> None:
            for number in part:
                channel.give_gradient(
                    [torch.full((number,), float(number))], _transfer(state, 0, number)
                )

        threads = [threading.Thread(target=give, args=(numbers[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    run_ranks(fn, 2)
