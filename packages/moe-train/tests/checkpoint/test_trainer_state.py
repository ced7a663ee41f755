"""What `trainer_state.json` says, in this version and in those before."""

import dataclasses
import json
from pathlib import Path

import pytest

from moe_train.checkpoint.trainer_state import STATE_VERSION, TrainerState, read_state
from moe_train.config.optimizer_tables import OptimizerConfig
from moe_train.optim import LrSchedule

FIRST = {
    "step": 3,
    "consumed_samples": 36,
    "data_fingerprint": "f",
    "sequence_length": 12,
    "seed": 5,
}


def test_every_field_is_read_back_bit_for_bit() -> None:
    schedule = LrSchedule.of(OptimizerConfig(lr=0.1 + 0.2, warmup_steps=3), 9)
    state = TrainerState(
        **FIRST,  # type: ignore[arg-type]
        schedule=schedule.resumed(4, OptimizerConfig(lr=1 / 3), 12),
        skipped_steps=2,
        skips_in_row=1,
        recent_losses=(0.1 + 0.7, 1e300, 5e-324),
    )
    assert TrainerState.from_json(state.to_json(), Path()) == state
    assert json.loads(state.to_json())["version"] == STATE_VERSION


def test_a_file_of_the_first_version_is_read_and_written_anew(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(FIRST))
    state = read_state(tmp_path)
    assert state == TrainerState(**FIRST, version=1)  # type: ignore[arg-type]
    assert state.schedule is None and state.recent_losses == ()
    again = TrainerState.from_json(state.to_json(), tmp_path)
    assert again == dataclasses.replace(state, version=STATE_VERSION)


def test_a_schedule_that_a_former_file_lacks_is_that_of_the_checkpoints_own_job(
    tmp_path: Path,
) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(FIRST))
    (tmp_path / "moe_train.toml").write_text(
        "[model]\nconfig_file = 'c'\n[train]\noutput_dir = 'r'\nmax_steps = 7\n"
        "global_batch_size = 2\n[optimizer]\nlr = 0.5\nwarmup_steps = 2\n"
    )
    optimizer = OptimizerConfig(lr=0.5, warmup_steps=2)
    assert read_state(tmp_path).schedule == LrSchedule.of(optimizer, 7)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"step": 3}',
        b'{"step": "x"}',
        json.dumps({**FIRST, "wave": 1}).encode(),
        json.dumps({**FIRST, "version": 2, "schedule": {"lr": 1}}).encode(),
    ],
)
def test_a_trainer_state_that_cannot_be_read_is_named(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path}/trainer_state.json is not a trainer state"):
        TrainerState.from_json(text, tmp_path)


def test_a_later_version_is_refused_by_its_number(tmp_path: Path) -> None:
    text = json.dumps({"version": STATE_VERSION + 1, "whatever": 1}).encode()
    with pytest.raises(
        ValueError, match=rf"has version {STATE_VERSION + 1}, .* up to {STATE_VERSION};"
    ):
        TrainerState.from_json(text, tmp_path)
