"""What is refused before torch is there; the whole table of mistakes is tested end to end."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train import early_checks
from moe_train.config import Config
from moe_train.early_checks import check_early, check_run_folders, corpus_matches
from package_facts import check_import_is_cheap

Configure = Callable[..., Config]


def test_it_needs_no_torch() -> None:
    check_import_is_cheap(early_checks, "torch", "numpy")


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_an_ep_that_does_not_divide_is_named_with_those_that_do(
    configure: Configure, tmp_path: Path, name: str
) -> None:
    config = configure("parallel.ep=4")
    (tmp_path / "config.json").write_text(json.dumps({name: 6}))
    wanted = r"num_experts=6 evenly; choose ep among 1, 2, 3, 6, or in training give uneven parts"
    with pytest.raises(ValueError, match=wanted):
        check_early(config, resuming=False)


def test_sizes_that_are_missing_or_no_sizes_are_left_to_the_reader_of_the_decoder(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("parallel.pp=3", "parallel.ep=5", "train.global_batch_size=10")
    for text in ("{}", '{"num_hidden_layers": "two", "num_experts": true}'):
        (tmp_path / "config.json").write_text(text)
        check_early(config, resuming=False)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_json_that_is_none_is_named(
    configure: Configure, tmp_path: Path, text: str
) -> None:
    config = configure()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"model config .*config\.json"):
        check_early(config, resuming=False)


def test_models_that_are_not_there_are_named_by_their_key(
    configure: Configure, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for value, message in (
        ("model.init_from=/no/where", "model.init_from=/no/where does not exist"),
        (
            f"model.init_from={tmp_path}/empty",
            "holds no config.json; name a folder with config.json",
        ),
        ("model.config_file=/no/where.json", "model.config_file=/no/where.json does not exist"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            check_early(configure(value), resuming=False)


def test_a_run_folder_that_cannot_be_used_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    with pytest.raises(ValueError, match=f"^train.output_dir={file} is a file; choose another"):
        check_run_folders({"train.output_dir": file}, resuming=False)
    with pytest.raises(ValueError, match=f"cannot be made, {file} is a file"):
        check_run_folders({"train.output_dir": file / "a" / "run"}, resuming=False)
    with pytest.raises(ValueError, match=r"^train.output_dir=/proc/run is not writable: /proc \("):
        check_run_folders({"train.output_dir": Path("/proc/run")}, resuming=False)
    check_run_folders({"train.output_dir": tmp_path / "new" / "run"}, resuming=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert file.read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match="is not writable"):
        check_run_folders({"train.output_dir": tmp_path / "run"}, resuming=False)
    tmp_path.chmod(0o755)


def test_a_folder_with_checkpoints_is_only_for_a_run_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    check_run_folders({"train.output_dir": tmp_path}, resuming=True)
    with pytest.raises(ValueError, match="already holds checkpoints; pass --resume"):
        check_run_folders({"train.output_dir": tmp_path}, resuming=False)


def test_a_corpus_that_names_nothing_is_refused_and_a_glob_gives_its_files_in_order(
    configure: Configure, tmp_path: Path
) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("text")
    assert corpus_matches(f"{tmp_path}/*.txt") == [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert corpus_matches(str(tmp_path)) == [tmp_path]
    for wrong in (f"{tmp_path}/*.rst", f"{tmp_path}/c.txt"):
        with pytest.raises(FileNotFoundError, match=r"corpus '.*' does not exist; name a folder"):
            check_early(configure(f"data.corpus={wrong}"), resuming=False)
    check_early(configure("data.corpus=python_stdlib"), resuming=False)
