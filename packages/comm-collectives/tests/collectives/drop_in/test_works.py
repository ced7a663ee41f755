"""Calls in the terms of torch's Work."""

import pytest
import torch
import torch.distributed as dist

from comm_collectives.collectives import drop_in
from comm_collectives.errors import MismatchError
from ranktest import run_ranks


def test_a_work_is_what_torchs_is() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.full((3,), float(rank))
        work = drop_in.all_reduce(x, async_op=True)
        assert isinstance(work, dist.Work)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        assert doubled.wait().tolist() == [2, 2, 2]
        work = drop_in.all_reduce(torch.ones(2 + rank), async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(MismatchError):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)
        with pytest.raises(MismatchError):
            future.wait()

    run_ranks(fn, 2)
