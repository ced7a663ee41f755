"""Weights of a checkpoint in other formats, and jobs that begin with them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from moe_train.cli import main
from moe_train.init_source import readable_weights
from weight_convert import inspect, verify

FORMATS = ["fused", "megatron", "paddle", "transformers --files bin", "megatron --files dcp"]


@pytest.fixture(scope="module")
def plain(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a run as transformers has them."""
    target = tmp_path_factory.mktemp("export") / "plain"
    (checkpoint, *_) = sorted(trained_run.glob("checkpoint-*"))
    assert main(["export", str(checkpoint), str(target)]) == 0
    return target


@pytest.mark.parametrize("options", FORMATS)
def test_a_job_begins_with_what_was_exported(
    trained_run: Path, plain: Path, tmp_path: Path, options: str
) -> None:
    (checkpoint, *_) = sorted(trained_run.glob("checkpoint-*"))
    target, cache = tmp_path / "out", tmp_path / "cache"
    assert main(["export", str(checkpoint), str(target), "--format", *options.split()]) == 0
    assert inspect(target).format == options.split()[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    folder = readable_weights(target, str(cache))
    assert folder.parent == cache / "weights"
    assert verify(folder, plain).equal and inspect(folder).format == "transformers"
    made = folder.stat().st_mtime_ns
    assert readable_weights(target, str(cache)) == folder
    assert folder.stat().st_mtime_ns == made


def test_what_transformers_has_is_loaded_where_it_stands(plain: Path, tmp_path: Path) -> None:
    assert readable_weights(plain, str(tmp_path)) == plain
    assert not list(tmp_path.iterdir())
    assert load_file(plain / "model.safetensors")
    (tmp_path / "empty").mkdir()
    assert readable_weights(tmp_path / "empty", str(tmp_path)) == tmp_path / "empty"


def test_mistakes_are_one_line(
    trained_run: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint, *_) = sorted(trained_run.glob("checkpoint-*"))
    assert main(["export", str(checkpoint), str(plain)]) == 2
    assert "exists; choose another folder" in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "x"), "--format", "gguf"]) == 2
    assert "has no format 'gguf'; it has" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    fused = tmp_path / "fused"
    assert main(["export", str(checkpoint), str(fused), "--format", "fused"]) == 0
    config = json.loads((fused / "config.json").read_text())
    (fused / "config.json").write_text(json.dumps(config | {"num_experts": 99}))
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with pytest.raises(ValueError, match=r"model\.init_from=.*expected 99 experts"):
        readable_weights(fused, str(tmp_path / "cache"))
