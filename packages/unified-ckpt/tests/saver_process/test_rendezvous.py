"""Meetings of savers, with real processes and a real store."""

import json
import time

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt.errors import SaveError, SavePeerError
from unified_ckpt.saver_process.rendezvous import (
    SaverRendezvous,
    connect_store,
    host_store,
    post_failure,
)


def meeting_of(rank: int, world_size: int, port: int, timeout_s: float) -> SaverRendezvous:
    store = connect_store("127.0.0.1", port, timeout_s=20)
    return SaverRendezvous(store, rank=rank, size=world_size, timeout_s=timeout_s)


def test_all_take_a_snapshot_or_none_does() -> None:
    host = host_store(timeout_s=20)

    def fn(rank: int, world_size: int) -> list[str]:
        rendezvous = meeting_of(rank, world_size, host.port, timeout_s=20)
        seen = []
        rendezvous.enter(1, note={"step": 1})
        assert not dist.is_initialized() and rendezvous.agreed(1)
        rendezvous.enter(2, note={"step": 2})
        rendezvous.form(2)
        total = torch.tensor([rank])
        dist.all_reduce(total)
        assert total.item() == sum(range(world_size))
        if rank == 1:
            rendezvous.leave()  # as a saver that was started anew: the others still have the group
        rendezvous.enter(3, note={"step": 3})
        rendezvous.form(3)
        dist.all_reduce(total)
        for number, call in ((4, "fails"), (5, "differs"), (6, "works")):
            if call == "fails" and rank == 2:
                post_failure(host, number, "rank 2 has no memory")
                assert not rendezvous.agreed(number)
                seen.append("")
                continue
            try:
                note = {"rank": rank} if call == "differs" else {}
                rendezvous.enter(number, note=note)
                rendezvous.form(number)
                seen.append("")
            except SaveError as error:
                seen.append(str(error))
        dist.all_reduce(total)
        return seen

    for rank, (fails, differs, works) in enumerate(run_ranks(fn, 3, init=False, timeout_s=60)):
        assert fails == ("" if rank == 2 else "rank 2 has no memory")
        assert "rank 0's saver process has {'rank': 0}, but rank 1's has {'rank': 1}" in differs
        assert works == ""


def test_who_does_not_come_in_time_is_named_and_bound_by_the_verdict() -> None:
    host = host_store(timeout_s=20)

    def fn(rank: int, world_size: int) -> str:
        rendezvous = meeting_of(rank, world_size, host.port, timeout_s=0.5)
        if rank == 1:
            time.sleep(1.5)
        with pytest.raises(SaveError) as caught:
            rendezvous.enter(1, note={})
            rendezvous.form(1)
        rendezvous = meeting_of(rank, world_size, host.port, timeout_s=20)
        rendezvous.enter(2, note={})
        rendezvous.form(2)
        return str(caught.value)

    for text in run_ranks(fn, 2, init=False, timeout_s=60):
        assert "ranks [1] did not come to snapshot 1 within 0.5 s" in text


def test_a_failure_after_the_agreement_changes_nothing() -> None:
    host = host_store(timeout_s=20)
    host.compare_set("unified-ckpt-savers/1/outcome", "", json.dumps({"error": "", "group": 1}))
    post_failure(host, 1, "too late")
    rendezvous = SaverRendezvous(
        connect_store("127.0.0.1", host.port, timeout_s=5), rank=1, size=2, timeout_s=5
    )
    assert rendezvous.agreed(1)


def test_a_single_saver_meets_nobody() -> None:
    rendezvous = SaverRendezvous(None, rank=0, size=1, timeout_s=1.0)
    rendezvous.enter(1, note={})
    rendezvous.form(1)
    assert rendezvous.agreed(1) and not dist.is_initialized()


def test_a_saver_that_dies_after_the_agreement_is_told_and_all_have_agreed() -> None:
    """It ends between the two meetings, and its trainer says so; nobody waits for the limit."""
    host = host_store(timeout_s=20)

    def fn(rank: int, world_size: int) -> tuple[str, bool, float]:
        rendezvous = meeting_of(rank, world_size, host.port, timeout_s=600)
        rendezvous.enter(1, note={})
        if rank == 1:
            time.sleep(0.5)
            post_failure(host, 1, "rank 1: the saver process died: SIGKILL")
            return "", rendezvous.agreed(1), 0.0
        started = time.monotonic()
        with pytest.raises(SavePeerError) as caught:
            rendezvous.form(1)
        return str(caught.value), rendezvous.agreed(1), time.monotonic() - started

    first, second = run_ranks(fn, 2, init=False, timeout_s=60)
    assert first[0].endswith("for snapshot 1: rank 1: the saver process died: SIGKILL")
    assert first[1] and second[1], "so that both take it into the average"
    assert first[2] < 20
