"""Conversations: lines in, answers out, in one process and on two."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_train.cli import main
from moe_train.generation import GenerationOptions, ModelOptions, TextGenerator
from moe_train.inference.chat import ChatJob, chat
from moe_train.inference.generate import show_text

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SHORT = GenerationOptions(max_new_tokens=5)


@pytest.fixture(scope="module")
def checkpoint(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    shutil.copytree(trained_run / "checkpoint-2", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def answers(checkpoint: Path, *said: str, system: str | None = None) -> list[str]:
    """What the model says to each message, with everything that was said before."""
    generator = TextGenerator.open(checkpoint)
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for text in said:
        messages.append({"role": "user", "content": text})
        prompt = generator.tokenizer.render_chat(messages, add_generation_prompt=True)
        ids = generator.tokenizer.encode_prompt(prompt, add_special_tokens=False)
        found.append("".join(generator.stream(ids, SHORT)))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def hold(checkpoint: Path, lines: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    job = ChatJob(
        checkpoint=str(checkpoint), model=ModelOptions(device="cpu"), options=SHORT, **changes
    )
    assert chat(job) is None


@pytest.mark.parametrize("end", ["", "/exit\nnever\n"])
def test_each_line_is_answered_with_what_was_said_before(
    checkpoint: Path,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hold(checkpoint, "def\n\n self é \n" + end, monkeypatch, system="Be")
    expected = answers(checkpoint, "def", "self é", system="Be")
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


def test_one_message_is_answered_and_the_command_ends(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["chat", str(checkpoint), "--max-new-tokens", "5", "--device", "cpu", "--message"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def")))
    for message in ("def", "-"):
        assert main([*argv, message]) == 0
        assert capsys.readouterr().out == answers(checkpoint, "def")[0] + "\n"


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = sys.modules[chat.__module__]  # the package has a function of that name
    real, calls = show_text, []

    def interrupted(*arguments: Any) -> Iterator[str]:
        calls.append(arguments)
        for number, piece in enumerate(real(*arguments)):
            if len(calls) == 1 and number == 2:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(module, "show_text", interrupted)
    hold(checkpoint, "def\nself\n", monkeypatch)
    first, second = capsys.readouterr().out.split(" ...\n")
    assert answers(checkpoint, "def")[0].startswith(first)
    assert second.endswith("\n") and len(calls) == 2


def test_a_message_that_does_not_fit_is_taken_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(checkpoint, "é " * 90 + "\ndef\n", monkeypatch)
    captured = capsys.readouterr()
    assert captured.out == answers(checkpoint, "def")[0] + "\n"
    assert "the conversation has" in captured.err and "fewer than 64" in captured.err


def test_a_checkpoint_without_a_template_is_refused(trained_run: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint-2: the tokenizer has no chat template"):
        chat(ChatJob(checkpoint=str(trained_run / "checkpoint-2")))


def test_two_processes_hold_the_same_conversation(checkpoint: Path) -> None:
    code = "import sys; from moe_train.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "chat", str(checkpoint), "--ep", "2"]
    done = subprocess.run(
        [*argv, "--max-new-tokens", "5", "--device", "cpu"],
        input="def\nself é\n/exit\n",
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in answers(checkpoint, "def", "self é"))
