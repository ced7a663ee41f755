import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import comm_collectives
from comm_collectives import isend_tensors, recv_tensors
from moe_pipeline.executor.groups.pipeline_groups import make_pipeline_groups
from ranktest import collect_ranks, run_ranks


def test_groups_of_two_pipelines_and_a_rank_in_none():
    def fn(rank, world_size):
        groups = make_pipeline_groups([[0, 2], [1, 3]], timeout_s=20)
        if rank == 4:
            return groups.forward, groups.backward
        found = []
        for group in (groups.forward, groups.backward):
            at = dist.get_rank(group)
            handle = isend_tensors([torch.tensor(rank)], dst=1 - at, group=group)
            found.append((at, int(recv_tensors(src=1 - at, group=group)[0])))
            handle.wait()
        assert groups.forward is not groups.backward
        return found

    pairs = [[(0, 2)] * 2, [(0, 3)] * 2, [(1, 0)] * 2, [(1, 1)] * 2]
    assert run_ranks(fn, 5) == [*pairs, (None, None)]


def test_a_rank_that_does_not_come_is_named_within_the_limit():
    def fn(rank, world_size):
        if rank == 1:
            time.sleep(6)
            return
        make_pipeline_groups([[0, 1, 2]], timeout_s=1)

    outcomes = collect_ranks(fn, 3, timeout_s=60)
    for rank in (0, 2):
        assert outcomes[rank].error_type == "CollectiveTimeoutError", outcomes[rank].error
        assert "did not arrive: rank 1" in outcomes[rank].error


def test_a_rank_that_dies_is_named():
    """At once, whether or not the ranks have made a call before."""

    def fn(rank, world_size, met):
        if met:
            comm_collectives.all_gather(torch.ones(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        make_pipeline_groups([[0, 1, 2]], timeout_s=20)

    for met in (True, False):
        outcomes = collect_ranks(partial(fn, met=met), 3, timeout_s=60)
        for rank in (0, 2):
            assert outcomes[rank].error_type == "PeerFailedError", outcomes[rank].error
            assert "rank 1" in outcomes[rank].error


def test_ranks_that_disagree_or_occur_twice_are_refused():
    def fn(rank, world_size):
        with pytest.raises(ValueError, match=r"ranks \[1\] gave other pipelines than rank 0; rank"):
            make_pipeline_groups([[0, 1]] if rank != 1 else [[0, 2]], timeout_s=20)
        with pytest.raises(ValueError, match=r"\[2, 0\] is not in ascending order"):
            make_pipeline_groups([[2, 0]], timeout_s=20)
        with pytest.raises(ValueError, match=r"ranks \[1\] occur twice"):
            make_pipeline_groups([[0, 1], [1, 2]], timeout_s=20)
        with pytest.raises(
            ValueError, match=r"a pipeline is empty in pipelines=\[\[0, 1\], \[\]\]"
        ):
            make_pipeline_groups([[0, 1], []], timeout_s=20)

    run_ranks(fn, 3)
