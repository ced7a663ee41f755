import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unified_ckpt import Shard, save
from unified_ckpt.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    parts = {
        part: [
            Shard(key="w", tensor=torch.ones(2, 3, dtype=dtype), global_shape=(2, 3), offset=(0, 0))
        ]
        for part, dtype in (("model", torch.bfloat16), ("optimizer", torch.float32))
    }
    return save(parts, checkpoint_id=tmp_path / "c", files={"config.json": b"{}"}).path


def test_inspect_lists_parts_dtypes_and_with_keys_every_tensor(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert "3 files with checksums" in said
    assert "model: 1 tensors, 12 bytes, 1 files, 1 BF16" in said
    assert "optimizer: 1 tensors, 24 bytes, 1 files, 1 F32" in said
    assert main(["inspect", "--keys", str(checkpoint)]) == 0
    assert "w  BF16  [2, 3]  model.safetensors" in capsys.readouterr().out


def test_verify_answers_0_when_intact_and_1_with_the_place_when_damaged(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    assert "are intact" in capsys.readouterr().out
    path = checkpoint / "optimizer.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert main(["verify", str(checkpoint)]) == 1
    assert "optimizer.safetensors: 'w': bytes" in capsys.readouterr().out


def test_verify_says_when_there_are_no_checksums(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "manifest.json").unlink()
    assert main(["verify", str(checkpoint)]) == 0
    assert "there are no checksums" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_one_line_and_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        assert main([command, str(folder)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("unified-ckpt: ") and str(folder) in captured.err


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom unified_ckpt.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout and "verify" in done.stdout
