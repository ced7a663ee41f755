"""The job of `moe-train eval`: a job's held-out text, files, conversations, questions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_train.cli import main
from moe_train.generation import ModelOptions
from moe_train.inference.evaluate import EvaluateJob, evaluate, table_of
from moe_train.tokenization import load_tokenizer

CPU = ModelOptions(device="cpu")


@pytest.fixture
def checkpoint(trained_run: Path) -> Path:
    return trained_run / "checkpoint-2"


def figures_of(checkpoint: Path, *data: Path, **changes: Any) -> dict[str, float]:
    job = EvaluateJob(checkpoint=str(checkpoint), data=tuple(map(str, data)), model=CPU, **changes)
    figures = evaluate(job)
    assert figures is not None
    return figures


def test_a_text_file_is_one_document_of_which_nothing_is_left_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    text = "def self return é\n" * 40
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    figures = figures_of(checkpoint, tmp_path / "a.txt", sequence_length=20)
    (ids,) = load_tokenizer(checkpoint).encode_batch([text])
    assert figures["tokens"] == len(ids)  # with the end token, without the first
    nats = figures["nats_per_token"] * figures["tokens"]
    assert figures["bits_per_byte"] == pytest.approx(nats / 0.6931471805599453 / len(text.encode()))


def test_rows_of_a_file_are_documents(checkpoint: Path, tmp_path: Path) -> None:
    texts = ["def self", "value é None", "in"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    figures = figures_of(checkpoint, tmp_path / "a.jsonl", content_field="body")
    ids = load_tokenizer(checkpoint).encode_batch(texts)
    assert figures["tokens"] == sum(map(len, ids))
    with pytest.raises(ValueError, match=r"a\.jsonl.*1.*text"):
        figures_of(checkpoint, tmp_path / "a.jsonl")


def test_a_job_is_measured_on_all_that_it_holds_out(trained_run: Path, checkpoint: Path) -> None:
    figures = figures_of(checkpoint, trained_run.parent / "job.toml")
    assert figures["tokens"] > 0 and figures["perplexity"] > 1
    longer = figures_of(checkpoint, trained_run.parent / "job.toml", sequence_length=40)
    assert longer["tokens"] == figures["tokens"]
    assert longer["bits_per_byte"] != figures["bits_per_byte"]


def test_the_command_prints_a_table_and_writes_json(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "q.jsonl"
    record = {"question": "def", "choices": ["self", "é é é é"], "answer": "A"}
    questions.write_text(json.dumps(record) + "\n")
    out = tmp_path / "figures.json"
    argv = ["eval", str(checkpoint), str(questions), "--kind", "multiple_choice"]
    assert main([*argv, "--json", str(out), "--device", "cpu", "parallel.dp=1"]) == 0
    figures = json.loads(out.read_text())
    assert figures["questions"] == 1 and figures["accuracy"] in (0.0, 1.0)
    assert capsys.readouterr().out == table_of(figures) + "\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "preference"}, "kind='preference' has no tokens to predict; choose text, chat"),
        ({"sequence_length": 65}, "sequence_length=65; the model takes from 1 to 64"),
        ({"sequence_length": 0}, "sequence_length=0; the model takes from 1 to 64"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "def self"}\n')
    with pytest.raises(ValueError, match=re.escape(message)):
        figures_of(checkpoint, tmp_path / "a.jsonl", **changes)


def test_a_file_that_is_not_there_and_a_wrong_line_are_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.txt"):
        figures_of(checkpoint, tmp_path / "no.txt")
    (tmp_path / "q.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "answer": 5}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl, line 1: answer=5"):
        figures_of(checkpoint, tmp_path / "q.jsonl", kind="multiple_choice")
