import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_train.config import load_config
from moe_train.data.pool import usable_cores
from moe_train.data.prepare import prepare
from moe_train.data.token_store import damage_of, open_store
from moe_train.reading import spans

JOB = """
[model]
config_file = "config.json"
[data]
corpus = ["rows.jsonl"]
cache_dir = "cache"
num_workers = 2
[tokenizer]
vocab_size = 300
train_bytes = 20000
[train]
output_dir = "out"
max_steps = 1
global_batch_size = 1
[optimizer]
lr = 1e-3
"""
# The command, with pieces so small that a kill falls between them.
COMMAND = """
import sys
from moe_train.reading import spans
spans.PIECE_BYTES = 20_000
from moe_train.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    rng = random.Random(0)
    words = ["def", "return", "import", "self", "value", "None", "é"]
    with (tmp_path / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for _ in range(1500):
            stream.write(json.dumps({"text": " ".join(rng.choices(words, k=60))}) + "\n")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def start(job: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, "data", str(job)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "COLUMNS": "300"}
    )


# The command in a script whose main module has no guard, as in the package's README.
SCRIPT = """
print("the script begins")
from moe_train.reading import spans
spans.PIECE_BYTES = 20_000
from moe_train.cli import main
raise SystemExit(main(["data", "job.toml"]))
"""


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_killed_at_any_moment_it_goes_on_and_leaves_no_process(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(job)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "cache").glob("pieces/*/*.piece"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("pieces/*/*.piece")}
    assert workers and len(kept) >= 5
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = start(job)
    shown, log = again.communicate(timeout=120)
    assert again.returncode == 0, log
    assert "pieces are ready from before" in log
    assert "1,4" in shown and "documents" in shown
    assert not list((tmp_path / "cache").glob("pieces/*"))
    killed = prepare(load_config(job))
    monkeypatch.setattr(spans, "PIECE_BYTES", 20_000)
    whole = prepare(
        load_config(job, [f"data.cache_dir={tmp_path / 'other'}", "data.num_workers=1"])
    )
    assert whole.fingerprint == killed.fingerprint
    for name in ("train", "validation"):
        first, second = (getattr(p.sources[0], name) for p in (whole, killed))
        assert first.read_bytes() == second.read_bytes()
        assert open_store(first).starts.tolist() == open_store(second).starts.tolist()


def test_a_mistake_in_a_row_comes_out_of_the_processes(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "PIECE_BYTES", 100_000)
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write('{"text": 7}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1501: field 'text' holds int 7"):
        prepare(load_config(job))
    assert not list((tmp_path / "cache").glob("corpora/*"))


def test_a_script_that_prepares_is_not_run_again_by_its_processes(
    job: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the script begins") == 1
    assert "documents" in ended.stdout


def test_a_process_that_is_ended_from_outside_is_said(job: Path, tmp_path: Path) -> None:
    process = start(job)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cache").glob("pieces/*/*.piece")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    for worker in children_of(process.pid):
        os.kill(worker, signal.SIGKILL)
    assert "was ended from outside" in process.communicate(timeout=120)[1]


@pytest.mark.parametrize("suffix", [".bin", ".starts"])
def test_a_zeroed_block_is_found_and_made_again(job: Path, tmp_path: Path, suffix: str) -> None:
    config = load_config(job, ["data.num_workers=1"])
    first = prepare(config)
    path = first.sources[0].train.with_suffix(suffix)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])
    assert prepare(config) == first  # a rank opens what the launcher has checked
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("moe_train.data.prepare").addHandler(handler)
    again = prepare(config, verify=True)
    logging.getLogger("moe_train.data.prepare").removeHandler(handler)
    assert f"{path} is damaged: bytes 0 to" in log.getvalue()
    assert "it is made again" in log.getvalue()
    assert again == first
    assert path.read_bytes() == content
    assert damage_of(first.sources[0].train) == ""


def test_a_changed_tokenizer_file_in_the_cache_is_found(job: Path) -> None:
    config = load_config(job, ["data.num_workers=1"])
    first = prepare(config, verify=True)
    content = first.tokenizer_file.read_bytes()
    first.tokenizer_file.write_bytes(bytes(len(content)))
    assert prepare(config, verify=True).tokenizer_file.read_bytes() == content


def test_there_is_a_core() -> None:
    assert 1 <= usable_cores() <= 4096
