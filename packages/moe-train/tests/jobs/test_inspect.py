"""What is said of a checkpoint, against the tensors in its files."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from moe_train.jobs.inspect import describe_checkpoint


def elements(folder: Path, part: str) -> tuple[int, int]:
    """Tensors and their elements in the files of a part."""
    sizes = []
    for path in folder.glob(f"{part}*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes += [file.get_tensor(name).numel() for name in file.keys()]  # noqa: SIM118
    return len(sizes), sum(sizes)


def test_a_checkpoint_is_described_by_what_its_files_hold(trained_run: Path) -> None:
    folder = trained_run / "checkpoint-2"
    text = describe_checkpoint(folder)
    for part in ("model", "optimizer"):
        tensors, count = elements(folder, part)
        line = f"{tensors} tensors, {count:,} elements ({count:,} F32), 1 file(s)"
        assert re.search(rf"(?m)^{part} +{re.escape(line)}$", text), text
    assert "master_weights" not in text
    assert "qwen3_moe: 2 layers (2 with experts), hidden 32, vocabulary 320" in text
    assert "6 of width 16, 2 per token" in text
    assert "step 2, 24 samples of 12 tokens, seed 0" in text
    assert "tokenizer.json" in text


def test_of_a_run_the_newest_checkpoint_is_described(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-10")
    assert describe_checkpoint(run).splitlines()[0] == str(run / "checkpoint-10")
    assert describe_checkpoint(run / "checkpoint-2").splitlines()[0] == str(run / "checkpoint-2")


def test_weights_alone_are_described_without_a_step(trained_run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained_run / "checkpoint-2" / name, tmp_path / name)
    text = describe_checkpoint(tmp_path)
    assert "qwen3_moe" in text and "step" not in text and "optimizer" not in text


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path} holds no complete checkpoint"):
        describe_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        describe_checkpoint(tmp_path / "nowhere")
