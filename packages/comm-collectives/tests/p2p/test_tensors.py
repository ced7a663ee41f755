"""Tensor lists between two ranks: any shapes, in order, without waiting for the receiver."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.errors import CollectiveTimeoutError, PeerFailedError
from comm_collectives.p2p import Pending, expect_tensors, launch_transfers
from ranktest import collect_ranks, mark, more_than_sockets_hold, run_ranks, until_marked

_LARGE = more_than_sockets_hold() // 4  # floats that find no room under way
_LISTS = [
    [torch.arange(6.0).view(2, 3)],
    [],
    [torch.empty(0, 5, dtype=torch.bfloat16), torch.tensor(7), torch.tensor([True, False])],
    [torch.full((i,), i, dtype=torch.int16) for i in range(40)],  # header in two messages
    [torch.arange(300_000)],
]


def test_lists_of_changing_shapes_arrive_in_order() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            handles = [cc.isend_tensors(tensors, dst=1) for tensors in _LISTS]
            for handle in handles:
                handle.wait()
                handle.wait()
            return
        for want in _LISTS:
            got = cc.recv_tensors(src=0)
            assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    run_ranks(fn, 2)


def test_send_does_not_wait_for_the_receiver() -> None:
    """Both ranks send first, and would wait for ever if a send waited."""

    def fn(rank: int, world_size: int) -> None:
        other = 1 - rank
        started = time.monotonic()
        handles = [
            cc.isend_tensors([torch.full((_LARGE // 3,), float(rank))], dst=other) for _ in range(3)
        ]
        assert time.monotonic() - started < 5
        for _ in range(3):
            (got,) = cc.recv_tensors(src=other, timeout_s=30)
            assert bool((got == other).all())
        for handle in handles:
            handle.wait()

    run_ranks(fn, 2)


def test_strided_and_tracked_tensors_travel_as_plain_ones() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        if rank == 0:
            cc.isend_tensors([x.t()[::2]], dst=1).wait()
            return
        (got,) = cc.recv_tensors(src=0, device="cpu")
        assert torch.equal(got, x.detach().t()[::2])
        assert got.is_contiguous()
        assert not got.requires_grad

    run_ranks(fn, 2)


def test_ranks_are_those_of_the_group() -> None:
    def fn(rank: int, world_size: int) -> object:
        pair = dist.new_group([3, 1])  # rank 0 of the group is global rank 1
        if rank in (0, 2):
            with pytest.raises(ValueError, match="not a ProcessGroup of which this rank"):
                cc.recv_tensors(src=0, group=dist.GroupMember.NON_GROUP_MEMBER)
            return None
        if dist.get_group_rank(pair, rank) == 0:
            cc.isend_tensors([torch.tensor(rank)], dst=1, group=pair).wait()
            return None
        return int(cc.recv_tensors(src=0, group=pair)[0])

    assert sorted(v for v in run_ranks(fn, 4) if v is not None) in ([1], [3])


def test_receiver_names_a_sender_that_does_not_send() -> None:
    def fn(rank: int, world_size: int) -> str:
        if rank == 0:
            until_marked("gave up")
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            cc.recv_tensors(src=0, timeout_s=0.5)
        mark("gave up")
        return str(caught.value)

    text = str(run_ranks(fn, 2)[1])
    assert text.startswith(
        "rank 1: recv_tensors, transfer 1 from rank 0 to rank 1 of group (0, 1) timed out after "
        "0.5 s; rank 0 did not do its part"
    )


def test_dead_peer_is_named_by_both_directions() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(3)
        time.sleep(0.5)
        texts = []
        for call in (
            lambda: cc.recv_tensors(src=1, timeout_s=5),
            lambda: cc.isend_tensors([torch.ones(2)], dst=1, timeout_s=5).wait(),
        ):
            with pytest.raises(PeerFailedError) as caught:
                call()
            texts.append(str(caught.value))
        return texts

    outcome = collect_ranks(fn, 2)[0]
    assert outcome.ok, outcome.error
    assert "recv_tensors, transfer 1 from rank 1 to rank 0" in outcome.value[0]
    assert "isend_tensors, transfer 1 from rank 0 to rank 1" in outcome.value[1]
    assert all("rank 1 did not do its part" in text for text in outcome.value)


def test_what_comes_after_a_limit_is_received_by_the_next_call() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        if rank == 1:
            until_marked("the receiver gave up")
            handle = cc.isend_tensors([torch.full((_LARGE,), 5.0)], dst=0, timeout_s=0.01)
            with pytest.raises(CollectiveTimeoutError):
                handle.wait()
            mark("the sender gave up")
            last = cc.isend_tensors([torch.tensor(6)], dst=0)
            last.wait()
            handle.wait()  # done meanwhile
            return []
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match="transfer 1 from rank 1"):
                cc.recv_tensors(src=1, timeout_s=0.1)
        mark("the receiver gave up")
        until_marked("the sender gave up")
        return [int(cc.recv_tensors(src=1)[0].view(-1)[-1]) for _ in range(2)]

    assert run_ranks(fn, 2)[0] == [5, 6]


def test_send_without_a_receiver_is_noticed_when_waited_for() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            handle = cc.isend_tensors([torch.ones(_LARGE)], dst=1, timeout_s=0.5)
            with pytest.raises(CollectiveTimeoutError, match="rank 1 did not do its part"):
                handle.wait()
            mark("gave up")
        else:
            until_marked("gave up")

    run_ranks(fn, 2)


@pytest.mark.parametrize(("peer", "match"), [(2, "not a rank of a group of 2"), (0, "itself")])
def test_wrong_peer_is_refused(peer: int, match: str) -> None:
    def fn(rank: int, world_size: int) -> None:
        dist.barrier()
        if rank == 0:
            with pytest.raises(ValueError, match=match):
                cc.isend_tensors([], dst=peer)

    run_ranks(fn, 2)


@pytest.mark.parametrize("given", [torch.ones(3, 2), iter([torch.ones(2)]), None])
def test_what_is_no_list_is_refused_before_anything_is_sent(given: object) -> None:
    """A tensor would be sent as its rows, and an iterator as nothing."""

    def fn(rank: int, world_size: int) -> list[int]:
        if rank == 0:
            with pytest.raises(TypeError, match=r"tensors is a .*; give a list of tensors"):
                cc.isend_tensors(given, dst=1)  # type: ignore[arg-type]
            cc.isend_tensors((torch.ones(4),), dst=1).wait()
            return []
        return [t.numel() for t in cc.recv_tensors(src=0, timeout_s=20)]

    assert run_ranks(fn, 2) == [[], [4]]


def test_unknown_device_is_refused_before_anything_is_received() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        if rank == 0:
            cc.isend_tensors([torch.ones(4)], dst=1).wait()
            return []
        with pytest.raises(ValueError, match="device='tpu9x' cannot be used on this rank"):
            cc.recv_tensors(src=0, device="tpu9x")
        return [t.numel() for t in cc.recv_tensors(src=0, timeout_s=20)]

    assert run_ranks(fn, 2) == [[], [4]]


def test_an_expected_list_arrives_before_it_is_received() -> None:
    def fn(rank: int, world_size: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            expect_tensors(src=0)
            expect_tensors(src=0)  # once more is the same
            store.set("expected", "")
            store.wait(["sent"], timedelta(seconds=30))
            (got,) = cc.recv_tensors(src=0, timeout_s=30)
            assert torch.equal(got, torch.arange(500.0))
        else:
            store.wait(["expected"], timedelta(seconds=30))
            cc.isend_tensors([torch.arange(500.0)], dst=1, timeout_s=10).wait()
            store.set("sent", "")

    run_ranks(fn, 2)


def test_expecting_changes_nothing_about_what_is_received() -> None:
    def fn(rank: int, world_size: int) -> None:
        for want in [*_LISTS, *reversed(_LISTS)]:
            if rank == 0:
                cc.isend_tensors(want, dst=1).wait()
                continue
            expect_tensors(src=0)
            got = cc.recv_tensors(src=0, timeout_s=30)
            assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        # What is expected and never sent disturbs neither collectives nor the end of the group.
        if rank == 1:
            expect_tensors(src=0)
        assert int(cc.all_reduce(torch.ones(()))) == 2

    run_ranks(fn, 2)


def test_a_sender_that_died_is_named_by_whoever_expected_it() -> None:
    def fn(rank: int, world_size: int) -> str:
        if rank == 0:
            cc.recv_tensors(src=1)
            os._exit(1)
        expect_tensors(src=0)
        cc.isend_tensors([], dst=0).wait()
        started = time.monotonic()
        with pytest.raises(PeerFailedError, match="recv_tensors, transfer 1 from rank 0"):
            cc.recv_tensors(src=0, timeout_s=30)
        assert time.monotonic() - started < 10
        expect_tensors(src=0)  # and does not raise
        with pytest.raises(ValueError, match="src"):
            expect_tensors(src=1)
        return "named"

    assert collect_ranks(fn, 2)[1].value == "named"


@pytest.mark.parametrize("peer", [-1, 0, 2, 1.0, "1"])
def test_transfers_with_nobody_are_refused_before_the_device_gets_them(peer: object) -> None:
    def fn(rank: int, world_size: int) -> None:
        started: list[Pending | None] = []

        def start() -> list[Pending | None]:
            started.append(None)
            return started

        with pytest.raises(cc.CommError, match=f"peer={peer!r} is "):
            launch_transfers(start, "send to", peer, None)  # type: ignore[arg-type]
        assert not started

    run_ranks(fn, 1)
