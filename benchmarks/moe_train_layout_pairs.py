"""A checkpoint of one random layout, gone on from in another: 40 pairs, drawn with one seed.

Layouts are drawn key by key (pp, dp, ep, cp, tp, etp, the way of cp, sharding, schedule, recompute)
and kept where the trainer takes them and ranks share samples, tensors or states; families, and
whether the head is the embedding, are drawn as well.
Under layout A a job trains two steps, saves, and goes on for two more; under B it goes on from the
checkpoint. The figures are the largest relative difference of a loss, or of a gradient norm before
clipping, between the two; and how many tensors (weights, master weights, moments), loaded under B
and saved again at once, have other bits, in float32 and in bfloat16 with master weights. A
checkpoint that transformers does not open with every key counts there, too.

    python benchmarks/moe_train_layout_pairs.py                    # 40 pairs
    python benchmarks/moe_train_layout_pairs.py --pairs 3 --seed 7
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_train_layout_checkpoints import opens
from moe_train_layouts import FAMILIES, write_job

from moe_train.checkpoint import TrainerState
from moe_train.config import Config, dump_toml, load_config
from moe_train.errors import MoeTrainError
from moe_train.jobs.job import check_model
from moe_train.jobs.layout_choice import JobLayout
from moe_train.jobs.layout_rank import end_groups
from moe_train.jobs.verify_layouts import checked_job
from moe_train.launch import run_local
from moe_train.model import DecoderConfig
from moe_train.parallel import start
from moe_train.rank import RankContext
from moe_train.training import TrainingLoop, build_training
from unified_ckpt import diff_checkpoints

PAIRS, SEED, MAX_RANKS = 40, 21, 4
SAVED_STEP, STEPS = 2, 4
LIMIT = 1e-6
TIES = ("mixtral", "qwen3_moe")  # families that are drawn with tied embeddings as well
LOW = {"train.dtype": "bfloat16", "train.master_weights": True}
SIZES = (1, 2, 4)
DRAWN: Mapping[str, Sequence[Any]] = {
    "parallel.pp": SIZES,
    "parallel.dp": SIZES,
    "parallel.ep": SIZES,
    "parallel.cp": SIZES,
    "parallel.tp": SIZES,
    "parallel.etp": SIZES,
    "parallel.cp_attention": ("all_to_all", "ring"),
    "parallel.sharding": (0, 1, 2, 3),
    "parallel.schedule": ("1f1b", "zb_1p", "interleaved_1f1b", "zbv"),
    "parallel.overlap_grad_reduce": (False, True),
    "train.recompute": (None, "layers", "selective"),
    "train.gradient_accumulation_steps": (2,),
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """A job in one layout; `low`: in bfloat16 with master weights."""

    layout: JobLayout
    toml: Path
    run: Path
    low: bool

    @property
    def checkpoint(self) -> Path:
        return self.run / f"checkpoint-{SAVED_STEP}"

    @property
    def figures(self) -> Path:
        return self.run.with_suffix(".json")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The layout that saves, and the one that goes on."""

    name: str
    saves: Side
    goes_on: Side


def drawn_layout(rng: random.Random, config: Config, model: DecoderConfig) -> JobLayout:
    """A layout in which ranks share something, and that the trainer takes."""
    while True:
        keys = {name: rng.choice(values) for name, values in DRAWN.items()}
        layout = JobLayout(keys=tuple(keys.items()))
        of_stage = keys["parallel.dp"] * keys["parallel.ep"]
        sizes = (keys[f"parallel.{axis}"] for axis in ("cp", "tp", "etp"))
        shares = max(sizes) > 1 or keys["parallel.sharding"] > 0
        if of_stage == 1 or layout.world_size > MAX_RANKS or not shares:
            continue
        try:
            check_model(layout.applied(config), model)
        except MoeTrainError:
            continue
        return layout


def drawn_pairs(
    folder: Path, count: int, rng: random.Random, families: Sequence[str] = tuple(FAMILIES)
) -> list[Pair]:
    """So many in float32, and the same in bfloat16 with master weights."""
    jobs: dict[str, tuple[Config, DecoderConfig]] = {}
    pairs: list[Pair] = []
    for number in range(count):
        family = rng.choice(families)
        name = family + ("-tied" if family in TIES and rng.random() < 0.5 else "")
        if name not in jobs:
            jobs[name] = _job(folder / name, family, tied=name != family)
        config, model = jobs[name]
        first = drawn_layout(rng, config, model)
        second = drawn_layout(rng, config, model)
        while second.values == first.values:
            second = drawn_layout(rng, config, model)
        for low in (False, True):
            place = f"{number}{'-low' * low}"
            sides = [
                _side(folder / f"{place}-{which}", layout, config, low=low)
                for which, layout in (("a", first), ("b", second))
            ]
            pairs.append(Pair(name=name, saves=sides[0], goes_on=sides[1]))
    return pairs


def _job(folder: Path, family: str, *, tied: bool) -> tuple[Config, DecoderConfig]:
    folder.mkdir()
    toml = write_job(folder, family)
    sizes = json.loads((folder / "config.json").read_bytes())
    # A vocabulary that does not divide by the ranks.
    sizes |= {"tie_word_embeddings": tied, "vocab_size": 323}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    cache = str(folder.parent / "cache")
    keys = {"train.max_steps": STEPS, "train.threads_per_rank": 1, "data.cache_dir": cache}
    return checked_job(load_config(toml).with_keys(keys), STEPS)


def _side(place: Path, layout: JobLayout, config: Config, *, low: bool) -> Side:
    keys = {"train.output_dir": str(place)} | (LOW if low else {})
    toml = place.with_suffix(".toml")
    toml.write_text(dump_toml(layout.applied(config).with_keys(keys)), encoding="utf-8")
    return Side(layout=layout, toml=toml, run=place, low=low)


def on_rank(jobs: Sequence[Sequence[str]]) -> None:
    """Run jobs of as many ranks, each from its beginning or from a checkpoint. Collective.

    Args:
        jobs: of each the config, the checkpoint ("" for none), and where its figures go.
    """
    torch.set_num_threads(1)
    for toml, source, place in jobs:
        config = load_config(Path(toml))
        parallel = start(config)
        found = _steps(config, source, build_training(config, parallel))
        dist.barrier()
        if parallel.rank == 0:
            Path(place).write_text(json.dumps(found), encoding="utf-8")
        end_groups(parallel)


def _steps(config: Config, source: str, training: Any) -> list[float]:
    """Save the state of the middle, made or loaded; the figures of the steps that follow."""
    checkpointer = training.checkpointer
    state = checkpointer.load(Path(source)) if source else None
    loop = TrainingLoop.begin(config, training, None, state)
    if state is None:
        for _ in loop.first_steps(SAVED_STEP, RankContext()):
            pass
        state = TrainerState(
            step=SAVED_STEP,
            consumed_samples=loop.position.consumed_samples,
            data_fingerprint=training.corpus.facts.fingerprint,
            sequence_length=config.data.sequence_length,
            seed=config.train.seed,
            schedule=loop.schedule,
        )
    checkpointer.save(state)
    found: list[float] = []
    if config.train.dtype == "float32":
        for result in loop.first_steps(STEPS - SAVED_STEP, RankContext()):
            found += [result.loss, result.grad_norm]
    checkpointer.close()
    return found


def run(argv: list[str], _: RankContext) -> None:
    """On each rank of a launch: the jobs of a file."""
    on_rank(json.loads(Path(argv[0]).read_bytes()))
    dist.barrier()
    dist.destroy_process_group()


def launched(size: int, jobs: Sequence[Sequence[str]]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as listed:
        json.dump(jobs, listed)
        listed.flush()
        if run_local(size, Path(__file__).stem, [listed.name]) is not None:
            raise SystemExit("stopped")


def compared(
    pairs: Sequence[Pair], on_ranks: Callable[[int, Sequence[Sequence[str]]], None]
) -> tuple[float, int]:
    """Run all pairs: how far figures are apart at most, and how much is not as it was.

    Args:
        on_ranks: runs `on_rank(jobs)` on so many ranks.
    """
    firsts = [(pair.saves, "") for pair in pairs]
    seconds = [(pair.goes_on, str(pair.saves.checkpoint)) for pair in pairs]
    for sides in (firsts, seconds):
        for size in sorted({side.layout.world_size for side, _ in sides}):
            chosen = [
                (str(side.toml), source, str(side.figures))
                for side, source in sides
                if side.layout.world_size == size
            ]
            on_ranks(size, chosen)
    apart, wrong = 0.0, 0
    for pair in pairs:
        told = f"{pair.name}: {pair.saves.layout} -> {pair.goes_on.layout}"
        here, there = (json.loads(side.figures.read_bytes()) for side in (pair.goes_on, pair.saves))
        each = max((abs(a / b - 1) for a, b in zip(here, there, strict=True)), default=0.0)
        differ = differences(pair.saves.checkpoint, pair.goes_on.checkpoint)
        opened = pair.goes_on.low or opens(pair.goes_on.layout, pair.goes_on.checkpoint)
        print(f"{told}{', low' * pair.goes_on.low}: {each:.1e} apart, {len(differ)} differ")
        sys.stdout.flush()
        apart, wrong = max(apart, each), wrong + len(differ) + (not opened)
    return apart, wrong


def differences(first: Path, second: Path) -> list[str]:
    """Tensors of two checkpoints that are not in both with the same bits."""
    apart = {each.name for each in diff_checkpoints(first, second)}
    files = {file.name for folder in (first, second) for file in folder.iterdir()}
    return sorted(apart - files)  # files that hold no tensors say which job it was


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args(argv)
    # Ranks of a launch import this file by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with tempfile.TemporaryDirectory(prefix="moe-train-pairs-") as folder:
        pairs = drawn_pairs(Path(folder), arguments.pairs, random.Random(arguments.seed))
        apart, wrong = compared(pairs, launched)
    for figure, value, unit in (
        ("moe_train_pairs_apart", apart, "x"),
        ("moe_train_pairs_wrong", wrong, "tensors"),
    ):
        told = {"figure": figure, "value": value, "unit": unit, "n": arguments.pairs}
        print(json.dumps({**told, "low": value, "high": value}))
    if apart > LIMIT or wrong:
        sys.exit("a pair goes on unlike, or has other bits")


if __name__ == "__main__":
    main()
