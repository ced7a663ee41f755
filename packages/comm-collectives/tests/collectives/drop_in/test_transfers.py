"""Transfers between two ranks: what torch's take, and what they do not."""

import pytest
import torch
import torch.distributed as dist

from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.collectives import drop_in
from comm_collectives.collectives.drop_in.in_place import write
from comm_collectives.errors import CommTypeError, MismatchError
from ranktest import run_ranks

_LARGE = 5000


def _bits(elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    top = 2 if dtype == torch.bool else 256
    size = (elements * dtype.itemsize,)
    return torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("elements", [0, 3, _LARGE])
def test_tensors_of_every_dtype_and_stride_arrive(elements: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        for dtype in DTYPES:
            want = _bits(elements, dtype)
            memory = torch.zeros(2 * want.nbytes, dtype=torch.uint8).view(dtype)
            if rank == 0:
                write(memory[::2], want)
                drop_in.send(memory[::2], dst=1)
            else:
                assert drop_in.recv(memory[::2], src=0) == 0
                assert torch.equal(as_bytes(dense(memory[::2])), as_bytes(want)), dtype
                assert not as_bytes(dense(memory[1::2])).any()

    run_ranks(fn, 2)


def test_tags_are_matched_out_of_order_and_large_ones_do_not_mix() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            works = [
                drop_in.isend(torch.full((size,), 10 * tag + i), 1, tag=tag)
                for tag in (0, 1)
                for i, size in enumerate((2, _LARGE, _LARGE))
            ]
            for work in works:
                assert work is not None
                assert work.wait()
                assert work.is_completed()
            return
        for tag in (1, 0):
            rooms = [torch.zeros(size, dtype=torch.int64) for size in (2, _LARGE, _LARGE)]
            received = [drop_in.irecv(room, 0, tag=tag) for room in rooms]
            for work in reversed(received):
                assert work is not None
                work.wait()
            assert [int(room[0]) for room in rooms] == [10 * tag + i for i in range(3)]

    run_ranks(fn, 2)


def test_any_source_is_told() -> None:
    def fn(rank: int, world_size: int) -> None:
        for size in (2, _LARGE):
            drop_in.barrier()
            if rank:
                drop_in.send(torch.full((size,), rank), dst=0)
                drop_in.send(torch.full((size,), rank), dst=0)
                continue
            x, senders = torch.zeros(size, dtype=torch.int64), []
            for _ in range(2):
                senders.append(drop_in.recv(x))
                assert (x == senders[-1]).all()
                work = drop_in.irecv(x)
                assert work is not None
                work.wait()
                senders.append(work.source_rank())
                assert (x == senders[-1]).all()
            assert sorted(senders) == [1, 1, 2, 2]

    run_ranks(fn, 3)


def test_a_receive_goes_on_while_this_rank_makes_other_calls() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.full((_LARGE,), float(rank))
        y = torch.zeros_like(x)
        work = drop_in.irecv(y, 1 - rank)
        assert work is not None
        drop_in.send(x, 1 - rank)  # returns when the peer has it
        drop_in.barrier()
        work.wait()
        assert (y == 1 - rank).all()

    run_ranks(fn, 2, timeout_s=30)


def test_a_batch_of_torchs_runs_on_these() -> None:
    def fn(rank: int, world_size: int) -> None:
        x, y = torch.full((3, 2), rank).t(), torch.zeros(2, 3, dtype=torch.int64)
        with drop_in.patched_torch():
            ops = [
                dist.P2POp(dist.isend, x, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, y, (rank - 1) % world_size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        assert (y == (rank - 1) % world_size).all()

    run_ranks(fn, 3)


def test_tensors_that_differ_are_named_by_the_receiver() -> None:
    def fn(rank: int, world_size: int) -> None:
        for sent, room, match in (
            (torch.ones(3), torch.zeros(2), "3 elements of torch.float32 came from rank 0"),
            (torch.ones(_LARGE), torch.zeros(2), "5000 elements of torch.float32 came"),
            (torch.ones(2), torch.zeros(2, dtype=torch.int32), "for a tensor of 2 of torch.int32"),
        ):
            if rank == 0:
                drop_in.send(sent, 1)
            else:
                with pytest.raises(MismatchError, match=match):
                    drop_in.recv(room, 0)
        with pytest.raises(ValueError, match="dst=7 is not one of the global ranks"):
            drop_in.send(torch.ones(1), 7)
        for tag in -1, 1 << 63:
            with pytest.raises(ValueError, match=f"tag={tag} must be at least 0 and below"):
                drop_in.recv(torch.ones(1), 0, tag=tag)
        with pytest.raises(CommTypeError, match="tag='a' is a str"):
            drop_in.isend(torch.ones(1), 1 - rank, tag="a")  # type: ignore[arg-type]
        with pytest.raises(CommTypeError, match="src='0' is a str"):
            drop_in.irecv(torch.ones(1), group_src="0")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="may share memory"):
            drop_in.recv(torch.ones(1).expand(3), 0)

    run_ranks(fn, 2)


def test_a_transfer_to_oneself_is_refused_by_name() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2)
        with pytest.raises(ValueError, match=f"dst={rank} is this rank itself; give another"):
            drop_in.isend(x, rank)
        with pytest.raises(ValueError, match=f"src={rank} is this rank itself; give another"):
            drop_in.irecv(x, group_src=rank)
        if rank:
            drop_in.send(x + 1, 0)
        else:
            assert drop_in.recv(x, 1) == 1
            assert x.tolist() == [2, 2]

    run_ranks(fn, 2)


def test_what_is_sent_may_share_memory_inside() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            drop_in.send(torch.tensor([7.0]).expand(3), 1)
        else:
            x = torch.zeros(3)
            drop_in.recv(x, 0)
            assert x.tolist() == [7, 7, 7]

    run_ranks(fn, 2)
