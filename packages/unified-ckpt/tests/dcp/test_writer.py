import gc
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranktest import collect_ranks, run_ranks
from unified_ckpt import load, read_index, verify_checkpoint
from unified_ckpt.dcp.reader import UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
WEIGHT = torch.arange(35.0).view(7, 5)


def state(num_ranks: int, dim: int, fill: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (num_ranks,))
    weight = WEIGHT if fill else WEIGHT * 0
    return {
        "model": {
            "w": distribute_tensor(weight, mesh, [Shard(dim)]),
            "same": distribute_tensor(weight[0].bfloat16(), mesh, [Replicate()]),
            "count": torch.tensor(3 if fill else 0),
            "flags": torch.tensor([fill, False]),
        },
        "optimizer": {"param_groups": [{"lr": 0.1 if fill else 0.0, "names": ["w"]}]},
        "step": 12 if fill else 0,
        "none": None if fill else 1,
    }


def test_dcp_saves_a_committed_checkpoint_that_it_loads_under_another_layout(
    tmp_path: Path,
) -> None:
    target = tmp_path / "checkpoint-1"

    def saves(rank: int, world_size: int) -> None:
        dcp.save(state(world_size, 0, True), storage_writer=UnifiedStorageWriter(target))

    def loads(rank: int, world_size: int) -> None:
        back = state(world_size, 1, False)
        dcp.load(back, storage_reader=UnifiedStorageReader(target))
        assert torch.equal(back["model"]["w"].full_tensor(), WEIGHT)
        assert torch.equal(back["model"]["same"].full_tensor(), WEIGHT[0].bfloat16())
        assert back["model"]["count"].item() == 3
        assert back["model"]["flags"].tolist() == [True, False]
        assert back["optimizer"]["param_groups"] == [{"lr": 0.1, "names": ["w"]}]
        assert (back["step"], back["none"]) == (12, None)

    run_ranks(saves, 3)
    assert verify_checkpoint(target).problems == ()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert set(read_index(target)) == {"w", "same", "count", "flags"}
    stored: dict[str, torch.Tensor] = {}
    for path in target.glob("model*.safetensors"):
        stored |= load_file(path)
    assert torch.equal(stored["w"], WEIGHT) and stored["count"].item() == 3
    for path in target.rglob("*"):  # a pickle begins with its protocol or is a zip
        assert path.read_bytes()[:2] not in (b"\x80\x02", b"PK"), path
    run_ranks(loads, 2)
    mine = torch.zeros(7, 5)
    load({"model": {"w": mine}}, checkpoint_id=target)
    assert torch.equal(mine, WEIGHT)


def test_fsdp_training_goes_on_from_a_dcp_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    def make(rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
        optimizer.zero_grad()
        model(torch.ones(3, 5)).square().sum().backward()
        optimizer.step()
        return [p.full_tensor().flatten().tolist() for p in model.parameters()]

    def saves(rank: int, world_size: int) -> list[list[float]]:
        model, optimizer = make(rank, world_size)
        step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        writer = UnifiedStorageWriter(tmp_path / "c")
        dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
        return step(model, optimizer)

    def loads(rank: int, world_size: int) -> list[list[float]]:
        model, optimizer = make(rank, world_size)
        weights, moments = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": moments}
        dcp.load(held, storage_reader=UnifiedStorageReader(tmp_path / "c"))
        set_state_dict(
            model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
        )
        return step(model, optimizer)

    expected, found = run_ranks(saves, 2)[0], run_ranks(loads, 3)[0]
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


def test_one_process_needs_no_group_and_async_save_works(tmp_path: Path) -> None:
    dcp.save({"model": {"w": WEIGHT}, "n": 1}, storage_writer=UnifiedStorageWriter(tmp_path / "c"))
    back = {"model": {"w": WEIGHT * 0}, "n": 0}
    dcp.load(back, checkpoint_id=tmp_path / "c", storage_reader=UnifiedStorageReader())
    assert torch.equal(back["model"]["w"], WEIGHT) and back["n"] == 1

    def fn(rank: int, world_size: int) -> None:
        writer = UnifiedStorageWriter(tmp_path / "a")
        dcp.async_save(state(world_size, 0, True), storage_writer=writer).result()
        again = state(world_size, 0, False)
        dcp.load(again, storage_reader=UnifiedStorageReader(tmp_path / "a"))
        assert torch.equal(again["model"]["w"].full_tensor(), WEIGHT)

    run_ranks(fn, 2)


class Unwilling:
    """Fails while it is written: DCP can pickle it, but it is nothing that files hold."""


def test_a_failed_save_leaves_the_old_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    target = tmp_path / "c"

    def fn(rank: int, world_size: int) -> None:
        writer = UnifiedStorageWriter(target)
        dcp.save(state(world_size, 0, True), storage_writer=writer)
        bad = state(world_size, 0, False) | {"bad": Unwilling()}
        with pytest.raises(CheckpointException, match="bad: a Unwilling is neither a tensor nor"):
            dcp.save(bad, storage_writer=writer)
        dist.barrier()
        mine = torch.zeros(7, 5)
        load({"model": {"w": mine}}, checkpoint_id=target)
        assert torch.equal(mine, WEIGHT)
        dist.barrier()
        dcp.save(state(world_size, 0, True), storage_writer=writer)

    run_ranks(fn, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert verify_checkpoint(target).problems == ()


def test_writers_that_failed_leave_nothing_that_later_saves_must_make_room_for(
    tmp_path: Path,
) -> None:
    """A new writer for every save, in one process that lives on: no lock, no bytes, no fd."""
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        writer = UnifiedStorageWriter(tmp_path / "c")
        with pytest.raises(CheckpointException, match=r"bad: a Unwilling .*; convert it"):
            dcp.save({"model": {"w": WEIGHT}, "bad": Unwilling()}, storage_writer=writer)
    assert len(list(tmp_path.iterdir())) == 1  # the last writer still lives
    child = os.fork()
    if child == 0:
        del writer
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    del writer
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_tuples_come_back_as_tuples(tmp_path: Path) -> None:
    writer = UnifiedStorageWriter(tmp_path / "c")
    dcp.save({"betas": (0.9, 0.95), "list": [1]}, storage_writer=writer)
    back = {"betas": (0.0, 0.0), "list": [0]}
    dcp.load(back, storage_reader=UnifiedStorageReader(tmp_path / "c"))
    assert back == {"betas": (0.9, 0.95), "list": [1]}


def test_a_rank_that_is_killed_while_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "c"

    class Deadly(UnifiedStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
            return super().write_data(plan, planner)

    def saves(rank: int, world_size: int) -> None:
        dcp.save(state(world_size, 0, True), storage_writer=UnifiedStorageWriter(target))

    def dies(rank: int, world_size: int) -> None:
        dcp.save(state(world_size, 0, False), storage_writer=Deadly(target))

    run_ranks(saves, 2)
    collect_ranks(dies, 2)
    mine = torch.zeros(7, 5)
    load({"model": {"w": mine}}, checkpoint_id=target)
    assert torch.equal(mine, WEIGHT)


def test_names_that_would_fall_together_are_refused(tmp_path: Path) -> None:
    held = {"model": {"w": torch.ones(1)}, "w": torch.zeros(1)}
    with pytest.raises(CheckpointException, match=r"give two of .* one key"):
        dcp.save(held, storage_writer=UnifiedStorageWriter(tmp_path / "c"))
    with pytest.raises(ValueError, match="two of them have one part"):
        UnifiedStorageWriter(tmp_path / "c", prefixes={"a.": "model", "b.": "model"})


def test_a_writer_can_be_sent_to_another_process_and_refuses_to_overwrite_if_told(
    tmp_path: Path,
) -> None:
    writer = pickle.loads(pickle.dumps(UnifiedStorageWriter(tmp_path / "c", overwrite=False)))
    dcp.save({"model": {"w": WEIGHT}}, storage_writer=writer)
    with pytest.raises(CheckpointException, match=r"Checkpoint already exists: .*overwrite=True"):
        dcp.save({"model": {"w": WEIGHT * 2}}, storage_writer=writer)
    back = {"model": {"w": WEIGHT * 0}}
    dcp.load(back, storage_reader=UnifiedStorageReader(tmp_path / "c"))
    assert torch.equal(back["model"]["w"], WEIGHT)


def test_objects_of_a_state_keep_their_types(tmp_path: Path) -> None:
    state = {"s": {1, (2, 3)}, "b": b"\x00", "file": io.BytesIO(b"abc"), "shape": torch.Size([2])}
    dcp.save({"extra": state}, storage_writer=UnifiedStorageWriter(tmp_path / "c"))
    back: dict[str, Any] = {"extra": dict.fromkeys(state)}
    dcp.load(back, storage_reader=UnifiedStorageReader(tmp_path / "c"))
    assert back["extra"].pop("file").getvalue() == state.pop("file").getvalue()
    assert back["extra"] == state and type(back["extra"]["shape"]) is torch.Size
