import os
import signal
import time
from enum import Flag, auto
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import collect_ranks, run_ranks
from unified_ckpt import save
from unified_ckpt._torch_private import shared_store
from unified_ckpt.errors import SaveArgumentError, SaveError, SavePeerError
from unified_ckpt.saving.commit import agreement as agreement_module
from unified_ckpt.saving.commit.agreement import Agreement


class Asked(Flag):
    SAVE = auto()
    NOTE = auto()
    STOP = auto()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def join_over_tcp(folder: Path, rank: int, world_size: int) -> None:
    """Make the process group over a TCPStore, which survives killed ranks; a FileStore does not."""
    note = folder / "port"
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        note.with_suffix(".new").write_text(str(store.port))
        note.with_suffix(".new").rename(note)
    wait_for(note)
    store = store or dist.TCPStore("127.0.0.1", int(note.read_text()), None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def make(timeout_s: float = 20.0) -> Agreement:
    return Agreement(None, timeout_s=timeout_s, subject="save('x')")


def test_payloads_of_any_length_come_back_by_rank() -> None:
    def fn(rank: int, world_size: int) -> list[list]:
        agreement = make()
        with agreement.phase("one") as phase:
            phase.payload = {"rank": rank, "text": "é" * 1000 * rank}
        return [phase.results, agreement.gather("two", None)]

    expected = [{"rank": r, "text": "é" * 1000 * r} for r in range(3)]
    assert run_ranks(fn, 3) == [[expected, [None] * 3]] * 3


def test_without_process_groups_one_rank_agrees_with_itself() -> None:
    agreement = make()
    assert (agreement.rank, agreement.size, agreement.gather("x", 3)) == (0, 1, [3])
    message = r"save\('x'\): rank 0 failed in 'p': KeyError: 'k'"
    with pytest.raises(SaveError, match=message), agreement.phase("p"):
        raise KeyError("k")


def test_an_exception_on_any_rank_raises_on_every_rank_with_its_cause() -> None:
    def fn(rank: int, world_size: int) -> tuple[str, str, bool]:
        agreement = make()
        with pytest.raises(SaveError) as caught, agreement.phase("p"):
            if rank:
                raise OSError(5, f"broken on {rank}")
        agreement.gather("still usable", rank)
        kind = type(caught.value).__name__
        return str(caught.value), kind, isinstance(caught.value.__cause__, OSError)

    first, second, third = run_ranks(fn, 3)
    assert first[0] == second[0] == third[0]
    assert "rank 1 failed in 'p': OSError: [Errno 5] broken on 1; rank 2 failed" in first[0]
    assert [first[1:], second[1:]] == [("SaveError", False), ("SaveError", True)]


def test_only_a_phase_that_checks_arguments_blames_the_caller() -> None:
    for checks, kind in ((True, SaveArgumentError), (False, SaveError)):
        with pytest.raises(SaveError) as caught, make().phase("p", checks_arguments=checks):
            raise ValueError("x")
        assert type(caught.value) is kind


def test_an_interrupt_reaches_the_peers_and_stays_an_interrupt() -> None:
    def fn(rank: int, world_size: int) -> str:
        expected = KeyboardInterrupt if rank == 0 else SaveError
        with pytest.raises(expected) as caught, make().phase("p"):
            if rank == 0:
                raise KeyboardInterrupt
        return str(caught.value)

    assert "rank 0 failed in 'p': KeyboardInterrupt" in str(run_ranks(fn, 2)[1])


def test_a_failed_rank_whose_peer_is_gone_still_says_why_it_failed(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        join_over_tcp(tmp_path, rank, world_size)
        if rank == 1:
            wait_for(tmp_path / "raised")
            return ""
        message = "OSError: mine; the peers could not be told"
        with pytest.raises(SaveError, match=message) as caught, make(timeout_s=0.5).phase("p"):
            raise OSError("mine")
        (tmp_path / "raised").touch()
        return str(caught.value)

    outcomes = collect_ranks(fn, 2, timeout_s=30, init=False)
    assert "ranks [1] did not arrive" in str(outcomes[0].value), outcomes


def test_ranks_of_a_group_are_named_by_their_rank_in_the_world() -> None:
    def fn(rank: int, world_size: int) -> str | None:
        group = dist.new_group([0, 2])
        if rank == 1:
            return None
        agreement = Agreement(group, timeout_s=20.0, subject="save('x')")
        with pytest.raises(SaveError) as caught, agreement.phase("p"):
            if rank == 2:
                raise OSError("x")
        return str(caught.value)

    assert "rank 2 failed in 'p'" in str(run_ranks(fn, 3)[0])


def test_a_peer_that_is_killed_is_named_at_once(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> float:
        join_over_tcp(tmp_path, rank, world_size)
        agreement = make(timeout_s=20.0)
        agreement.gather("first", None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(SavePeerError, match=r"rank [02], .*'p'.*ranks \[1\] did not arrive"):
            agreement.gather("p", None)
        return time.monotonic() - begin

    outcomes = collect_ranks(fn, 3, timeout_s=30, init=False)
    assert outcomes[0].ok and outcomes[0].value < 10.0, outcomes
    # The store lives on rank 0: rank 2 may find that it has ended already.
    assert outcomes[2].ok or "the store that knows" in str(outcomes[2].error), outcomes


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_struck_after_it_has_arrived_is_named_by_all_others(
    tmp_path: Path, fault: signal.Signals
) -> None:
    """A broken connection is seen by its neighbours alone; a third rank waits for these."""

    def fn(rank: int, world_size: int) -> str:
        if rank == 4:  # it hosts the store, and ends a process that has stopped
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            (tmp_path / "new").write_text(str(store.port))
            (tmp_path / "new").rename(tmp_path / "port")
            for number in range(3):
                wait_for(tmp_path / f"told-{number}")
            os.kill(int((tmp_path / "struck").read_text()), signal.SIGKILL)
            return ""
        wait_for(tmp_path / "port")
        store = dist.TCPStore("127.0.0.1", int((tmp_path / "port").read_text()), is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        agreement = make(timeout_s=8.0)
        if rank == 3:
            (tmp_path / "struck").write_text(str(os.getpid()))
            agreement._gather_texts = lambda *_, **__: os.kill(os.getpid(), fault)  # type: ignore[method-assign,assignment,func-returns-value,return-value]
        if rank == 1:
            time.sleep(1.0)
        with pytest.raises(SavePeerError) as caught:
            agreement.gather("p", None)
        (tmp_path / f"told-{rank}").touch()
        return str(caught.value)

    told = [outcome.value for outcome in collect_ranks(fn, 5, timeout_s=90, init=False)[:3]]
    assert all("ranks [3] had arrived, and have died or stopped" in str(text) for text in told), (
        told
    )


def test_a_save_that_all_ranks_agreed_on_does_not_fail_when_the_stores_host_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 hosts the store, saves and ends; rank 1 is slow to mark that it has gone on.

    Only in the last phase: in the one before rank 0 still waits for it when the manifest is there.
    """
    place = tmp_path / "c"
    begun: list[str] = []
    real = Agreement.phase

    def phase(self: Agreement, name: str, **options: bool) -> object:
        begun.append(name)
        return real(self, name, **options)

    class SlowStore:
        def __init__(self, store: dist.Store) -> None:
            self.store = store

        def __getattr__(self, name: str) -> object:
            return getattr(self.store, name)

        def set(self, key: str, value: str) -> None:
            if begun[-1:] == ["commit"] and "gone" in value:
                while not (tmp_path / "ended").exists():
                    time.sleep(0.01)
                time.sleep(0.3)
            self.store.set(key, value)

    def fn(rank: int, world_size: int) -> None:
        join_over_tcp(tmp_path, rank, world_size)
        if rank == 1:
            store = shared_store()
            monkeypatch.setattr(agreement_module, "shared_store", lambda: SlowStore(store))
            monkeypatch.setattr(Agreement, "phase", phase)
        save({"model": {f"w{rank}": torch.ones(9)}}, checkpoint_id=place, timeout_s=20.0)
        if rank == 0:
            (tmp_path / "ended").touch()
            os._exit(0)

    outcomes = collect_ranks(fn, 2, timeout_s=60, init=False)
    assert outcomes[1].ok and (place / "manifest.json").exists(), outcomes


def test_a_flag_of_any_rank_is_seen_by_all_and_an_absent_rank_is_named(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> Asked:
        join_over_tcp(tmp_path, rank, world_size)
        seen = make().any_of("decide", Asked.SAVE if rank == 1 else Asked.STOP)
        if rank == 1:
            wait_for(tmp_path / "raised")
            return seen
        with pytest.raises(SavePeerError, match=r"'decide'.*ranks \[1\] did not arrive"):
            make(timeout_s=0.7).any_of("decide", Asked(0))
        (tmp_path / "raised").touch()
        return seen

    assert run_ranks(fn, 2, init=False) == [Asked.SAVE | Asked.STOP] * 2
    assert make().any_of("x", Asked.NOTE) == Asked.NOTE


def test_half_a_record_in_a_file_store_does_not_hang_the_peers(tmp_path: Path) -> None:
    """What a rank leaves that is killed while it appends; torch's own calls then spin forever."""

    def fn(rank: int, world_size: int) -> str:
        path = tmp_path / "store"
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(path), 2), rank=rank, world_size=world_size
        )
        agreement = make(timeout_s=5.0)
        agreement.gather("first", None)
        if rank == 1:
            with path.open("ab") as file:
                file.write(b"\x08")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(SavePeerError, match="a FileStore cannot tell"):
            agreement.gather("p", None)
        return "done"

    assert collect_ranks(fn, 2, timeout_s=30, init=False)[0].value == "done"
