"""Whether a job gives the same numbers under every layout: `moe-train verify-layouts`.

The job's own model, data and steps run in float32 under layouts that are as unlike as few can be;
losses and the gradient norms before clipping are compared with those of the first, step by step.

    report = verify_layouts(config, max_ranks=4, count=12, steps=20, limit=1e-6)
    print(report.text); report.holds
"""

import json
import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_train.config import Config, dump_toml
from moe_train.data import prepare
from moe_train.errors import MoeTrainError, TrainValueError, check_type
from moe_train.jobs.job import check_model, check_tokenizer
from moe_train.jobs.layout_choice import JobLayout, choose_layouts
from moe_train.launch import run_local
from moe_train.model import DecoderConfig
from moe_train.training import read_model_config

logger = logging.getLogger(__name__)

_COMPARED = {
    "train.dtype": "float32",
    "train.master_weights": False,
    "train.stochastic_rounding": False,
    "train.grad_reduce_dtype": None,
    "model.experts_fp8": False,
    "moe.dispatch_backend": "torch",
    "moe.dispatch_payload": "full",
    "moe.dispatch_quantize_backward": False,
}
_STOP_TEXT = "ending after this step, without a table; a second signal (Ctrl-C) ends at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """What one layout gave: loss and gradient norm (before clipping) of every step."""

    layout: JobLayout
    losses: tuple[float, ...]
    norms: tuple[float, ...]

    def apart(self, other: "LayoutRun") -> tuple[float, float]:
        """The largest relative differences of losses and of norms."""
        return _apart(self.losses, other.losses), _apart(self.norms, other.norms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """All runs, the first of which the others are compared with."""

    runs: tuple[LayoutRun, ...]
    limit: float

    @property
    def holds(self) -> bool:
        """Whether every difference is within the limit."""
        return all(max(run.apart(self.runs[0])) <= self.limit for run in self.runs)

    @property
    def text(self) -> str:
        """A table for people."""
        width = max(len(str(run.layout)) for run in self.runs)
        lines = [f"{'layout':<{width}}{'last loss':>12}{'loss apart':>12}{'norm apart':>12}"]
        for run in self.runs:
            loss, norm = run.apart(self.runs[0])
            said = "" if max(loss, norm) <= self.limit else f"  above {self.limit:g}"
            lines.append(
                f"{run.layout!s:<{width}}{run.losses[-1]:>12.6f}{loss:>12.1e}{norm:>12.1e}{said}"
            )
        verdict = "hold" if self.holds else "DO NOT hold"
        steps = len(self.runs[0].losses)
        count = f"{len(self.runs)} layouts, {steps} steps, float32"
        lines.append(f"{count}: losses and gradient norms {verdict} to {self.limit:g} (relative)")
        return "\n".join(lines)


def verify_layouts(
    config: Config, *, max_ranks: int, count: int, steps: int, limit: float
) -> LayoutReport:
    """Run the first steps of a job under several layouts, each in processes of its own.

    Args:
        config: its layout only says what is tried first; nothing is written to its folders.
        max_ranks: processes of the largest layout.
        count: layouts at most.
        steps: of each run.
        limit: relative difference that is still the same.

    Raises:
        ValueError: fewer than two layouts fit the job, or the job itself does not.
        MoeTrainError: a rank failed, or the runs were stopped.
    """
    config, model = checked_job(config, steps)
    layouts = choose_layouts(config, model, max_ranks=max_ranks, count=count)
    if len(layouts) < 2:
        raise TrainValueError(
            f"{len(layouts)} layouts of at most {max_ranks} ranks fit this job, two are needed; "
            "raise --ranks, or choose a train.global_batch_size with more divisors"
        )
    return LayoutReport(
        runs=run_layouts([(layout, config) for layout in layouts], steps), limit=limit
    )


def checked_job(config: Config, steps: int) -> tuple[Config, DecoderConfig]:
    """The job in float32 throughout, and its decoder; what needs preparing is prepared.

    What rounds to fewer bits, or needs a device of its own, is replaced, in a line each.

    Raises:
        ValueError: the job does not fit.
    """
    check_type("config", config, Config)
    for name, value in _COMPARED.items():
        table, _, key = name.partition(".")
        asked = getattr(getattr(config, table), key)
        if asked != value:
            logger.info("%s=%s: compared with %s instead", name, asked, value)
    if steps > config.train.max_steps:
        logger.info("train.max_steps=%d: so many steps are compared", config.train.max_steps)
    config = config.with_keys(_COMPARED)
    model = read_model_config(config)
    check_model(config, model)
    check_tokenizer(config, model, prepare(config).tokenizer)
    return config, model


def run_layouts(jobs: Sequence[tuple[JobLayout, Config]], steps: int) -> tuple[LayoutRun, ...]:
    """Run the first steps of each job under its layout; those with as many ranks in one launch.

    Raises:
        MoeTrainError: a rank failed, or the runs were stopped.
    """
    sizes = sorted({layout.world_size for layout, _ in jobs})
    with tempfile.TemporaryDirectory(prefix="moe-train-layouts-") as name:
        folder = Path(name)
        for number, (layout, config) in enumerate(jobs):
            text = dump_toml(layout.applied(config))
            (folder / f"{number}.toml").write_text(text, encoding="utf-8")
        for size in sizes:
            _launch(folder, size, jobs, steps)
        found = [json.loads((folder / f"{n}.json").read_bytes()) for n in range(len(jobs))]
    return tuple(
        LayoutRun(layout=layout, losses=tuple(values["loss"]), norms=tuple(values["norm"]))
        for (layout, _), values in zip(jobs, found, strict=True)
    )


def _launch(folder: Path, size: int, jobs: Sequence[tuple[JobLayout, Config]], steps: int) -> None:
    numbers = [n for n, (layout, _) in enumerate(jobs) if layout.world_size == size]
    logger.info("%d of %d layouts have %d ranks", len(numbers), len(jobs), size)
    listed = [(str(folder / f"{n}.toml"), str(folder / f"{n}.json")) for n in numbers]
    (folder / "jobs.json").write_text(json.dumps(listed), encoding="utf-8")
    argv = [str(folder / "jobs.json"), str(steps)]
    try:
        stopped = run_local(size, "moe_train.jobs.layout_rank", argv, stop_text=_STOP_TEXT)
    except MoeTrainError:
        left = [n for n in numbers if not (folder / f"{n}.json").exists()]
        logger.error("failed under the layout %s", jobs[left[0]][0] if left else "that came last")
        raise
    if stopped is not None:
        raise MoeTrainError("stopped before every layout had run")


def _apart(values: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; infinite where a value is no number."""
    pairs = zip(values, others, strict=True)
    found = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
    return max(found) if all(map(math.isfinite, found)) else math.inf
