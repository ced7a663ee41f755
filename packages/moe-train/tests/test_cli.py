import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_train.cli import main
from moe_train.config.tables import all_keys
from ranktest import unread_output

TINY_MODEL = {
    "model_type": "mixtral",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size": 16,
}
JOB = """
[model]
config_file = "config.json"
[train]
output_dir = "out"
max_steps = 10
global_batch_size = 8
[optimizer]
lr = 1e-3
"""


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["generate", "--help"], ["plan", "--help"]]
)
def test_help_does_not_import_torch(argv: list[str]) -> None:
    code = (
        "import sys; from moe_train.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "slow = {'torch', 'numpy', 'tokenizers', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: moe-train" in done.stdout


def test_config_mistake_is_answered_without_torch(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    code = "import sys; from moe_train.cli import main; c = main(sys.argv[1:])\n"
    code += "assert 'torch' not in sys.modules; sys.exit(c)"
    argv = ["train", str(tmp_path / "job.toml"), "train.max_stps=3"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("moe-train: unknown key train.max_stps; did you mean train.max_steps?\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow-change", "train.seed"], "--allow-change is only for --resume; leave it out"),
        (
            ["--resume", "--allow-change", "train.sed"],
            "--allow-change train.sed: no such key; did you mean train.seed? Keys of config.json "
            "are written model.KEY",
        ),
        (
            ["--resume", "train.seed=3", "--allow-change", "train.seed", "train.max_steps=x"],
            "train.max_steps must be int, got 'x'",
        ),
        (
            ["train.seed=3", "--resume", "--allow-change=train.seed", "--allow-change=model.eps"],
            "--resume: {}/out holds no complete checkpoint; start without --resume, or name one",
        ),
    ],
)
def test_changes_are_allowed_by_key_with_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "config.json").write_text(json.dumps(TINY_MODEL))
    assert main(["train", str(tmp_path / "job.toml"), *arguments]) == 2
    assert capsys.readouterr().err == f"moe-train: {message.format(tmp_path)}\n"


def test_train_help_lists_every_key_with_meaning_and_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in all_keys():
        assert key.full_name in text
        assert " ".join(key.help.split()) in text
        assert f"in {key.unit};" in text or key.unit in ("", "path")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["tarin"],
        ["train"],
        ["train", "job.toml", "--foo"],
        ["inspect", "a", "b.c=3"],
        ["generate", "--checkpoint", "x", "--prompt", "a", "--top-k", "many"],
    ],
)
def test_unusable_arguments_end_with_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: moe-train" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--max-new-tokens", "0"), ("--top-k", "-1"), ("--temperature", "-0.5")]
)
def test_a_number_out_of_range_is_one_line(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--checkpoint", "x", "--prompt", "a", *option]) == 2
    line = capsys.readouterr().err
    name, value = option[0].strip("-").replace("-", "_"), option[1]
    assert line.count("\n") == 1 and f"{name}={value}" in line


def test_missing_config_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", str(tmp_path / "no.toml")]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"moe-train: config file {tmp_path / 'no.toml'} does not exist\n"
    assert captured.out == ""


def test_traceback_option_lets_a_mistake_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        main(["train", "--traceback", str(tmp_path / "no.toml")])


def test_bad_overrides_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    assert main(["train", str(job), "train.max_steps=x"]) == 2
    assert capsys.readouterr().err == "moe-train: train.max_steps must be int, got 'x'\n"
    # An override behind an option counts too, also right behind --resume.
    assert main(["train", str(job), "--resume", "train.max_steps=x"]) == 2
    assert capsys.readouterr().err == "moe-train: train.max_steps must be int, got 'x'\n"
    assert main(["train", str(job), "--resume=latest", "train.max_steps=y"]) == 2
    assert capsys.readouterr().err == "moe-train: train.max_steps must be int, got 'y'\n"


def test_torchrun_with_another_number_of_ranks_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["train", str(job), "parallel.pp=2"]) == 2
    line = capsys.readouterr().err
    assert "WORLD_SIZE=3" in line and "start 2 ranks" in line
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert main(["train", str(job), "parallel.pp=2"]) == 2
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    (tmp_path / "config.json").write_text(json.dumps(TINY_MODEL))
    with unread_output():
        assert main(["plan", str(job)]) == 1
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_no_number_is_said_and_not_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "job.toml"]) == 2
    assert "the environment has RANK='x'; expected a whole number" in capsys.readouterr().err
