import json
from pathlib import Path

import pytest

from moe_train.cli import main
from moe_train.config import load_config
from moe_train.data import prepare

JOB = """
[model]
config_file = "there/is/none.json"
[data]
cache_dir = "cache"
validation_fraction = 0.3
sequence_length = 16
num_workers = 1
[tokenizer]
file = "tokenizer"
[train]
output_dir = "out"
max_steps = 1
global_batch_size = 1
[optimizer]
lr = 1e-3
[sources.talk]
corpus = ["talk.jsonl"]
kind = "chat"
weight = 3
[sources.text]
corpus = ["text.jsonl"]
"""
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture
def job(tmp_path: Path, trained_run: Path) -> Path:
    """Two sources, and the tokenizer of a checkpoint with a chat template."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((trained_run / "checkpoint-2" / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE + PROMPT)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "return"}]
    talk = [{"messages": messages}] * 9 + [{"messages": []}]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))
    texts = [{"text": f"def f{index}"} for index in range(9)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_each_source_is_described_with_a_sample_and_its_mask(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", str(job)]) == 0
    shown = capsys.readouterr().out
    talk, text = shown.split("source text:")
    assert "source talk: chat, best_fit, 75.0% of the samples, fingerprint " in talk
    assert "conversations, " in talk and "tokens of each: min " in talk
    assert "left out   1 conversations without messages" in talk
    assert "| [user]Hi<|endoftext|>[assistant]«return<|endoftext|>»" in talk
    assert " text, stream, 25.0%" in text
    assert "| «def f" in text
    counts = [line.split()[1] for line in talk.splitlines() if "conversations, " in line]
    assert sum(map(int, counts)) == 9
    assert main(["data", str(job)]) == 0
    assert capsys.readouterr().out == shown


def test_pairs_are_checked_and_not_trained_on(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "def", "chosen": "a", "rejected": f"b{index}"} for index in range(9)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = ["sources.text.kind=preference"]
    assert main(["data", str(job), *changes]) == 0
    assert "source text: preference" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"source text has kind=.*no training on pairs yet"):
        prepare(load_config(job, changes))
    with (tmp_path / "text.jsonl").open("a") as stream:
        stream.write('{"prompt": "def", "chosen": "a"}\n')
    assert main(["data", str(job), *changes]) == 2
    assert "text.jsonl, line 10: there is no field 'rejected'" in capsys.readouterr().err
