"""The command on the small job of these tests, with unequal counts of tokens and balancing on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.cli import main

JOB = ["data.packing=pad", "moe.aux_loss_coef=0.05", "optimizer.lr=1e-3"]


def test_layouts_of_a_job_agree_and_the_table_says_so(
    job: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = f"train.output_dir={tmp_path / 'run'}"
    options = ["--layouts", "3", "--steps", "3"]
    assert main(["verify-layouts", str(job()), output, *JOB, *options]) == 0
    said = capfd.readouterr().out
    assert "3 layouts, 3 steps, float32: losses and gradient norms hold to 1e-06" in said
    assert "one rank, 1f1b" in said and said.count(" microbatches") == 3
    assert not (tmp_path / "run").exists()


def test_what_differs_by_more_than_the_limit_is_exit_code_1(
    job: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--layouts", "2", "--steps", "1", "--ranks", "2", "--limit", "1e-15"]
    assert main(["verify-layouts", str(job()), *JOB, *options]) == 1
    assert "DO NOT hold to 1e-15" in capfd.readouterr().out


def test_a_job_with_one_layout_and_no_layouts_are_refused(
    job: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-layouts", str(job()), "--layouts", "1"]) == 2
    assert "two are needed" in capfd.readouterr().err
    assert main(["verify-layouts", str(job()), "--steps", "0"]) == 2
    assert "--steps 0: expected 1 or more" in capfd.readouterr().err
