"""What a device never ends is named by its ranks' hosts before torch's watchdog kills them.

Real processes on devices of devicetest, where NCCL is silent: whatever is wrong is waited for, and
a call that is not over at the group's limit kills its process.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.errors import CommError, MismatchError
from comm_collectives.p2p import launch_transfers
from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from ranktest import collect_ranks

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
LIMIT_S = 8.0
CULPRIT = 2
Told = tuple[str, str]  # class and text of an error


def killed(x: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def absent(x: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
    time.sleep(0.9 * LIMIT_S)


def differing(x: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
    later = [cc.all_reduce(x, op="max", group=group, async_op=True) for group in groups]
    for handle in later:
        with pytest.raises(MismatchError):
            handle.wait()


@contextmanager
def on_silent_device(rank: int, folder: Path, num_ranks: int, limit_s: float) -> Iterator[Any]:
    """A rank's device under NCCL, which says nothing until the watchdog kills; its store."""
    with fake_cuda(devices=num_ranks, nccl={"watchdog": True}):
        torch.cuda.set_device(rank)
        store = dist.FileStore(str(folder / "store"), num_ranks)
        limit = timedelta(seconds=limit_s)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        store.set(f"process {rank}", str(os.getpid()))
        yield store


def told(call: Callable[[], object]) -> Told:
    """What a call raises."""
    with pytest.raises(CommError) as error:
        call()
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (killed, "PeerFailedError", "rank 2 has ended"),
        (absent, "CollectiveTimeoutError", "rank 2 (last in call 3"),
        (differing, "MismatchError", "op=max"),
    ],
)
def test_who_holds_up_a_device_is_named_before_the_watchdog_kills(
    tmp_path: Path,
    fault: Callable[[torch.Tensor, list[dist.ProcessGroup]], None],
    kind: str,
    words: str,
) -> None:
    def fn(rank: int, world_size: int) -> list[Told]:
        with on_silent_device(rank, tmp_path, 3, LIMIT_S):
            groups = [dist.new_group(timeout=timedelta(seconds=LIMIT_S)) for _ in range(2)]
            x = torch.ones(4, device="cuda")
            for _ in range(3):
                for group in groups:
                    cc.all_reduce(x, group=group)
            if rank == CULPRIT:
                fault(x, groups)
                return []
            # In one group the program does nothing but wait, in the other one it waits later.
            handle = cc.all_reduce(x, group=groups[1], async_op=True)
            found = [told(lambda: cc.all_reduce(x, group=groups[0])), told(handle.wait)]
            for group in groups:  # they are over, and say so again
                assert told(lambda group=group: cc.all_reduce(x, group=group))[0] == kind
            return found

    ranks = collect_ranks(fn, 3, init=False, timeout_s=120)
    for rank in (0, 1):
        assert ranks[rank].ok, ranks[rank]
        # That they live to tell is the proof: at the limit the watchdog would have killed them.
        for name, text in ranks[rank].value:  # type: ignore[attr-defined]
            assert name == kind, text
            assert words in text and "all_reduce" in text and "test_launches.py" in text


def test_a_transfer_whose_peer_dies_ends_with_its_name(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> Told:
        with on_silent_device(rank, tmp_path, 2, LIMIT_S):
            x = torch.ones(4, device="cuda")
            sends = launch_transfers(lambda: [dist.isend(x, 1 - rank)], "send to", 1 - rank, None)
            if rank:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            return told(sends[0].wait)

    survivor, _ = collect_ranks(fn, 2, init=False, timeout_s=60)
    name, text = survivor.value  # type: ignore[misc]
    assert name == "PeerFailedError" and "rank 1 has ended" in text
    assert "send to rank 1, at devices/test_launches.py" in text


def test_a_stopped_rank_is_named_by_who_waits_for_one_that_waits_for_it(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> Told | None:
        with on_silent_device(rank, tmp_path, 3, LIMIT_S) as store:
            limit = timedelta(seconds=LIMIT_S)
            groups = [dist.new_group([i, i + 1], timeout=limit) for i in range(2)]
            x = torch.ones(4, device="cuda")
            for _ in range(3):
                for i in (rank - 1, rank):
                    if 0 <= i < 2:
                        cc.all_reduce(x, group=groups[i])
            if rank == CULPRIT:
                os.kill(os.getpid(), signal.SIGSTOP)
                return None
            # Rank 1 is on its way to rank 0, and does not come.
            found = told(lambda: cc.all_reduce(x, group=groups[rank]))
            if rank == 0:
                os.kill(int(store.get(f"process {CULPRIT}")), signal.SIGKILL)
            return found

    ranks = collect_ranks(fn, 3, init=False, timeout_s=60)
    kind, text = ranks[0].value  # type: ignore[misc]
    assert kind == "CollectiveTimeoutError" and "did not arrive: rank 1 (last in call 3" in text
    assert "in group (1, 2), where no process of rank 2 answers" in text
    kind, text = ranks[1].value  # type: ignore[misc]
    assert kind == "CollectiveTimeoutError" and "rank 2 (its process does not answer" in text
