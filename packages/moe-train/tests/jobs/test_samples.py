"""The ledger of real runs: resumed in other layouts and batches, over epochs of a mixture."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_train.checkpoint import read_ledger, read_state
from moe_train.checkpoint.samples import SAMPLES_FILE
from moe_train.cli import main
from moe_train.config import load_config
from moe_train.data import Ledger
from moe_train.data.ledger import Segment
from moe_train.jobs import samples
from moe_train.jobs.job import check, train
from moe_train.jobs.samples import audit_ledger, audit_samples, step_ids
from moe_train.rank import RankContext
from ranktest import run_ranks
from unified_ckpt import CheckpointError

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
TOML = """
model.config_file = "config.json"
data = { sequence_length = 12, validation_fraction = 0.2, cache_dir = "CACHE" }
sources.short = { corpus = ["short"], weight = 0.7, packing = "best_fit" }
sources.long = { corpus = ["CORPUS"], weight = 0.3 }
tokenizer.vocab_size = 300
optimizer.lr = 0.01
log = { tensorboard = false, plots = false, progress = "off" }
[train]
output_dir = "run"
max_steps = 3
global_batch_size = 12
gradient_accumulation_steps = 2
validation_sequences = 7
device = "cpu"
threads_per_rank = 1
"""
PARTS = (
    ("train.max_steps=3",),
    ("train.max_steps=5", "train.global_batch_size=24", "parallel.pp=2", "parallel.ep=2"),
    ("train.max_steps=8", "train.global_batch_size=16", "parallel.dp=2"),
)
NUM_SAMPLES = 3 * 12 + 2 * 24 + 3 * 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache_dir: Path) -> Path:
    """The output folder of a run in three parts, over several epochs of its smaller source."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "short").mkdir()
    for number in range(8):
        words = (corpus / f"f{number}.py").read_text().split()[: 20 + number]
        (folder / "short" / f"{number}.py").write_text(" ".join(words))
    (folder / "config.json").write_text(json.dumps(MODEL))
    text = TOML.replace("CORPUS", str(corpus)).replace("CACHE", str(cache_dir))
    (folder / "job.toml").write_text(text)
    for number, overrides in enumerate(PARTS):
        config = load_config(folder / "job.toml", overrides)
        resume = str(check(config, "latest" if number else "") or "")
        run_ranks(lambda *_, c=config, r=resume: train(c, r, RankContext()), config.world_size)
    return folder / "run"


def test_every_sample_is_used_once_an_epoch_over_layouts_batches_and_epochs(run: Path) -> None:
    audit = audit_samples(run)
    assert audit.faults == ()
    assert audit.text.endswith(
        "checks      8 of 8 steps have read what the ledger says\nresult      no gap and no double"
    )
    ledger = read_ledger(run / "checkpoint-8")
    assert [segment.first_step for segment in ledger.segments] == [1, 4, 6]
    steps = list(step_ids(ledger))
    numbers = np.concatenate([ids.sample for ids in steps])
    assert numbers.tolist() == list(range(NUM_SAMPLES))
    (data,) = {ids.data for ids in steps}
    source, sequence, epoch = (
        np.concatenate([getattr(ids, name) for ids in steps])
        for name in ("source", "sequence", "epoch")
    )
    assert epoch[source == 0].max() >= 2, "the smaller source was read twice and more"
    for place, share in enumerate(data.sources):
        for number in range(epoch[source == place].max()):
            read = sequence[(source == place) & (epoch == number)]
            assert sorted(read) == list(range(share.num_sequences))


def test_a_mixture_is_read_alike_in_one_layout_and_several(run: Path, tmp_path: Path) -> None:
    toml = run.parent / "job.toml"
    config = load_config(toml, [f"train.output_dir={tmp_path / 'one'}", "train.max_steps=2"])
    check(config, "")
    run_ranks(lambda *_: train(config, "", RankContext()), 1)
    one = read_ledger(tmp_path / "one" / "checkpoint-2").segments[0]
    assert one.checks == read_ledger(run / "checkpoint-8").segments[0].checks[:2]


FORGED = {
    "step 4 has read other samples than the ledger says": lambda s: set_data(s[1], seed=5),
    "step 6 has read other samples than the ledger says": lambda s: set_weight(s[2], "0.6"),
    "step 8 has read other samples than the ledger says": lambda s: (
        s[2].checks.append(1) or s[2].checks.pop(2)
    ),
    "samples 84 to 84 are missing before step 6": lambda s: setattr(s[2], "first_sample", 85),
    "samples 83 to 83 are there twice, again from step 6 on": lambda s: setattr(
        s[2], "first_sample", 83
    ),
    "steps 6 to 6 are missing before step 7": lambda s: setattr(s[2], "first_step", 7),
    "steps 3 to 3 are there twice, again from step 3 on": lambda s: setattr(s[1], "first_step", 3),
    "steps 4 to 5 are missing before step 6": lambda s: s.pop(1),
    "samples 36 to 83 are missing before step 6": lambda s: s.pop(1),
    "steps 8 to 8 are missing before the checkpoint": lambda s: s[2].checks.pop(),
    "samples 116 to 131 are missing before the checkpoint": lambda s: s[2].checks.pop(),
    "steps 9 to 9 are there twice, again from the checkpoint on": lambda s: s[2].checks.append(1),
}


def set_data(segment: Segment, **changes: object) -> None:
    segment.data = replace(segment.data, **changes)  # type: ignore[arg-type]


def set_weight(segment: Segment, weight: str) -> None:
    first, second = segment.data.sources
    set_data(segment, sources=(replace(first, weight=weight), second))


@pytest.mark.parametrize("fault", FORGED)
def test_a_forged_or_left_out_step_is_found(run: Path, fault: str) -> None:
    ledger, state = read_ledger(run / "checkpoint-8"), read_state(run / "checkpoint-8")
    FORGED[fault](ledger.segments)
    assert fault in audit_ledger(ledger, state).faults


def test_a_ledger_that_was_edited_fails_the_checksum_of_its_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "checkpoint-8"
    shutil.copytree(run / "checkpoint-8", target)
    text = (target / SAMPLES_FILE).read_text()
    (target / SAMPLES_FILE).write_text(text.replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(CheckpointError, match=r"samples\.json"):
        audit_samples(target)


def test_a_checkpoint_from_before_the_ledger_says_that_nothing_is_recorded(run: Path) -> None:
    audit = audit_ledger(Ledger(), read_state(run / "checkpoint-8"))
    assert audit.lines[0] == "steps       none are recorded"
    assert audit.faults == (
        "steps 1 to 8 are missing before the checkpoint",
        "samples 0 to 131 are missing before the checkpoint",
    )


def test_the_command_needs_no_corpus_and_writes_the_ids(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(run / "checkpoint-8", alone)
    table = tmp_path / "samples.csv"
    assert main(["inspect", str(alone), "--samples", "--csv", str(table)]) == 0
    said = capsys.readouterr().out
    assert f"wrote       132 samples to {table}" in said
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [int(row["sample"]) for row in rows] == list(range(NUM_SAMPLES))
    assert {row["source"] for row in rows} == {"short", "long"}
    for name in ("short", "long"):
        ids = [(row["epoch"], row["sequence"]) for row in rows if row["source"] == name]
        assert len(set(ids)) == len(ids), "once an epoch"
    assert main(["inspect", str(alone), "--csv", str(table)]) == 2
    assert "give --samples with it" in capsys.readouterr().err


def test_a_command_that_finds_a_fault_ends_with_exit_code_1(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "read_ledger", lambda _: Ledger())
    assert main(["inspect", str(run), "--samples"]) == 1
    assert "fault       steps 1 to 8 are missing" in capsys.readouterr().out
