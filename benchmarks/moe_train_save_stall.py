"""What a save costs the trainer: one that training waits for, copies at once, copies in pieces.

The same job is trained by `moe-train train` in each mode of `checkpoint.save_mode`, a checkpoint
every other step; the metric `save_stall_s` of the run says what training stood still for. The floor
copies as many bytes in memory that is there already, with one call of torch.

    uv run python benchmarks/moe_train_save_stall.py [--rounds 2]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
JOB = """
[model]
config_file = "config.json"
[data]
corpus = ["corpus"]
extensions = [".txt"]
sequence_length = 64
cache_dir = "cache"
[tokenizer]
vocab_size = 512
[train]
output_dir = "run"
max_steps = 12
global_batch_size = 16
gradient_accumulation_steps = 8
validation_interval_steps = 1000
validation_sequences = 1
device = "cpu"
threads_per_rank = 1
[checkpoint]
interval_steps = 2
save_total_limit = 1
[optimizer]
lr = 0.001
[log]
tensorboard = false
plots = false
progress = "off"
"""
MODES = ("sync", "async", "zero_cost")
STEPS = (4, 6, 8, 10)  # the first save is not counted, nor the last one, for which the run waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    stalls: dict[str, list[float]] = {mode: [] for mode in MODES}
    floors: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder)
        for number in range(rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                stalls[mode] += stalls_of(folder, mode)
            floors += copies(state_bytes(folder))
    sync, at_once, pieces = (statistics.median(stalls[mode]) for mode in MODES)
    report("moe_train_save_stall_zero_cost", pieces / sync, len(stalls["zero_cost"]))
    report("moe_train_save_stall_async", at_once / statistics.median(floors), len(stalls["async"]))


def write_job(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "job.toml").write_text(JOB)
    (folder / "corpus").mkdir()
    for index in range(40):
        words = " ".join(f"word{(index * 7 + place) % 101}" for place in range(400))
        (folder / "corpus" / f"{index}.txt").write_text(words)


def stalls_of(folder: Path, mode: str) -> list[float]:
    """Seconds that training stood still for each save that counts."""
    run = folder / f"run-{mode}"
    shutil.rmtree(run, ignore_errors=True)
    overrides = [f"checkpoint.save_mode={mode}", f"train.output_dir={run}"]
    subprocess.run(
        [
            str(Path(sys.executable).parent / "moe-train"),
            "train",
            str(folder / "job.toml"),
            *overrides,
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    seen: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "save_stall_s" in values:
            seen[values["step"]] = values["save_stall_s"]
    return [seen[step + 1] for step in STEPS]  # the line of the next step, in which pieces follow


def state_bytes(folder: Path) -> int:
    """Bytes of the tensors of a checkpoint."""
    (newest,) = (folder / "run-sync").glob("checkpoint-*")
    return sum(path.stat().st_size for path in newest.glob("*.safetensors"))


def copies(num_bytes: int, count: int = 5) -> list[float]:
    """Seconds of a plain copy of so many bytes."""
    torch.set_num_threads(1)
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return taken


def report(figure: str, value: float, count: int) -> None:
    line = {"figure": figure, "value": value, "low": value, "high": value, "unit": "x", "n": count}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
