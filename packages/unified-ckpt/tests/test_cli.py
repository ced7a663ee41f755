import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranktest import unread_output
from unified_ckpt import Shard, save
from unified_ckpt.cli import main
from unified_ckpt.tiers import NodeTier, TierOptions


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    parts = {
        part: [Shard.of("w", torch.ones(2, 3, dtype=dtype), global_shape=(2, 3), offset=(0, 0))]
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


def test_verify_quick_finds_what_is_missing_without_reading_every_byte(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint / "optimizer.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert main(["verify", "--quick", str(checkpoint)]) == 0  # a value's byte
    assert "sizes, headers and small files are intact" in capsys.readouterr().out
    path.write_bytes(raw[:-1])
    assert main(["verify", "--quick", str(checkpoint)]) == 1
    assert "optimizer.safetensors" in capsys.readouterr().out
    (checkpoint / "manifest.json").unlink()
    assert main(["verify", "--quick", str(checkpoint)]) == 1
    assert "no save has completed it" in capsys.readouterr().out
    assert main(["verify", "--quick", str(tmp_path / "nothing")]) == 2
    assert "is no checkpoint" in capsys.readouterr().err


def test_verify_says_when_there_are_no_checksums(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "manifest.json").unlink()
    assert main(["verify", str(checkpoint)]) == 0
    assert "there are no checksums" in capsys.readouterr().out


def test_diff_answers_0_when_equal_and_1_with_every_difference(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(checkpoint), str(checkpoint)]) == 0
    assert "the same, bit by bit" in capsys.readouterr().out
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    tensor[1, 2] = 5
    shard = Shard.of("w", tensor, global_shape=(2, 3), offset=(0, 0))
    other = save({"model": [shard]}, checkpoint_id=tmp_path / "d").path
    assert main(["diff", str(checkpoint), str(other)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "model 'w': 1 of 6 elements differ, the first at [1, 2]"
    assert said[1].startswith("optimizer '*': only in ")
    assert said[2] == "file 'config.json': only in the first checkpoint"
    assert said[3].endswith("3 differences")


def test_reshard_and_export_write_checkpoints_with_the_same_tensors(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", str(checkpoint), "--to", "ep=2,tp=2", str(tmp_path / "r")]) == 0
    assert main(["diff", str(checkpoint), str(tmp_path / "r")]) == 0
    assert main(["export", str(tmp_path / "r"), str(tmp_path / "e")]) == 0
    assert sorted(p.name for p in (tmp_path / "e").iterdir()) == [
        "config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip
    assert "written for 2 ranks (ep=2,tp=2)" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["ep", "pp=2", "tp=0", "tp=two", "tp=99999", "tp=2,tp=4"])
def test_a_layout_that_cannot_be_is_one_line_and_2(
    layout: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", str(checkpoint), "--to", layout, str(tmp_path / "r")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"unified-ckpt: --to {layout}") and captured.err.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_nothing_that_is_no_checkpoint_is_overwritten(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert main(["export", str(checkpoint), str(tmp_path / "mine")]) == 2
    assert "is not a checkpoint that may be replaced" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "reshard", "diff"])
def test_what_is_no_checkpoint_is_one_line_and_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {
        "export": [str(tmp_path / "out")],
        "reshard": ["--to", "tp=2", str(tmp_path / "out")],
        "diff": [str(tmp_path)],
    }
    for folder in (tmp_path / "nothing", tmp_path):
        assert main([command, str(folder), *more.get(command, [])]) == 2
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
    for command in ("inspect", "verify", "diff", "reshard", "export", "from-dcp", "to-dcp"):
        assert command in done.stdout


def test_tier_lists_the_copies_of_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with NodeTier(TierOptions(folder=tmp_path)) as tier:
        tier.save({"model": {"w": torch.ones(2)}}, 7)
    assert main(["tier", str(tmp_path / "typo")]) == 2
    assert f"{tmp_path / 'typo'} is no directory" in capsys.readouterr().err
    assert main(["tier", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "step 7, save " in said and "ranks 0 of 1" in said and f"{tmp_path}: 1 copies" in said


def test_recovery_says_what_lost_nodes_cost(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["recovery", "--nodes", "4", "--tier-steps", "10", "--storage-steps", "500"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "any 1 node lost: at most 10 steps lost" in said
    assert "2 nodes or more lost: at most 500 steps lost" in said
    assert main([*given[:2], "0", *given[3:]]) == 2
    assert "--nodes 0 must be at least 1" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unread_output():
        assert main(["recovery", "--nodes", "8", "--tier-steps", "10"]) == 1
    assert capsys.readouterr().err == ""
