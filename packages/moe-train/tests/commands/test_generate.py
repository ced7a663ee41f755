"""Prompts from files and from standard input: their bytes, or one message."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from moe_train.cli import main

TEXT = "def self\r\n\treturn é\n"


@pytest.mark.parametrize("option", ["--prompt-file", "--prompt"])
def test_a_prompt_keeps_its_ends_of_lines(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    file, output = tmp_path / "prompt.txt", tmp_path / "out.jsonl"
    file.write_bytes(TEXT.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    source = [option, str(file) if option == "--prompt-file" else "-"]
    to = ["--max-new-tokens", "1", "--device", "cpu", "--output", str(output)]
    argv = ["generate", "--checkpoint", str(trained_run / "checkpoint-2"), *source, *to]
    assert main(argv) == 0
    assert json.loads(output.read_text(encoding="utf-8"))["prompt"] == TEXT


@pytest.mark.parametrize("option", ["--prompt-file", "--prompt"])
def test_a_prompt_that_is_no_text_is_refused(
    trained_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"def \xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def \xff")))
    given = str(file) if option == "--prompt-file" else "-"
    name = re.escape(given) if option == "--prompt-file" else "standard input"
    argv = ["generate", "--checkpoint", str(trained_run / "checkpoint-2"), option, given]
    assert main(argv) != 0
    assert re.search(rf"{name} cannot be read as UTF-8 text: ", capsys.readouterr().err)
