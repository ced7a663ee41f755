import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktest import run_ranks
from unified_ckpt import load, save
from unified_ckpt.errors import CorruptCheckpointError, LoadError
from unified_ckpt.state.random_state import random_state_files, restore_random_state


def draws(tracker: dict[str, torch.Generator], numpy: Any) -> list[object]:
    return [
        random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist(),
        torch.rand(3).tolist(), [torch.rand(2, generator=g).tolist() for g in tracker.values()],
    ]  # fmt: skip


def test_every_generator_goes_on_where_it_stood(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy", reason="one of the generators")
    tracker = {"model-parallel": torch.Generator().manual_seed(3), "data": torch.Generator()}
    random.gauss(0, 1)  # leaves half a pair behind
    numpy.random.standard_normal()
    blobs = random_state_files(2, numpy_random=numpy.random, tracker=tracker)
    save({}, checkpoint_id=tmp_path / "c", rank_files=blobs)
    expected = draws(tracker, numpy)
    assert draws(tracker, numpy) != expected
    assert restore_random_state(tmp_path / "c", 2, numpy_random=numpy.random, tracker=tracker)
    assert draws(tracker, numpy) == expected
    assert not restore_random_state(tmp_path / "c", 3)
    own = numpy.random.RandomState(0)
    assert restore_random_state(tmp_path / "c", 2, numpy_random=own)
    assert own.standard_normal(3).tolist() == expected[2]


def test_what_was_not_saved_or_is_damaged_is_named(tmp_path: Path) -> None:
    save({}, checkpoint_id=tmp_path / "c", rank_files=random_state_files(0))
    before = torch.get_rng_state()
    with pytest.raises(LoadError, match=r"not all of \['tracker.tp'\]"):
        restore_random_state(tmp_path / "c", 0, tracker={"tp": torch.Generator()})
    numpy = pytest.importorskip("numpy")
    with pytest.raises(LoadError, match=r"not all of \['numpy'\]"):
        restore_random_state(tmp_path / "c", 0, numpy_random=numpy.random)
    path = tmp_path / "c" / "random_state-00000.json"
    raw = path.read_bytes()
    path.write_bytes(raw[:-3])
    with pytest.raises(CorruptCheckpointError, match="random_state-00000"):
        restore_random_state(tmp_path / "c", 0)
    (tmp_path / "c" / "manifest.json").unlink()
    states = json.loads(raw)
    others = {"tracker.tp": states["torch.cpu"], "torch.cpu": "no base 64!"}
    for text in (raw[:-3], json.dumps(states | {"python": 3}), json.dumps(states | others)):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        tracker = {"tp": torch.Generator()} if "tracker" in str(text) else None
        first = None if tracker is None else tracker["tp"].get_state()
        with pytest.raises(CorruptCheckpointError, match="no random state"):
            restore_random_state(tmp_path / "c", 0, tracker=tracker)
        assert first is None or torch.equal(tracker["tp"].get_state(), first)
    assert torch.equal(torch.get_rng_state(), before)


def train(folder: Path, rank: int, *, steps: int, save_at: int, resume: bool) -> list[float]:
    """Dropout, shuffled data, AdamW and a scheduler on one of two ranks; returns the losses."""
    torch.manual_seed(100 + rank)
    random.seed(rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))
    alike = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=alike) - 0.3)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "consumed_samples": 0}
    if resume:
        load(state, checkpoint_id=folder)
        assert restore_random_state(folder, rank)
    losses = []
    for _ in range(state["consumed_samples"] // 4, steps):
        order = random.sample(range(64), 4)
        inputs = torch.randn(4, 6) + torch.tensor(order).view(4, 1)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        for parameter in model.parameters():  # data parallel
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        scheduler.step()
        state["consumed_samples"] += 4
        losses.append(loss.item())
        if state["consumed_samples"] == 4 * save_at:
            save(state, checkpoint_id=folder, rank_files=random_state_files(rank))
    return losses


def test_losses_after_resume_equal_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    def whole(rank: int, world_size: int) -> list[float]:
        return train(tmp_path / "c", rank, steps=8, save_at=5, resume=False)

    def resumed(rank: int, world_size: int) -> list[float]:
        return train(tmp_path / "c", rank, steps=8, save_at=-1, resume=True)

    uninterrupted = run_ranks(whole, 2)
    again = run_ranks(resumed, 2)
    assert [len(losses) for losses in again] == [3, 3]
    assert again == [losses[5:] for losses in uninterrupted]
    assert again[0] != again[1]

    def forgotten(rank: int, world_size: int) -> list[float]:
        for path in tmp_path.glob("c/random_state-*"):
            assert path.exists()
        torch.manual_seed(0)
        return train(tmp_path / "c", rank, steps=8, save_at=-1, resume=True)

    assert run_ranks(forgotten, 2) == again  # the state comes from the checkpoint, not from before


def test_a_rank_that_resumes_on_another_device_goes_on_with_its_own_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = 1
    states = {device: torch.full((4,), device, dtype=torch.uint8) for device in range(2)}
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: own,
        "get_rng_state": states.__getitem__,
        "set_rng_state": lambda state, device: states.update({device: state}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    save({}, checkpoint_id=tmp_path / "c", rank_files=random_state_files(0))
    own = 0
    states.clear()
    assert restore_random_state(tmp_path / "c", 0)
    assert {device: int(state[0]) for device, state in states.items()} == {0: 1, 1: 1}


@pytest.mark.gpu
def test_the_generators_of_devices_go_on_where_they_stood(tmp_path: Path) -> None:
    tracker = {"tp": torch.Generator(device="cuda").manual_seed(3)}
    torch.rand(1, device="cuda")
    blobs = random_state_files(0, tracker=tracker)
    save({}, checkpoint_id=tmp_path / "c", rank_files=blobs)

    def draw() -> list[float]:
        mine = torch.rand(3, device="cuda", generator=tracker["tp"])
        return [*torch.rand(3, device="cuda").tolist(), *mine.tolist()]

    expected = draw()
    assert restore_random_state(tmp_path / "c", 0, tracker=tracker)
    assert draw() == expected
