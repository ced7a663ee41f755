"""Checkpoints of every layout: opened by transformers, and gone on from in every other layout.

The jobs are those of `moe_train_layouts.py`, in the layouts that `moe-train verify-layouts` takes.
In each, a job trains for some steps and saves asynchronously. Some of them, drawn anew in each run,
are started again by `moe-train train` in another folder, one of their ranks is killed with SIGKILL
at a random moment, and they go on with `--resume`: the last checkpoint must have the bits of the
first run's. transformers must find every key of each layout's and none besides. Then each layout
goes on from the middle checkpoint of every layout: the figure is the largest relative difference
of a loss, or of a gradient norm before clipping, between a layout and the one that had saved it.

What a family came to is kept in `results/ledgers/`, since all four take an hour on two cores.

    python benchmarks/moe_train_layout_checkpoints.py --keep   # 4 families, 20 layouts: 1,600 pairs
    python benchmarks/moe_train_layout_checkpoints.py --families mixtral --layouts 3 --seed 7
    python benchmarks/moe_train_layout_checkpoints.py --gathered     # the last run of each family
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ledgers import LEDGERS, ROOT, Ledger, source_of
from moe_train_kills import COMMAND, LONGEST_WAIT_S, ranks_of, wait_until_gone
from moe_train_layouts import FAMILIES, write_job
from transformers import AutoModelForCausalLM

from moe_train.config import OWN_TOML, Config, dump_toml, load_config
from moe_train.jobs.layout_choice import JobLayout, choose_layouts
from moe_train.jobs.layout_rank import end_groups
from moe_train.jobs.verify_layouts import checked_job
from moe_train.launch import run_local
from moe_train.parallel import Parallel, start
from moe_train.rank import RankContext
from moe_train.training import TrainingLoop, build_training
from unified_ckpt import diff_checkpoints

FILE = LEDGERS / "moe-train-layout-checkpoints.json"
SOURCES = [f"packages/{name}/src" for name in ("moe-train", "moe-pipeline", "unified-ckpt")]
LAYOUTS, KILLS = 20, 5  # of a family
SAVED_STEP, STEPS = 2, 4
KILL_WITHIN_S = 20.0  # after the launcher has made the run's folder; most runs last longer
LIMIT = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of a job: its file, and the folder of the run that nobody kills."""

    layout: JobLayout
    toml: Path
    run: Path

    def checkpoint(self, step: int) -> Path:
        return self.run / f"checkpoint-{step}"


def run(argv: list[str], context: RankContext) -> None:
    """On each rank of a launch: jobs of so many ranks; rank 0 writes the figures of each.

    Args:
        argv: the path of a list of (config, checkpoint to go on from, path of the figures); without
            a checkpoint the job runs from its beginning and saves.
        context: told the finished steps.
    """
    torch.set_num_threads(1)
    for toml, source, place in json.loads(Path(argv[0]).read_bytes()):
        config = load_config(Path(toml))
        parallel = start(config)
        if source:
            found = _next_steps(config, parallel, Path(source), context)
        else:
            found = _whole_run(config, parallel, context)
        dist.barrier()
        if parallel.rank == 0:
            Path(place).write_text(json.dumps(found), encoding="utf-8")
        end_groups(parallel)
    dist.barrier()
    dist.destroy_process_group()


def _whole_run(config: Config, parallel: Parallel, context: RankContext) -> list[float]:
    training = build_training(config, parallel)
    loop = TrainingLoop.begin(config, training, None)
    loop.saver.open()
    loop.run(context)
    training.checkpointer.close()
    loop.saver.check()
    return []


def _next_steps(
    config: Config, parallel: Parallel, source: Path, context: RankContext
) -> list[float]:
    """Losses and gradient norms of the steps after a checkpoint's."""
    training = build_training(config, parallel)
    loop = TrainingLoop.begin(config, training, None, training.checkpointer.load(source))
    found: list[float] = []
    for result in loop.first_steps(STEPS - SAVED_STEP, context):
        context.step = loop.position.step
        found += [result.loss, result.grad_norm]
    training.checkpointer.close()
    return found


def make_cases(folder: Path, family: str, count: int) -> list[Case]:
    config = load_config(write_job(folder, family))
    saves = {
        "checkpoint.save_mode": "async",
        "checkpoint.interval_steps": SAVED_STEP,
        "checkpoint.save_total_limit": STEPS,
        "train.max_steps": STEPS,
        "train.threads_per_rank": 1,
    }
    config, model = checked_job(config.with_keys(saves), STEPS)
    layouts = choose_layouts(config, model, max_ranks=4, count=count)
    return [_case(folder, number, layout, config) for number, layout in enumerate(layouts)]


def _case(folder: Path, number: int, layout: JobLayout, config: Config) -> Case:
    case = Case(layout=layout, toml=folder / f"{number}.toml", run=folder / f"run-{number}")
    own = layout.applied(config).with_keys({"train.output_dir": str(case.run)})
    case.toml.write_text(dump_toml(own), encoding="utf-8")
    return case


def train(case: Case, *overrides: str) -> subprocess.Popen[bytes]:
    command = [COMMAND, "train", str(case.toml), *overrides, "--resume", "auto"]
    with (case.run.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def killed_and_resumed(case: Case, rng: random.Random) -> bool:
    """Whether a run that was killed and went on ends with the bits of the one that was not."""
    other = case.run.with_name(f"{case.run.name}-killed")
    output = f"train.output_dir={other}"
    process = train(case, output)
    while process.poll() is None and not (other / "run.json").exists():
        time.sleep(0.1)
    time.sleep(rng.random() * KILL_WITHIN_S)
    ranks = ranks_of(process)
    if process.poll() is None:
        os.kill(rng.choice(ranks or [process.pid]), signal.SIGKILL)
    process.wait(LONGEST_WAIT_S)
    wait_until_gone([process.pid, *ranks])
    last = other / f"checkpoint-{STEPS}"
    if not last.exists() and train(case, output).wait(LONGEST_WAIT_S):
        raise RuntimeError(f"{case.layout}: {(case.run.parent / 'log').read_text()[-3000:]}")
    apart = diff_checkpoints(case.checkpoint(STEPS), last)
    names = {each.name for each in apart if "random_state" not in each.name} - {OWN_TOML}
    if names:
        print(f"{case.layout}: killed and resumed, {sorted(names)[:5]} differ", flush=True)
    return not names


def opens(layout: JobLayout, checkpoint: Path) -> bool:
    """Whether transformers finds in the checkpoint all that its model has, and nothing else."""
    _, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    odd = [report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")]
    if any(odd):
        print(f"{layout}: transformers misses or does not know {odd}", flush=True)
    return not any(odd)


def launch(folder: Path, jobs: Sequence[tuple[Case, Case | None]]) -> None:
    """Run each layout from its beginning, or on from the checkpoint of another."""
    for size in sorted({into.layout.world_size for into, _ in jobs}):
        listed = [
            (
                str(into.toml),
                "" if source is None else str(source.checkpoint(SAVED_STEP)),
                str(_place(folder, source, into)),
            )
            for into, source in jobs
            if into.layout.world_size == size
        ]
        path = folder / "jobs.json"
        path.write_text(json.dumps(listed), encoding="utf-8")
        if run_local(size, Path(__file__).stem, [str(path)]) is not None:
            raise SystemExit("stopped")


def largest_difference(cases: Sequence[Case], folder: Path) -> float:
    worst = 0.0
    for source in cases:
        wanted = json.loads(_place(folder, source, source).read_bytes())
        for into in cases:
            found = json.loads(_place(folder, source, into).read_bytes())
            apart = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
            if apart > LIMIT:
                print(f"from {source.layout}\n  to {into.layout}: {apart:.1e} apart", flush=True)
            worst = max(worst, apart)
    return worst


def _place(folder: Path, source: Case | None, into: Case) -> Path:
    return folder / f"{'begin' if source is None else source.toml.stem}-to-{into.toml.stem}.json"


def family_run(family: str, layouts: int, kills: int, rng: random.Random) -> dict[str, Any]:
    """Run a family in its layouts; what they came to, as the ledger keeps it."""
    with tempfile.TemporaryDirectory(prefix="moe-train-checkpoints-") as name:
        cases, folder = make_cases(Path(name), family, layouts), Path(name)
        launch(folder, [(case, None) for case in cases])
        killed = rng.sample(cases, min(kills, len(cases)))
        wrong = [str(case.layout) for case in killed if not killed_and_resumed(case, rng)]
        wrong += [
            str(case.layout) for case in cases if not opens(case.layout, case.checkpoint(STEPS))
        ]
        launch(folder, [(into, source) for into in cases for source in cases])
        apart = largest_difference(cases, folder)
    print(f"{family}: {len(cases)} layouts, figures at most {apart:.1e} apart", flush=True)
    return {"layouts": len(cases), "killed": len(killed), "wrong": wrong, "apart": apart}


def report(entries: Mapping[str, dict[str, Any]]) -> bool:
    """Print the figure of one entry for each family, and whether all is as it must be."""
    worst = max(entry["apart"] for entry in entries.values())
    pairs = sum(entry["layouts"] ** 2 for entry in entries.values())
    figure = {"figure": "moe_train_resume_apart", "value": worst, "low": worst, "high": worst}
    print(json.dumps({**figure, "unit": "x", "n": pairs}))
    return worst <= LIMIT and not any(entry["wrong"] for entry in entries.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--layouts", type=int, default=LAYOUTS)
    parser.add_argument("--kills", type=int, default=KILLS, help="jobs of a family that are killed")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--keep", action="store_true", help="keep each family's in the ledger")
    parser.add_argument("--gathered", action="store_true", help="read the ledger, run nothing")
    arguments = parser.parse_args(argv)
    if arguments.gathered:
        entries = Ledger(FILE, "").entries()
        if missing := [family for family in FAMILIES if family not in entries]:
            sys.exit(f"no run of {', '.join(missing)} is kept; run --keep --families {missing[0]}")
    else:
        print(f"--seed {arguments.seed}")
        # Ranks of a launch import this file by its name.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        rng, entries = random.Random(arguments.seed), {}
        for family in arguments.families:
            source = source_of(ROOT, *SOURCES) if arguments.keep else ""
            entries[family] = family_run(family, arguments.layouts, arguments.kills, rng)
            if arguments.keep:
                Ledger(FILE, source).keep(family, entries[family])
    if not report(entries):
        sys.exit("not every checkpoint opens, has the bits that it must, or goes on alike")


if __name__ == "__main__":
    main()
