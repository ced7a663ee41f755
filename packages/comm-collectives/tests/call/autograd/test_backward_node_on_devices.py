"""A rank whose backward does not come is answered for, or named on all others, on NCCL as on gloo.

Real processes on devices of devicetest, where NCCL is silent and torch's watchdog kills at the
limit of a group: that all live to tell is a part of the proof.
"""

import gc
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.errors import CollectiveTimeoutError, LostGradientWarning, MismatchError
from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
LIMIT_S = 8.0
BAD = 1  # the rank whose backward does not come
Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


def through_all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return cc.all_to_all(x, group=group)


def through_experts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    idx = torch.arange(6, device="cuda").reshape(6, 1) % 3
    weights = torch.ones(6, 1, device="cuda")
    sent = cc.dispatch(x.reshape(6, 1), idx, weights, num_experts=3, group=group)
    return cc.combine(sent.x * sent.topk_weights[:, None], sent.handle).reshape(6)


def sum_of_ones(group: dist.ProcessGroup) -> float:
    return cc.all_reduce(torch.ones(1, device="cuda"), group=group).item()


def drops_its_graph(groups: Groups, rank: int, goes_on_in: int) -> None:
    x = torch.ones(6, device="cuda", requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = cc.all_to_all(x, group=groups[0])
        if rank == BAD:
            del y
            gc.collect()
        else:
            y.sum().backward()
        assert sum_of_ones(groups[goes_on_in]) == 3
        until_s = time.monotonic() + LIMIT_S
        while rank == BAD and not caught and time.monotonic() < until_s:
            time.sleep(0.01)  # a thread that answers warns when it has
    kinds = [warning.category for warning in caught]
    assert kinds == ([LostGradientWarning] if rank == BAD else [])
    # Zeros of the rank that dropped its graph, for the rows that went there.
    assert rank == BAD or (x.grad is not None and x.grad.tolist() == [1, 1, 0, 0, 1, 1])


def raises_in_its_backward(
    groups: Groups,
    rank: int,
    goes_on_in: int,
    through: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor],
) -> None:
    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no memory for this gradient")

    x = torch.ones(6, device="cuda", requires_grad=True)
    between = through(x, groups[0]) * 2
    if rank == BAD:
        between.register_hook(fail)
    loss = through(between, groups[0]).sum()
    with pytest.raises(ValueError if rank == BAD else MismatchError) as caught:
        loss.backward()
    assert rank == BAD or "rank 1: " in str(caught.value)
    assert rank == BAD or "ended in an exception ahead of call" in str(caught.value)
    del loss, caught
    assert sum_of_ones(groups[goes_on_in]) == 3
    assert x.grad is None


def keeps_its_graph(groups: Groups, rank: int) -> None:
    x = torch.ones(6, device="cuda", requires_grad=True)
    y = cc.all_to_all(x, group=groups[0])
    with pytest.raises(MismatchError, match=r"rank 1: .*call \d+ still has its graph here"):
        sum_of_ones(groups[0]) if rank == BAD else y.sum().backward()
    assert x.grad is None


def waits_on_another_device(groups: Groups, rank: int) -> None:
    """It has no graph: its device waits for the others, whose hosts wait for its backward."""
    x = torch.ones(6, device="cuda", requires_grad=rank != BAD)
    y = cc.all_to_all(x, group=groups[0])
    began_s = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        sum_of_ones(groups[1]) if rank == BAD else y.sum().backward()
    text = str(caught.value)
    if rank == BAD:
        assert time.monotonic() - began_s < LIMIT_S  # at which its watchdog kills it
        for peer in (0, 2):
            assert f"rank {peer} (last in call" in text
        assert text.count("and waits for rank 1 in call") == 2 and "on the host" in text
    else:
        assert "(backward)" in text and "did not arrive: rank 1" in text


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_rank_whose_backward_does_not_come_is_answered_for_or_named(
    tmp_path: Path, backend: str
) -> None:
    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=3, nccl={"watchdog": True}):
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(tmp_path / "store"), 3)
            limit = timedelta(seconds=LIMIT_S)
            given: dict[str, Any] = {"timeout": limit}
            if backend != "nccl":  # as moe-train makes it
                given["device_id"] = torch.device("cuda", rank)
            dist.init_process_group(backend, store=store, rank=rank, world_size=3, **given)
            groups = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
            for _ in range(2):  # so that calls are not compared because they are the first
                assert [sum_of_ones(group) for group in groups] == [3, 3]
            for goes_on_in in (0, 1):
                drops_its_graph(groups, rank, goes_on_in)
                for through in (through_all_to_all, through_experts):
                    raises_in_its_backward(groups, rank, goes_on_in, through)
            keeps_its_graph(groups, rank)
            assert sum_of_ones(groups[0]) == 3
            if backend != "nccl":  # which waits for a limit
                waits_on_another_device(groups, rank)

    run_ranks(fn, 3, init=False, timeout_s=120)
