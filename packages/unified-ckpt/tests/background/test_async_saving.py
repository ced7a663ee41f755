"""Saves in the background, with real saver processes and real kills."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import (
    Shard,
    get_last_checkpoint,
    load,
    load_files,
    random_state_files,
    restore_random_state,
    save,
    verify_checkpoint,
)
from unified_ckpt.background.async_saving import async_save
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.process import SaverProcess, open_store
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.errors import CheckpointValueError, SaveArgumentError, SaveError
from unified_ckpt.files.storage import FsspecStore, Location
from unified_ckpt.options import SaveOptions
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.snapshots import SharedMemory, StagingLayout

ROWS, COLUMNS = 40, 1000


def shards(rank: int, world_size: int, value: float) -> dict[str, list[Shard]]:
    tensor = torch.full((ROWS, COLUMNS), float(value))
    rows = Shard.of(
        "rows", tensor, global_shape=(ROWS * world_size, COLUMNS), offset=(ROWS * rank, 0)
    )
    return {"model": [rows], "optimizer": [rows]}


def value_of(checkpoint: Path, part: str = "model") -> float:
    (index,) = {load_shape(checkpoint, part)}
    tensor = torch.full(index, -1.0)
    load(
        [Shard.of("rows", tensor, global_shape=index, offset=(0, 0))],
        checkpoint_id=checkpoint,
        part=part,
    )
    (value,) = set(tensor.flatten().tolist())
    return value


def load_shape(checkpoint: Path, part: str) -> tuple[int, ...]:
    from unified_ckpt import read_index

    return read_index(checkpoint, part)["rows"].shape


def test_the_checkpoint_is_the_state_at_the_call(saver: AsyncSaver, tmp_path: Path) -> None:
    parts = shards(0, 1, 3.0)
    response = async_save(
        parts,
        checkpoint_id=tmp_path / "checkpoint-1",
        saver=saver,
        files={"config.json": b"{}"},
        rank_files={"rng-0": b"\x00\x01"},
    )
    assert response.staging_completion.done()
    parts["model"][0].tensor.fill_(-7.0)  # training goes on
    report = response.upload_completion.result(timeout=20)
    assert report is not None and report.path == (tmp_path / "checkpoint-1").resolve()
    assert value_of(report.path) == 3.0 and value_of(report.path, "optimizer") == 3.0
    assert load_files(report.path, "config.json") == b"{}"
    assert load_files(report.path, "rng-0") == b"\x00\x01"
    assert verify_checkpoint(report.path).problems == ()


def test_every_dtype_and_ugly_shape_is_staged_bit_for_bit(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    raw = torch.randint(0, 2, (6, 16), dtype=torch.uint8)
    tensors = {
        "bool": raw.view(torch.bool),
        "bf16": raw.view(torch.bfloat16),
        "f8": raw.view(torch.float8_e4m3fn),
        "f4": raw.view(torch.float4_e2m1fn_x2),
        "c64": raw.view(torch.complex64),
        "i64": torch.tensor(-5),
        "empty": torch.empty(0, 3),
        "strided": torch.rand(4, 6).t()[1:, ::2],
        "leaf": torch.rand(3, requires_grad=True),
    }
    parts = {
        "model": [
            Shard.of(k, t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
            for k, t in tensors.items()
        ],
        "optimizer": [],
    }
    async_save(parts, checkpoint_id=tmp_path / "c", saver=saver).upload_completion.result(
        timeout=20
    )
    for shard in parts["model"]:
        found = torch.empty(tuple(shard.tensor.shape), dtype=shard.tensor.dtype)
        load(
            [Shard(key=shard.key, tensor=found, box=shard.box)],
            checkpoint_id=tmp_path / "c",
        )
        want = shard.tensor.detach().contiguous().reshape(-1)
        assert torch.equal(found.reshape(-1).view(torch.uint8), want.view(torch.uint8)), shard.key


def test_modules_optimizers_values_and_options_are_taken_as_save_takes_them(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(40, 30)
        optimizer = torch.optim.Adam(dict(model.named_parameters()).items(), lr=0.1)
        model(torch.rand(2, 40)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "progress": {"epoch": 3}}
    options = SaveOptions(moment_compression="int8")
    twin = {"exact": tmp_path / "exact", "packed": tmp_path / "packed"}
    save(state, checkpoint_id=twin["exact"])
    save(state, checkpoint_id=twin["packed"], options=options)
    for name, used in (("exact", None), ("packed", options)):
        place = tmp_path / f"async-{name}"
        response = async_save(state, checkpoint_id=place, saver=saver, options=used)
        assert response.upload_completion.result(timeout=60) is not None
        for path in twin[name].iterdir():
            assert (place / path.name).read_bytes() == path.read_bytes(), path
    other, other_optimizer = trained()
    found = {"model": other, "optimizer": other_optimizer, "progress": {"epoch": 0}}
    load(found, checkpoint_id=tmp_path / "async-exact")
    assert torch.equal(other.weight, model.weight) and found["progress"] == {"epoch": 3}


def test_a_growing_state_gets_larger_staging(saver: AsyncSaver, tmp_path: Path) -> None:
    for number, rows in enumerate((10, 5000, 20)):
        tensor = torch.full((rows, 1000), float(number))
        parts = {"model": [Shard.of("rows", tensor, global_shape=(rows, 1000), offset=(0, 0))]}
        response = async_save(parts, checkpoint_id=tmp_path / f"checkpoint-{number}", saver=saver)
        response.upload_completion.result(timeout=20)
        assert value_of(tmp_path / f"checkpoint-{number}") == number


def test_the_first_save_after_prepare_makes_neither_memory_nor_views(
    saver: AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, files = shards(0, 1, 3.0), {"tokenizer.json": b"t" * (32 << 20)}
    made: list[str] = []
    allocate, views = SharedMemory.allocate, StagingLayout.views
    monkeypatch.setattr(
        SharedMemory, "allocate", lambda *a, **k: made.append("memory") or allocate(*a, **k)
    )
    monkeypatch.setattr(StagingLayout, "views", lambda *a: made.append("views") or views(*a))
    saver.prepare(parts, files=files)
    assert set(made) == {"memory", "views"}
    made.clear()
    for number in range(2):  # as many as there are buffers
        async_save(parts, checkpoint_id=tmp_path / f"c-{number}", saver=saver, files=files)
    assert made == []
    saver.wait()


def test_an_error_of_the_background_shows_in_the_future_and_not_again(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("not a checkpoint")
    response = async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "taken", saver=saver)
    with pytest.raises(SaveArgumentError, match=r"not a checkpoint that may be replaced"):
        response.upload_completion.result(timeout=20)
    response = async_save(shards(0, 1, 2.0), checkpoint_id=tmp_path / "checkpoint-2", saver=saver)
    assert response.upload_completion.result(timeout=20) is not None


def test_an_error_that_nobody_saw_is_raised_by_the_next_save(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    response = async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "taken", saver=saver)
    while not response.upload_completion.done():
        time.sleep(0.01)
    with pytest.raises(SaveError, match=r"since the last call .* is not a directory"):
        async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "checkpoint-1", saver=saver)
    response = async_save(shards(0, 1, 2.0), checkpoint_id=tmp_path / "checkpoint-2", saver=saver)
    assert response.upload_completion.result(timeout=20) is not None
    assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_wrong_arguments_name_the_part(saver: AsyncSaver, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"part 'model': a shard is a Tensor"):
        async_save({"model": [torch.zeros(1)]}, checkpoint_id=tmp_path / "c", saver=saver)
    with pytest.raises(SaveArgumentError, match=r"load_ema needs AsyncSaverConfig\(ema="):
        saver.load_ema(tmp_path / "c")
    with pytest.raises(TypeError, match=r"file 'a' is a str"):
        async_save({}, checkpoint_id=tmp_path / "c", saver=saver, files={"a": "text"})


def test_whatever_a_state_raises_spoils_only_its_own_save(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    class Odd:
        def state_dict(self) -> dict[str, int]:
            raise LookupError("no epoch yet")

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise NotImplementedError

    with pytest.raises(LookupError, match="no epoch yet"):
        async_save({"progress": Odd()}, checkpoint_id=tmp_path / "c", saver=saver)
    parts = shards(0, 1, 1.0)
    pending, _ = saver.reserve(parts, checkpoint_id=tmp_path / "c")
    saver.abandon(pending, KeyboardInterrupt())
    with pytest.raises(SaveError, match="rank 0: KeyboardInterrupt"):
        pending.upload_completion.result(timeout=5)
    async_save(parts, checkpoint_id=tmp_path / "checkpoint-1", saver=saver)
    saver.wait(timeout_s=30)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_wait_waits_for_what_another_thread_will_submit(saver: AsyncSaver, tmp_path: Path) -> None:
    """As the copying thread does once a device has copied all."""
    pending, tensors = saver.reserve(shards(0, 1, 5.0), checkpoint_id=tmp_path / "checkpoint-1")
    for view, tensor in zip(pending.buffer.views(pending.layout), tensors, strict=True):
        view.copy_(tensor)
    saver.expect(pending)
    threading.Timer(0.3, saver.submit, [pending]).start()
    saver.wait(timeout_s=30)
    assert pending.upload_completion.done() and value_of(tmp_path / "checkpoint-1") == 5.0


def test_snapshots_reach_the_saver_in_order_though_threads_send_them(
    saver: AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.prepare(shards(0, 1, 1.0))
    sent: list[int] = []
    send = SaverProcess.send

    def slow_first(process: SaverProcess, message: dict[str, Any], *fds: int) -> None:
        if message["number"] == first.number:
            time.sleep(0.3)  # as a thread that was interrupted here
        sent.append(message["number"])
        send(process, message, *fds)

    first, second = (
        saver.reserve(shards(0, 1, 1.0), checkpoint_id=tmp_path / f"checkpoint-{n}")[0]
        for n in (1, 2)
    )
    monkeypatch.setattr(SaverProcess, "send", slow_first)
    thread = threading.Thread(target=saver.submit, args=[first])
    thread.start()
    time.sleep(0.1)
    saver.submit(second)
    thread.join()
    saver.wait(timeout_s=30)
    assert sent == [first.number, second.number]


def test_a_buffer_that_is_still_written_to_is_not_used_again(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    parts = shards(0, 1, 1.0)
    pending, _ = saver.reserve(parts, checkpoint_id=tmp_path / "c")
    late = pending.buffer.views(pending.layout)
    saver.abandon(pending, SaveError("too slow"), still_copying=True)
    assert pending.upload_completion.exception(timeout=5) is not None
    for step in (1, 2, 3):  # more than there are buffers
        async_save(parts, checkpoint_id=tmp_path / f"checkpoint-{step}", saver=saver)
        for view in late:
            view.fill_(-1.0)
        saver.wait(timeout_s=30)
        assert value_of(tmp_path / f"checkpoint-{step}") == 1.0


def test_a_save_that_a_closed_saver_has_not_answered_has_an_outcome(tmp_path: Path) -> None:
    saver = AsyncSaver(config=AsyncSaverConfig(timeout_s=0.5, start_timeout_s=10.0))
    os.kill(saver.pid, signal.SIGSTOP)  # as one whose disk hangs
    response = async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "c", saver=saver)
    with pytest.raises(SaveError, match=r"1 saves did not end within 1 s"):
        saver.close()
    with pytest.raises(SaveError, match=r"closed before this save had ended"):
        response.upload_completion.result(timeout=5)


def test_a_forked_child_that_ends_leaves_the_saver_to_its_parent(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        child = os.fork()
        if child == 0:
            saver.close()  # as the end of a process does
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.3)
        assert not saver.saver_ended
        response = async_save(shards(0, 1, 1.0), checkpoint_id=tmp_path / "c", saver=saver)
        assert response.upload_completion.result(timeout=30) is not None


def test_a_saver_that_does_not_start_leaves_nothing_behind() -> None:
    before = (set(os.listdir("/proc/self/fd")), threading.active_count())
    with pytest.raises(SaveError, match=r"did not start in 0\.05 s"):
        AsyncSaver(config=AsyncSaverConfig(start_timeout_s=0.05))
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b'"start_timeout_s": 0.05' in command]


def test_a_store_that_a_rank_cannot_reach_fails_on_all_ranks() -> None:
    def fn(rank: int, world_size: int) -> str:
        config = AsyncSaverConfig(
            store_host="nowhere.invalid" if rank == 0 else None, start_timeout_s=8.0
        )
        with pytest.raises(SaveError) as caught:
            AsyncSaver(config=config)
        return str(caught.value)

    for text in run_ranks(fn, 2, timeout_s=60):
        assert "rank 1 failed in 'connect to store'" in text


def test_a_save_in_the_background_goes_to_a_store_by_its_url(
    tmp_path: Path, saver: AsyncSaver
) -> None:
    url = f"file://{tmp_path}/run/checkpoint-1"
    state = {"model": {"w": torch.arange(5.0)}}
    response = async_save(state, checkpoint_id=url, rank_files=random_state_files(0), saver=saver)
    report = response.upload_completion.result(timeout=60.0)
    assert str(report.path) == url and not report.replaced
    again = {"model": {"w": torch.zeros(5)}}
    load(again, checkpoint_id=url)
    assert torch.equal(again["model"]["w"], state["model"]["w"])
    assert restore_random_state(url, 0) and verify_checkpoint(url).problems == ()


def test_a_store_that_a_saver_process_cannot_open_is_refused_at_once(saver: AsyncSaver) -> None:
    place = Location(store=FsspecStore(fsspec.filesystem("memory")), key="run/checkpoint-1")
    with pytest.raises(CheckpointValueError, match="which a saver process opens anew"):
        async_save({"model": {"w": torch.zeros(5)}}, checkpoint_id=place, saver=saver)


def test_who_stops_waiting_takes_nothing_back_and_later_saves_go_on(
    tmp_path: Path, saver: AsyncSaver
) -> None:
    async def wait_briefly(outcome: Future[Any]) -> None:
        await asyncio.wait_for(asyncio.wrap_future(outcome), 0)

    for step in range(1, 4):  # more than there are buffers
        response = async_save(shards(0, 1, step), checkpoint_id=tmp_path / f"{step}", saver=saver)
        with pytest.raises(TimeoutError):
            asyncio.run(wait_briefly(response.upload_completion))
        assert not response.staging_completion.cancel()
        assert response.upload_completion.result(timeout=60) is not None
    assert verify_checkpoint(tmp_path / "3").problems == ()


def test_savers_meet_on_this_machine_only_where_all_ranks_are_on_one() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        found = []
        for node, host in (("one", None), ("one", "localhost"), (f"node-{rank}", "localhost")):
            os.environ["UNIFIED_CKPT_NODE"] = node
            agreement = Agreement(None, timeout_s=30.0, subject="test")
            _, settings = open_store(agreement, AsyncSaverConfig(store_host=host))
            found.append(settings["store"][0])
        return found

    for found in run_ranks(fn, 2, timeout_s=120):
        assert found == ["127.0.0.1", "localhost", "localhost"]
