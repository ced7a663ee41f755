"""Saves and loads of devices' tensors: no race, no copy that stops the host, listed waits only."""

import threading
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from devicetest import Machine, fake_cuda
from unified_ckpt import AsyncSaver, Shard, async_save, load, save
from unified_ckpt.background.offloader import Offloader
from unified_ckpt.errors import CorruptCheckpointError, SaveError, UnpinnedMemoryWarning
from unified_ckpt.geometry import shard
from unified_ckpt.snapshots.shared_memory import SharedMemory
from unified_ckpt.snapshots.staging import StagingLayout


def fake_devices(devices: int = 1) -> AbstractContextManager[Machine]:
    return fake_cuda(devices=devices, unchecked=[(shard, "_check_tensor")])


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.of(key, tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def state(second: str) -> dict[str, torch.Tensor]:
    """Many small tensors, large ones, strided ones, on two devices and the host."""
    tensors = {f"small.{n}": torch.full((33,), float(n), device="cuda:0") for n in range(300)}
    tensors["large"] = torch.arange(5_000_000.0).to("cuda:0")
    tensors["strided"] = torch.rand(700, 900).to(second).t()
    tensors["bf16"] = torch.rand(333, 1001).to(torch.bfloat16).to(second)
    tensors["host"] = torch.rand(40, 50)
    tensors["mask"] = (torch.rand(77) > 0.5).to("cuda:0")
    tensors["empty"] = torch.empty(0, 4, device=second)
    return tensors


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.cpu().clone() for key, tensor in tensors.items()}


def check_equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(found[key].cpu(), tensor), key


def waits(cuda: Machine) -> Counter[str]:
    return Counter(f"{sync.kind} {sync.where.partition(':')[0]}" for sync in cuda.syncs)


def check_clean(cuda: Machine) -> None:
    """No race, and no wait for an event keeps a core busy: all that the host waits for block."""
    assert cuda.races == [] and cuda.problems == []
    assert [sync for sync in cuda.syncs if "spinning" in sync.kind] == []


def test_a_save_waits_for_blocks_only_and_a_load_for_nothing(tmp_path: Path) -> None:
    with fake_devices(2) as cuda:
        tensors = state("cuda:1")
        want = on_host(tensors)
        cuda.forget()
        save({"model": tensors}, checkpoint_id=tmp_path / "c")
        # Per block of 16 MiB one, and one for each device at the end.
        assert set(waits(cuda)) == {"event.synchronize fetching.py"} and len(cuda.syncs) < 12
        for tensor in tensors.values():
            tensor.zero_()
        check_clean(cuda)
        cuda.forget()
        load({"model": tensors}, checkpoint_id=tmp_path / "c")
        assert set(waits(cuda)) <= {"event.synchronize sending.py"}
        check_clean(cuda)
        check_equal(tensors, want)
        fresh = {key: torch.zeros_like(tensor) for key, tensor in want.items()}
        load({"model": fresh}, checkpoint_id=tmp_path / "c")
        check_equal(fresh, want)


def test_boxes_of_devices_are_loaded_under_another_layout(tmp_path: Path) -> None:
    with fake_devices() as cuda:
        whole_w = torch.arange(600.0 * 70).view(600, 70)
        w = whole_w.to("cuda")
        save({"model": [whole("w", w)]}, checkpoint_id=tmp_path / "c")
        part = torch.zeros(200, 31, device="cuda").t().contiguous().t()
        box = Shard.of("w", part, global_shape=(600, 70), offset=(150, 20))
        cuda.forget()
        load([box], checkpoint_id=tmp_path / "c")
        check_clean(cuda)
        assert torch.equal(part.cpu(), whole_w[150:350, 20:51])
        half = torch.zeros(600, 70, dtype=torch.bfloat16, device="cuda")
        load([whole("w", half)], checkpoint_id=tmp_path / "c", cast=True)
        assert torch.equal(half.cpu(), whole_w.to(torch.bfloat16))


def test_damage_is_found_on_the_way_to_a_device(tmp_path: Path) -> None:
    with fake_devices() as cuda:
        save({"model": {"w": torch.ones(1 << 20, device="cuda")}}, checkpoint_id=tmp_path / "c")
        file = tmp_path / "c" / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[1 << 21] ^= 1
        file.write_bytes(raw)
        with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
            load(
                {"model": {"w": torch.zeros(1 << 20, device="cuda")}}, checkpoint_id=tmp_path / "c"
            )
        check_clean(cuda)


def test_without_page_locks_states_are_right_and_no_error_is_left_behind(tmp_path: Path) -> None:
    with fake_devices(2) as cuda:
        tensors = state("cuda:1")
        want = on_host(tensors)
        cuda.fail_page_locks = 304
        with pytest.warns(UnpinnedMemoryWarning, match="slower"):
            save({"model": tensors}, checkpoint_id=tmp_path / "c")
        for tensor in tensors.values():
            tensor.zero_()
        with pytest.warns(UnpinnedMemoryWarning, match="slower"):
            load({"model": tensors}, checkpoint_id=tmp_path / "c")
        for device in ("cuda:0", "cuda:1"):  # an error that was left would be this launch's
            assert torch.ones(1, device=device).tolist() == [1]
        check_clean(cuda)
        check_equal(tensors, want)


def test_a_failed_write_leaves_no_copy_under_way(tmp_path: Path) -> None:
    with fake_devices() as cuda:
        w = torch.ones(20_000_000, device="cuda")
        (tmp_path / "file").touch()
        with pytest.raises(SaveError):
            save({"model": {"w": w}}, checkpoint_id=tmp_path / "file" / "c")
        w.zero_()
        check_clean(cuda)


def test_a_snapshot_is_the_step_boundary_and_stops_the_host_nowhere() -> None:
    with fake_devices(2) as cuda:
        tensors = list(state("cuda:1").values())
        tensors = [tensor for tensor in tensors if tensor.numel()]
        layout = StagingLayout.of({"model": [whole(str(n), t) for n, t in enumerate(tensors)]})
        memory = SharedMemory.allocate(layout.num_bytes, purpose="a test")
        memory.pin()
        views, offloader = layout.views(memory.tensor), Offloader(8)
        for step in range(2):
            for tensor in tensors:
                tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)
            want = [tensor.cpu().clone() for tensor in tensors]
            cuda.forget()
            done = threading.Event()
            offloader.start(tensors, views, layout)
            for _ in range(8):
                offloader.issue_next()
            offloader.finish(done.set, on_error=pytest.fail, timeout_s=60)
            here = [sync for sync in cuda.syncs if "cuda_copies.py" not in sync.where]
            assert here == []
            for tensor in tensors:
                tensor.zero_()
            assert done.wait(60)
            check_clean(cuda)
            assert all(torch.equal(v, w) for v, w in zip(views, want, strict=True)), step
        offloader.close()
        memory.close()
        check_clean(cuda)


def test_an_asynchronous_save_of_a_module_its_optimizer_and_a_second_device(tmp_path: Path) -> None:
    with fake_devices(2) as cuda, AsyncSaver() as saver:
        there = torch.arange(700.0).to("cuda:1")
        model = torch.nn.Sequential(*(torch.nn.Linear(30, 30, device="cuda") for _ in range(20)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 30, device="cuda")).sum().backward()
        optimizer.step()
        weight = model[3].weight.detach().cpu().clone()
        moment = optimizer.state[model[3].weight]["exp_avg"].cpu().clone()
        cuda.forget()
        response = async_save(
            {"model": model, "optimizer": optimizer, "other": {"there": there}},
            checkpoint_id=tmp_path / "c",
            saver=saver,
        )
        stopping = [sync for sync in cuda.syncs if "cuda_copies.py" not in sync.where]
        assert stopping == []
        optimizer.step()
        there.zero_()
        response.upload_completion.result(timeout=60)
        check_clean(cuda)
        found = {"model": {"3.weight": torch.zeros(30, 30)}}
        load(found, checkpoint_id=tmp_path / "c")
        assert torch.equal(found["model"]["3.weight"], weight)
        back = {"3.weight/moment1": torch.zeros(30, 30)}
        load({"optimizer": back}, checkpoint_id=tmp_path / "c", strict=False)
        load({"other": {"there": there}}, checkpoint_id=tmp_path / "c")
        assert torch.equal(there.cpu(), torch.arange(700.0))
        assert torch.equal(back["3.weight/moment1"], moment)


def _optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.1}
    if kind == "capturable":
        options |= {"capturable": True, "foreach": False}
    if kind == "fused":
        options |= {"fused": True}
    return torch.optim.AdamW(model.parameters(), **options)


@pytest.mark.parametrize("kind", ["capturable", "fused", "plain"])
def test_optimizers_that_count_on_the_device_go_on_as_if_never_stopped(
    kind: str, tmp_path: Path
) -> None:
    with fake_devices() as cuda:
        x = torch.rand(2, 8).to("cuda")

        def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        model = torch.nn.Linear(8, 4, device="cuda")
        optimizer = _optimizer(kind, model)
        for _ in range(3):
            step(model, optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
        other = torch.nn.Linear(8, 4, device="cuda")
        fresh = _optimizer(kind, other)
        load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path / "c")
        steps = [fresh.state[p]["step"] for p in other.parameters()]
        assert {s.device.type for s in steps} == {"cpu" if kind == "plain" else "cuda"}
        step(model, optimizer)
        step(other, fresh)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.detach().cpu(), its.detach().cpu())
        check_clean(cuda)
