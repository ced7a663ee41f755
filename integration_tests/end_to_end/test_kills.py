"""A job that is killed at random moments and resumed: `benchmarks/moe_train_kills.py`, shortly."""

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from moe_train.config import load_config
from moe_train.jobs import audit_samples

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "moe_train_kills.py"


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_kills_of_a_rank_of_a_save_and_of_preparing_lose_no_step_and_no_sample(
    tmp_path: Path, train: Callable[..., None], losses: Callable[[Path], dict[int, float]]
) -> None:
    kills, seed, steps = load_benchmark(), random.randrange(10**9), 30
    toml = kills.write_job(tmp_path, steps)
    train(load_config(toml))
    job = kills.Job(toml, tmp_path / "killed", random.Random(seed), steps)
    kills.run_killed(job, ["prepare", "save", "rank"], kills.LAYOUTS[:1])
    assert job.kills["prepare"] == job.kills["save"] == 1, (seed, job.kills)
    assert losses(job.output) == losses(tmp_path / "whole"), seed
    assert len(losses(job.output)) == steps
    assert audit_samples(job.output).faults == (), seed
