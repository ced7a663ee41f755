"""Preparing JSONL: time against Hugging Face `datasets`, memory that stays flat, and kills.

The corpus is made on the fly: rows of about two kilobytes of Python source. Ours is the command
`moe-train data`, from its start to the last line that it prints; theirs is `load_dataset("json")`
and a batched `map` with the same tokenizer and as many processes. Both run in fresh processes with
cold caches, alternating. The floor is tokenizing alone, by one process in memory.

    uv run --group peers python benchmarks/moe_train_data.py --megabytes 1000
    uv run --group peers nox -s claims -- moe-train
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from moe_train.reading.spans import PIECE_BYTES

JOB = """
[model]
config_file = "none.json"
[data]
corpus = ["{corpus}"]
cache_dir = "{cache}"
num_workers = {workers}
[tokenizer]
file = "tokenizer.json"
[train]
output_dir = "run"
max_steps = 1
global_batch_size = 1
[optimizer]
lr = 1e-3
"""
THEIRS = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer
corpus, tokenizer_file, cache, workers = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer_file)
tokenizer.encode_special_tokens = True
end = tokenizer.token_to_id("<|endoftext|>")
def encode(rows):
    found = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
    return {"input_ids": [[*encoding.ids, end] for encoding in found]}
data = load_dataset("json", data_files=corpus, cache_dir=cache, split="train")
data = data.map(encode, batched=True, num_proc=int(workers), remove_columns=data.column_names)
print(sum(map(len, data[:10]["input_ids"])))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of ours: its time, its largest process that tokenizes, and its last line."""

    seconds: float
    peak_kb: int
    fingerprint: str


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print each figure as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without-peer", action="store_true", help="`datasets` is not installed")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="moe-train-data-") as name:
        folder = Path(name)
        lines = source_lines()
        train_tokenizer(lines, folder / "tokenizer.json")
        large = write_corpus(folder / "large.jsonl", lines, arguments.megabytes * 1_000_000)
        small = write_corpus(folder / "small.jsonl", lines, arguments.megabytes * 250_000)
        small_peak = run_ours(folder, small, arguments.workers).peak_kb
        last = measure_speed(folder, large, arguments)
        print(f"largest process: {small_peak // 1000} MB, with four times the rows "
              f"{last.peak_kb // 1000} MB")  # fmt: skip
        figure("data_memory_growth", [last.peak_kb / small_peak], "x")
        if arguments.kills:
            measure_kills(folder, large, arguments, last)
    return 0


def measure_speed(folder: Path, corpus: Path, arguments: argparse.Namespace) -> Run:
    """Ours and theirs, alternating; the last run of ours."""
    ratios = []
    for _ in range(arguments.rounds):
        ours = run_ours(folder, corpus, arguments.workers)
        theirs_s = ours.seconds
        if not arguments.without_peer:
            theirs_s = run_theirs(folder, corpus, arguments.workers)
        print(f"ours {ours.seconds:.1f} s, datasets {theirs_s:.1f} s")
        ratios.append(theirs_s / ours.seconds)
    print(f"floor: tokenizing alone {floor_s(folder, corpus, arguments.workers):.1f} s")
    figure("data_speed", ratios, "x")
    return ours


def measure_kills(folder: Path, corpus: Path, arguments: argparse.Namespace, unbroken: Run) -> None:
    """Kill it at random moments; in the end the token files are those of an unbroken run."""
    expected = checksums(folder / "cache")
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    cache = fresh(folder / "cache")
    kept, lost = 0, 0
    for number in range(arguments.kills):
        process = start_ours(folder, corpus, cache, arguments.workers)
        share = (number + 1) / (arguments.kills + 1)
        wanted = rng.randint(kept, max(kept, int(share * corpus.stat().st_size / PIECE_BYTES)))
        while process.poll() is None and num_pieces(cache) < wanted:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        lost += num_pieces(cache) < kept
        kept = num_pieces(cache)
    output = start_ours(folder, corpus, cache, arguments.workers).communicate()[0]
    same = output.splitlines()[-1] == unbroken.fingerprint and checksums(cache) == expected
    print(f"seed {seed}: {kept} pieces were kept over {arguments.kills} kills")
    figure("data_kills_lost", [lost + (not same)], "kills")


def num_pieces(cache: Path) -> int:
    """How many pieces are ready."""
    return len(list(cache.glob("pieces/*/*.piece")))


def run_ours(folder: Path, corpus: Path, workers: int) -> Run:
    """One whole run; its cache stays."""
    cache = fresh(folder / "cache")
    began = time.perf_counter()
    process = start_ours(folder, corpus, cache, workers)
    children: dict[str, int] = {}
    alone = 1
    while process.poll() is None:
        alone = peaks_kb([str(process.pid)]).get(str(process.pid), alone)
        # The last look counts: between fork and exec a child has the size of its parent.
        children |= peaks_kb(children_of(process.pid))
        time.sleep(0.05)
    # What a library asks the system by a command is a child as well, and no worker.
    peak = max((kb for kb in children.values() if kb > alone / 10), default=alone)
    seconds = time.perf_counter() - began
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"moe-train data ended with {process.returncode}")
    return Run(seconds=seconds, peak_kb=peak, fingerprint=output.splitlines()[-1])


def start_ours(folder: Path, corpus: Path, cache: Path, workers: int) -> "subprocess.Popen[str]":
    """Start `moe-train data`."""
    job = folder / "job.toml"
    job.write_text(JOB.format(corpus=corpus, cache=cache, workers=workers))
    command = [str(Path(sys.executable).parent / "moe-train"), "data", str(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run_theirs(folder: Path, corpus: Path, workers: int) -> float:
    """Seconds of one whole run."""
    cache = fresh(folder / "their_cache")
    arguments = [str(corpus), str(folder / "tokenizer.json"), str(cache), str(workers)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    began = time.perf_counter()
    command = [sys.executable, "-c", THEIRS, *arguments]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return time.perf_counter() - began


def floor_s(folder: Path, corpus: Path, workers: int) -> float:
    """Seconds that the tokenizer alone takes for the corpus, from a sample of it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sample_bytes = min(20_000_000, corpus.stat().st_size)
    with corpus.open(encoding="utf-8") as stream:
        texts = [json.loads(line)["text"] for line in stream.readlines(sample_bytes)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.perf_counter()
    for first in range(0, len(texts), 200):
        tokenizer.encode_batch_fast(texts[first : first + 200], add_special_tokens=False)
    seconds = time.perf_counter() - began
    return seconds * corpus.stat().st_size / sample_bytes / workers


def children_of(pid: int) -> list[str]:
    """The children of a process that still runs."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def peaks_kb(processes: Sequence[str]) -> dict[str, int]:
    """The largest resident size so far of each process that still runs."""
    found = {}
    for process in processes:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            found[process] = next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))
    return found


def checksums(cache: Path) -> list[str]:
    """The descriptions of all token files in a cache."""
    return sorted(path.read_text() for path in cache.glob("corpora/*/*.json"))


def source_lines() -> list[str]:
    """Lines of Python source, a few megabytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    lines: list[str] = []
    for path in sorted(folder.glob("*.py")):
        lines += path.read_text(encoding="utf-8").splitlines()
    return lines


def write_corpus(path: Path, lines: Sequence[str], size_bytes: int) -> Path:
    """Rows of fifty consecutive lines from random places."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        while stream.tell() < size_bytes:
            first = rng.randrange(len(lines) - 50)
            stream.write(json.dumps({"text": "\n".join(lines[first : first + 50])}) + "\n")
    return path


def train_tokenizer(lines: Sequence[str], path: Path) -> None:
    """A byte-level BPE of 4096 tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines[:50_000], trainer)
    tokenizer.save(str(path))


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def figure(name: str, values: Sequence[float], unit: str) -> None:
    """Print a figure as the ledger reads it."""
    line = {"figure": name, "value": round(statistics.median(values), 3), "unit": unit}
    print(json.dumps(line | {"low": min(values), "high": max(values), "n": len(values)}))


if __name__ == "__main__":
    sys.exit(main())
