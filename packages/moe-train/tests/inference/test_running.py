"""Jobs on ranks that are started: the same text, and a failing rank that is named."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_train.config import ParallelConfig
from moe_train.errors import RankFailedError
from moe_train.generation import GenerationOptions, ModelOptions
from moe_train.inference.generate import GenerateJob, generate, generate_text
from moe_train.inference.running import job_from_json

STAGES = ModelOptions(device="cpu", parallel=ParallelConfig(pp=2, timeout_s=60))


def test_a_job_survives_its_way_as_json() -> None:
    options = GenerationOptions(temperature=0.5, stop=("a", "b"))
    job = GenerateJob(checkpoint="c", record={"prompt": "é"}, model=STAGES, options=options)
    assert job_from_json(GenerateJob, json.dumps(asdict(job))) == job


def test_started_ranks_write_the_text_of_one_process(trained_run: Path, tmp_path: Path) -> None:
    checkpoint, out = trained_run / "checkpoint-2", tmp_path / "out.jsonl"
    job = GenerateJob(
        checkpoint=str(checkpoint),
        record={"prompt": "def self"},
        output=str(out),
        model=STAGES,
        options=GenerationOptions(max_new_tokens=8, temperature=1.0, seed=4),
    )
    assert generate(job) is None
    expected = generate_text(checkpoint, "def self", max_new_tokens=8, temperature=1.0, seed=4)
    assert "def self" + json.loads(out.read_text())["completion"] == expected


def test_a_killed_rank_ends_the_job_by_name(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Runs at the start of every Python process: rank 1 dies when it has begun to load the model.
    victim = """
import os, signal, sys, threading, time
def kill():
    while "moe_train.generation.rounds" not in sys.modules:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("RANK") == "1":
    threading.Thread(target=kill, daemon=True).start()
"""
    (tmp_path / "sitecustomize.py").write_text(victim)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    two = ModelOptions(device="cpu", parallel=ParallelConfig(ep=2, timeout_s=60))
    job = GenerateJob(
        checkpoint=str(trained_run / "checkpoint-2"), record={"prompt": "a"}, model=two
    )
    with pytest.raises(RankFailedError, match=r"^rank 1.*killed by SIGKILL"):
        generate(job)


def test_another_number_of_started_ranks_is_refused(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    job = GenerateJob(
        checkpoint=str(trained_run / "checkpoint-2"), record={"prompt": "a"}, model=STAGES
    )
    with pytest.raises(ValueError, match=r"torchrun has started 3 ranks, but the layout pp=2 dp=1"):
        generate(job)
