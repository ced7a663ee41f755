import io
import os
import pty

import pytest

from moe_train.report.progress import ProgressLine

VALUES = {
    "loss": 5.25,
    "lr": 3e-4,
    "grad_norm": 1.5,
    "tokens_per_s": 12345.6,
    "expert_load_max_over_mean": 1.25,
    "expert_load/0": [1, 2],
}


def test_plain_lines_are_few_and_hold_the_figures() -> None:
    out = io.StringIO()
    line = ProgressLine(1000, "auto", out)
    assert line.mode == "plain"
    for step in range(1, 1001):
        line.update(step, VALUES)
    line.close()
    lines = out.getvalue().splitlines()
    assert 50 <= len(lines) <= 52
    assert lines[0] == (
        "step 1/1000  loss 5.2500  lr 3.00e-04  norm 1.50  tok/s 12,346  load max/mean 1.25"
    )
    assert lines[-1].startswith("step 1000/1000  left 0:00  loss 5.2500")


def test_validation_is_always_shown() -> None:
    out = io.StringIO()
    line = ProgressLine(1000, "plain", out)
    line.update(7, VALUES)
    assert out.getvalue() == ""
    line.update(7, {"validation_loss": 4.5, "validation_perplexity": 90.0})
    assert "step 7/1000  loss 5.2500  val 4.5000" in out.getvalue()


def test_time_left_comes_from_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("moe_train.report.progress.time.monotonic", lambda: now[0])
    line = ProgressLine(4000, "plain", io.StringIO())
    for step in range(101, 401):
        now[0] += 100.0 if step < 300 else 2.0
        line.update(step, {"loss": 1.0})
    assert line.text(400) == "step 400/4000  left 2:00:00  loss 1.0000"
    assert "left 0:02" in line.text(3999)


def test_off_prints_nothing() -> None:
    out = io.StringIO()
    line = ProgressLine(2, "off", out)
    line.update(1, VALUES)
    line.update(2, VALUES)
    line.close()
    assert out.getvalue() == ""


def read_all(descriptor: int) -> str:
    """What a closed terminal still holds; Linux ends it with an error, others with nothing."""
    chunks = []
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while True:
            try:
                chunk = stream.read(4096)
            except OSError:
                break
            if not chunk:
                break
            chunks.append(chunk)
    return b"".join(chunks).decode()


def test_terminal_gets_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        line = ProgressLine(4, "auto", terminal)
        assert line.mode == "live"
        for step in range(1, 5):
            line.update(step, VALUES)
        line.close()
    text = read_all(reader)
    assert all(f"step {step}/4" in text for step in range(1, 5))
    last = next(part for part in reversed(text.split("\r")) if "step" in part)
    assert "step 4/4" in last and "━" * 12 in last
    assert text.count("\n") <= 3


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode='loud'"):
        ProgressLine(1, "loud")


def test_time_left_is_there_from_the_first_step_on_and_before_what_a_narrow_terminal_cuts() -> None:
    line = ProgressLine(10, "plain", io.StringIO())
    line.update(1, {**VALUES, "step_time_s": 2.0})
    assert line.text(1).startswith("step 1/10  left 0:18  loss")
    line.update(1, {"validation_loss": 4.0})
    assert "left 0:18" in line.text(1)
