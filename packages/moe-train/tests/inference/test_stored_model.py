"""Commands on a checkpoint in a store say what they say of the same one in a folder."""

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from moe_train.cli import main
from ranktest import run_ranks
from ranktest.s3 import start_s3
from unified_ckpt import reshard
from unified_ckpt.geometry.layouts import ParallelDegrees

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def checkpoint(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has a chat template."""
    before = tmp_path_factory.mktemp("stored") / "before"
    shutil.copytree(trained_run / "checkpoint-2", before)
    (before / "chat_template.jinja").write_text(TEMPLATE)
    folder = before.with_name("checkpoint-2")
    reshard(before, folder, ParallelDegrees(world_size=1))  # the manifest lists the template
    return folder


def said(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main([*arguments]) == 0, out.getvalue()
    return out.getvalue()


def all_said(place: str, folder: Path) -> dict[str, object]:
    """What each command says of a checkpoint, without its name and its files."""
    folder.mkdir(exist_ok=True)
    text, figures = folder / "text.txt", folder / "figures.json"
    text.write_text("def self(a): return a\n" * 20)
    said("eval", place, str(text), "--json", str(figures), "--device", "cpu")
    short = ("--max-new-tokens", "5", "--device", "cpu")
    inspected = [said("inspect", place), said("inspect", place, "--samples")]
    assert all(each.splitlines()[0] == place for each in inspected)
    return {
        "inspect": [line for each in inspected for line in each.splitlines()[1:]],
        "eval": json.loads(figures.read_text()),
        "chat": said("chat", place, "--message", "def", *short),
        "generate": said("generate", "--checkpoint", place, "--prompt", "def", *short),
    }


def compare(root: str, checkpoint: Path, folder: Path) -> None:
    there = f"{root}/run/checkpoint-2"
    reshard(checkpoint, there, ParallelDegrees(world_size=1))
    ours, wanted = all_said(there, folder / "a"), all_said(str(checkpoint), folder / "b")
    assert ours == wanted
    assert said("inspect", f"{root}/run").splitlines()[0] == there
    for command in (["chat", "--message", "x"], ["inspect"], ["eval", str(folder / "a/text.txt")]):
        errors = io.StringIO()
        with redirect_stderr(errors):
            assert main([command[0], f"{root}/none/checkpoint-9", *command[1:]])
        assert f"{root}/none/checkpoint-9" in errors.getvalue(), command


def test_a_folder_as_a_store_is_read_as_the_folder_is(checkpoint: Path, tmp_path: Path) -> None:
    compare(f"file://{tmp_path}/store", checkpoint, tmp_path)


def test_a_bucket_is_read_as_a_folder_is_on_one_rank_and_on_two(
    checkpoint: Path, tmp_path: Path
) -> None:
    with start_s3() as server:
        root = server.make_bucket("runs")

        def in_a_process_of_its_own(work: Callable[[], None]) -> None:
            def run(rank: int, world_size: int) -> None:
                os.environ.update(server.environment)
                work()

            run_ranks(run, 1, timeout_s=300)

        def on_two_ranks() -> None:
            text, figures = tmp_path / "a" / "text.txt", tmp_path / "two.json"
            place = f"{root}/run/checkpoint-2"
            said("eval", place, str(text), "--json", str(figures), "--device", "cpu", "--ep", "2")
            alone = json.loads((tmp_path / "a" / "figures.json").read_text())
            assert json.loads(figures.read_text()) == pytest.approx(alone, rel=1e-5)

        in_a_process_of_its_own(lambda: compare(root, checkpoint, tmp_path))
        in_a_process_of_its_own(on_two_ranks)
