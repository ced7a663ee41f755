from pathlib import Path

import pytest
import torch

from unified_ckpt import load
from unified_ckpt.errors import DamagedCheckpointWarning
from unified_ckpt.run import CheckpointManager, ManagerOptions, resume_nearest
from unified_ckpt.tiers import NodeTier, TierOptions


def damage(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(("in_tier", "expected"), [(90, 90), (40, 50), (None, 50)])
def test_the_tier_serves_what_is_newer_than_the_whole_checkpoint_behind_a_damaged_one(
    tmp_path: Path, in_tier: int | None, expected: int
) -> None:
    state = {"model": {"w": torch.zeros(1000)}}
    tier = NodeTier(TierOptions(folder=tmp_path / "tier"))
    with CheckpointManager(tmp_path / "run", ManagerOptions(signals=())) as manager, tier:
        for step in sorted({50, 100, *({in_tier} - {None})}):
            state["model"]["w"].fill_(step)
            (tier if step == in_tier else manager).save(state, step)
        damage(tmp_path / "run/checkpoint-100/model.safetensors")
        with pytest.warns(DamagedCheckpointWarning):
            found = resume_nearest(manager, tier, lambda place: load(state, checkpoint_id=place))
    assert found is not None and f"-{expected}" in found[0].name
    assert state["model"]["w"].unique().tolist() == [expected]


def test_storage_is_read_again_where_the_newer_state_of_the_tier_cannot_be_loaded(
    tmp_path: Path,
) -> None:
    state = {"model": {"w": torch.zeros(1000)}}

    def load_one(place: Path) -> None:
        if place.parent.name == "run":
            load(state, checkpoint_id=place)
        else:
            state["model"]["w"].fill_(-1)
            load({"model": {"other": torch.zeros(3)}}, checkpoint_id=place)

    tier = NodeTier(TierOptions(folder=tmp_path / "tier"))
    with CheckpointManager(tmp_path / "run", ManagerOptions(signals=())) as manager, tier:
        for place, step in ((manager, 50), (tier, 90), (manager, 100)):
            state["model"]["w"].fill_(step)
            place.save(state, step)
        damage(tmp_path / "run/checkpoint-100/model.safetensors")
        with pytest.warns(DamagedCheckpointWarning):
            found = resume_nearest(manager, tier, load_one)
    assert found is not None and found[0].name == "checkpoint-50"
    assert state["model"]["w"].unique().tolist() == [50]
