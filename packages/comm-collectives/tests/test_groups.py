"""What a rank knows of a group: numbers, places, devices."""

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.groups import group_state
from ranktest import run_ranks


def test_calls_are_numbered_per_group_and_transfers_per_direction() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        other = dist.new_group([0, 1])
        cc.all_reduce(torch.ones(1))
        cc.all_reduce(torch.ones(1))
        cc.all_reduce(torch.ones(1), group=other)
        world = group_state(None)
        second = group_state(other)
        numbers = [world.next_call(), second.next_call()]
        return [*numbers, world.next_transfer(0, 1), world.next_transfer(1, 0)]

    assert run_ranks(fn, 2) == [[3, 2, 1, 1]] * 2


def test_state_stays_with_its_group() -> None:
    def fn(rank: int, world_size: int) -> None:
        assert group_state(None) is group_state(dist.group.WORLD)

    run_ranks(fn, 1)


def test_gloo_carries_everything_through_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        state = group_state(None)
        assert state.control_type == "cpu"
        assert [state.transport_type(torch.device(d)) for d in ("cpu", "cuda", "mps")] == [
            "cpu"
        ] * 3

    run_ranks(fn, 1)


def test_non_member_is_told_so() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.new_group([0])
        dist.barrier()
        if rank == 1:
            with pytest.raises(ValueError, match="of which this rank is a member"):
                cc.all_reduce(torch.ones(1), group=group)

    run_ranks(fn, 2)
