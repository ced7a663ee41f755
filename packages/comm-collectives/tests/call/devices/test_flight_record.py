"""What torch's flight recorder has of a group stands in the error about a device that hangs.

The records are torch's own, of gloo: those of NCCL have the same form and need a card.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives._torch_private import dump_flight_records
from comm_collectives.call.devices.flight_record import SETTINGS, unfinished_work
from comm_collectives.errors import CollectiveTimeoutError
from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from ranktest import collect_ranks

LIMIT_S = 8.0
HAS_RECORDS = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
needs_records = pytest.mark.skipif(not HAS_RECORDS, reason="this torch records nothing of gloo")


@needs_records
def test_the_oldest_work_without_an_end_is_named(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> tuple[str, str, str]:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group, other = dist.new_group(), dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        ended = unfinished_work(group.group_name)
        if rank:
            store.wait(["told"])
            return "", "", ""
        works = [dist.all_reduce(torch.ones(3, n), group=group, async_op=True) for n in (2, 4)]
        found = unfinished_work(group.group_name)
        elsewhere = unfinished_work(other.group_name)
        store.set("told", "")
        del works
        return ended, found, elsewhere

    (first, _) = collect_ranks(fn, 2, init=False, timeout_s=60)
    assert first.ok, first
    ended, found, elsewhere = first.value  # type: ignore[misc]
    assert ended == elsewhere == ""
    assert "gloo:all_reduce number 2 of [[3, 2]] is scheduled" in found
    assert found.endswith("has not ended, and 1 behind it")


@pytest.mark.parametrize("value", [None, "0", "many"])
def test_the_recorder_is_read_only_where_it_is_switched_on(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def refuse() -> list[bytes]:
        raise AssertionError("was read")

    monkeypatch.setattr("comm_collectives.call.devices.flight_record.dump_flight_records", refuse)
    assert unfinished_work("0") == ""


def test_a_recorder_without_records_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "10")
    assert all(dumped.startswith(b"{") for dumped in dump_flight_records())
    assert unfinished_work("no group has this name") == ""


@needs_records
@pytest.mark.skipif(not has_nccl_rules(), reason="this torch takes no backend written in Python")
def test_the_error_about_an_absent_rank_has_the_record_of_its_group(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
        with fake_cuda(devices=2, nccl={"watchdog": True}):
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(tmp_path / "store"), 2)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl",
                store=store,
                rank=rank,
                world_size=2,
                timeout=timedelta(seconds=LIMIT_S),
            )
            x = torch.ones(4, device="cuda")
            for _ in range(3):
                cc.all_reduce(x)
            if rank:
                time.sleep(0.9 * LIMIT_S)
                return ""
            work = dist.all_reduce(torch.ones(5), async_op=True)  # never ends either
            with pytest.raises(CollectiveTimeoutError) as error:
                cc.all_reduce(x)
            del work
            return str(error.value)

    (first, _) = collect_ranks(fn, 2, init=False, timeout_s=90)
    assert first.ok, first
    assert "rank 1 (last in call 3" in str(first.value)
    assert "flight recorder: gloo:all_reduce number" in str(first.value)
    assert "of [[5]] is scheduled and has not ended" in str(first.value)
