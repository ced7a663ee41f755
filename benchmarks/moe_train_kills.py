"""Kill a training job with SIGKILL at random moments and go on, again and again; what is lost?

Each kill hits a random rank, the launcher, a rank in the middle of a save, or the launcher while it
prepares the data. A run that is killed and resumed in one layout must end with losses and gradient
norms equal bit for bit to those of a run that was never stopped, and one that takes another layout
at each resume with losses within 1e-6 of them; `inspect --samples` must find each sample used once.

    python benchmarks/moe_train_kills.py                       # 50 kills, and 12 with new layouts
    python benchmarks/moe_train_kills.py --kills 3 --layout-kills 1 --seed 7
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_train.jobs.samples import audit_samples
from moe_train.report.metrics import read_metrics

COMMAND = str(Path(sys.executable).parent / "moe-train")
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
TOML = """
model.config_file = "config.json"
data = { sequence_length = 32, validation_fraction = 0.1, cache_dir = "cache" }
sources.json = { corpus = ["json"], weight = 0.6 }
sources.email = { corpus = ["email"], weight = 0.4, packing = "best_fit" }
tokenizer.vocab_size = 400
parallel = { pp = 2, timeout_s = 60 }
optimizer = { lr = 1e-3, eps = 1e-4 }
checkpoint.interval_steps = 3
log = { tensorboard = false, plots = false, progress = "off" }
[train]
output_dir = "whole"
max_steps = STEPS
global_batch_size = 8
gradient_accumulation_steps = 2
validation_interval_steps = 1000
validation_sequences = 8
device = "cpu"
threads_per_rank = 1
"""
PLACES = ("rank", "launcher", "save", "prepare")
LAYOUTS = (
    ("parallel.pp=2",),
    ("parallel.pp=1", "parallel.ep=2"),
    ("parallel.pp=1", "parallel.dp=2"),
    ("parallel.pp=1",),
)
LONGEST_WAIT_S = 180.0


@dataclass
class Job:
    """One run in its own folder, started and killed as often as asked."""

    toml: Path
    output: Path
    rng: random.Random
    steps: int
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        """Begin, or go on from the newest checkpoint."""
        log = self.output.with_suffix(".log").open("ab")
        output = f"train.output_dir={self.output}"
        command = [COMMAND, "train", str(self.toml), output, *overrides, "--resume", "auto"]
        with log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def step(self) -> int:
        file = self.output / "metrics.jsonl"
        return max((line["step"] for line in read_metrics(file)), default=0) if file.exists() else 0

    def kill(self, place: str, *overrides: str) -> bool:
        """Start, and kill at `place`; False when the run came to its end before."""
        if place == "prepare":
            cache = self.toml.parent / f"cache-{self.rng.randrange(10**9)}"
            overrides = (*overrides, f"data.cache_dir={cache}")
        before, saves = self.step(), self._saves()
        process = self.start(*overrides)
        moments: dict[str, Callable[[], bool]] = {
            "rank": lambda: self.step() != before,
            "launcher": lambda: self.step() != before,
            "save": lambda: bool(self._saves() - saves),
            "prepare": cache.exists if place == "prepare" else bool,
        }
        if not self._wait(process, moments[place]):
            return False
        if place != "save":
            time.sleep(self.rng.random() * (1.0 if place == "prepare" else 0.3))
        ranks = ranks_of(process)
        victim = process.pid
        if place in ("rank", "save") and ranks:
            victim = self.rng.choice(ranks)
        hit = process.poll() is None
        if hit:
            os.kill(victim, signal.SIGKILL)
        process.wait(LONGEST_WAIT_S)
        wait_until_gone([process.pid, *ranks])
        self.kills[place] += hit and process.returncode != 0
        return hit and process.returncode != 0

    def finish(self, *overrides: str) -> None:
        """Go on to the end without a kill."""
        process = self.start(*overrides)
        if process.wait(LONGEST_WAIT_S):
            raise RuntimeError(self.output.with_suffix(".log").read_text()[-3000:])

    def is_at_its_end(self) -> bool:
        """Whether the last checkpoint is there."""
        return (self.output / f"checkpoint-{self.steps}").exists()

    def figures(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of every step."""
        lines = read_metrics(self.output / "metrics.jsonl")
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}

    def _saves(self) -> set[str]:
        """The hidden folders of checkpoints that are being written, or were when one was killed."""
        return {path.name for path in self.output.glob(".checkpoint-*")}

    def _wait(self, process: subprocess.Popen[bytes], moment: Callable[[], bool]) -> bool:
        end = time.monotonic() + LONGEST_WAIT_S
        while not moment():
            if process.poll() is not None:
                if process.returncode:
                    raise RuntimeError(self.output.with_suffix(".log").read_text()[-3000:])
                return False
            if time.monotonic() > end:
                raise RuntimeError(f"no moment to kill within {LONGEST_WAIT_S:g} s")
            time.sleep(0.002)
        return True


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes below the launcher that call themselves one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(stat[1])
            except OSError:
                continue
    found = [process.pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return [pid for pid in found[1:] if is_rank(pid)]


def is_rank(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("rank ")
    except OSError:
        return False


def wait_until_gone(pids: Sequence[int]) -> None:
    """Killed processes let go of their locks when they are gone, a moment later."""
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            raise RuntimeError(f"processes {pids} outlive their job")
        time.sleep(0.01)


def run_killed(job: Job, places: Sequence[str], layouts: Sequence[Sequence[str]]) -> None:
    """Kill the job at each place, as long as it has not come to its end; then let it end."""
    starts = 0
    for place in places:
        if job.is_at_its_end():
            break
        layout = layouts[starts % len(layouts)]
        starts += 1
        if job.kill(place, *layout):
            print(f"killed {place} at step {job.step()}, {' '.join(layout)}", file=sys.stderr)
    if not job.is_at_its_end():
        job.finish(*layouts[starts % len(layouts)])


def campaign(
    toml: Path, steps: int, seed: int, kills: int, layouts: Sequence[Sequence[str]]
) -> tuple[int, float, int]:
    """Kill runs until `kills` have hit: steps that differ, the most by which, ledger faults."""
    rng = random.Random(seed)
    whole = Job(toml, toml.parent / "whole", rng, steps)
    if not whole.output.exists():
        whole.finish()
    expected = whole.figures()
    hit = different = faults = 0
    largest = 0.0
    while hit < kills:
        job = Job(toml, toml.parent / f"killed-{rng.randrange(10**9)}", rng, steps)
        places = [PLACES[number % len(PLACES)] for number in range(kills - hit)]
        rng.shuffle(places)
        run_killed(job, places, layouts)
        hit += sum(job.kills.values())
        print(f"{hit} kills: {job.kills}", file=sys.stderr)
        found = job.figures()
        different += sum(found.get(step) != figures for step, figures in expected.items())
        for step, (loss, _) in expected.items():
            largest = max(largest, abs(found[step][0] / loss - 1) if step in found else 1.0)
        audit = audit_samples(job.output)
        faults += len(audit.faults)
        print(*audit.faults, sep="\n", file=sys.stderr)
        shutil.rmtree(job.output)
    return different, largest, faults


def write_job(folder: Path, steps: int) -> Path:
    """A mixture of two sources, so that the ledger has something to say."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json", "email"):
        shutil.copytree(stdlib / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    toml = folder / "job.toml"
    toml.write_text(TOML.replace("STEPS", str(steps)))
    return toml


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kills and print what was lost as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--layout-kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args(argv)
    print(f"seed {arguments.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="moe-train-kills-") as folder:
        toml = write_job(Path(folder), arguments.steps)
        lost, _, faults = campaign(
            toml, arguments.steps, arguments.seed, arguments.kills, LAYOUTS[:1]
        )
        moved = 0.0
        if arguments.layout_kills:
            turns = LAYOUTS[1:] + LAYOUTS[:1]
            _, moved, more = campaign(
                toml, arguments.steps, arguments.seed + 1, arguments.layout_kills, turns
            )
            faults += more
    for figure, value, unit, n in (
        ("moe_train_kills_lost", lost, "steps", arguments.kills),
        ("moe_train_kills_layout_difference", moved, "x", arguments.layout_kills),
        ("moe_train_kills_ledger_faults", faults, "faults", arguments.kills),
    ):
        print(json.dumps({"figure": figure, "value": value, "unit": unit, "n": n,
                          "low": value, "high": value}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
