"""Keys that change a job's numbers: do layouts give those of one rank under the same key?

The rest of the job runs in float32 (`verify_layouts`). A key that keeps float32 everywhere, such as
a limit of experts, has the same limit as a layout has; one that rounds to few bits has its own,
since sums in another order then round to another number now and then.

    for report in verify_keys(config, max_ranks=4, steps=20, limit=1e-6):
        print(report.text); report.holds
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_train.config import Config
from moe_train.errors import MoeTrainError, TrainValueError
from moe_train.jobs.job import check_model
from moe_train.jobs.layout_choice import JobLayout, choose_layouts
from moe_train.jobs.verify_layouts import LayoutRun, checked_job, run_layouts
from moe_train.model import DecoderConfig

logger = logging.getLogger(__name__)

_LAYOUTS = 3  # of each key, one rank among them
_BFLOAT16 = {"train.dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCheck:
    """Keys that change the numbers together.

    `limits`: relative differences of losses and of gradient norms that are still the same; None:
    those of a layout. `cuda`: needs a device.
    """

    keys: Mapping[str, Any]
    limits: tuple[float, float] | None = None
    cuda: bool = False

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.keys.items())

    def applied(self, config: Config) -> Config:
        """The job under these keys.

        Raises:
            ValueError: they contradict the job's others.
        """
        return config.with_keys(self.keys)


# bfloat16 keeps 8 bits: a loss is a mean over tokens, of which few are rounded the other way; a
# norm is that of sums of few tokens, some of which go to other experts.
_LOW = (5e-3, 1e-1)
# Moved biases bring experts together: of some thousand choices one is nearer to a tie than float32
# rounds, and goes to another expert in another layout. With the choices of one rank replayed
# (`moe.replay_routing`) the numbers are within the limit of a layout.
_TIES = (1e-4, 1e-3)
KEY_CHECKS = (
    KeyCheck(keys={"moe.capacity_factor": 1.0}),
    KeyCheck(keys={"moe.capacity_factor": 1.0, "moe.token_drop_policy": "position"}),
    KeyCheck(keys={"moe.aux_loss_scope": "sequence", "moe.aux_loss_coef": 0.05}),
    KeyCheck(
        keys={
            "moe.aux_loss_scope": "global_batch",
            "moe.aux_loss_coef": 0.05,
            "parallel.schedule": "forward_then_backward",
        }
    ),
    KeyCheck(keys={"moe.z_loss_coef": 0.01}),
    KeyCheck(keys={"moe.update_expert_bias": True}, limits=_TIES),
    KeyCheck(keys={"moe.dispatch_payload": "float8_e4m3"}, limits=_LOW),
    KeyCheck(
        keys={"moe.dispatch_payload": "int8", "moe.dispatch_quantize_backward": True}, limits=_LOW
    ),
    KeyCheck(keys={"optimizer.name": "muon"}, limits=_LOW),
    KeyCheck(keys=_BFLOAT16, limits=_LOW),
    KeyCheck(keys=_BFLOAT16 | {"train.master_weights": True}, limits=_LOW),
    KeyCheck(
        keys=_BFLOAT16 | {"train.master_weights": True, "train.grad_reduce_dtype": "bfloat16"},
        limits=_LOW,
    ),
    KeyCheck(keys=_BFLOAT16 | {"train.stochastic_rounding": True}, limits=_LOW),
    KeyCheck(keys=_BFLOAT16 | {"model.experts_fp8": True}, cuda=True, limits=_LOW),
    KeyCheck(keys={"train.offload_optimizer": True}),
    KeyCheck(
        keys=_BFLOAT16 | {"train.master_weights": True, "train.offload_optimizer": True},
        limits=_LOW,
    ),
    KeyCheck(keys={"train.offload_activations": True}, cuda=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReport:
    """What the runs under some keys gave, the first on one rank; or why there are none."""

    check: KeyCheck
    runs: tuple[LayoutRun, ...] = ()
    not_run: str = ""
    limit: float

    @property
    def limits(self) -> tuple[float, float]:
        """Of losses and of norms."""
        return (self.limit, self.limit) if self.check.limits is None else self.check.limits

    @property
    def apart(self) -> tuple[float, float]:
        """The largest differences of losses and of norms under any layout; 0 of no run."""
        found = [run.apart(self.runs[0]) for run in self.runs]
        return max((a for a, _ in found), default=0.0), max((b for _, b in found), default=0.0)

    @property
    def holds(self) -> bool:
        """Whether no difference is above its limit; of keys that do not run, too."""
        return all(a <= limit for a, limit in zip(self.apart, self.limits, strict=True))

    @property
    def text(self) -> str:
        """A line for people."""
        if self.not_run:
            return f"{self.check}: not run, {self.not_run}"
        (loss, norm), (loss_limit, norm_limit) = self.apart, self.limits
        line = f"{self.check}: {len(self.runs)} layouts, losses apart {loss:.1e} "
        line += f"(limit {loss_limit:g}), norms {norm:.1e} (limit {norm_limit:g})"
        return line if self.holds else f"{line}  ABOVE"


def verify_keys(
    config: Config,
    *,
    max_ranks: int,
    steps: int,
    limit: float,
    checks: Sequence[KeyCheck] = KEY_CHECKS,
) -> list[KeyReport]:
    """Run the first steps of a job under each key, on one rank and in unlike layouts.

    Args:
        config: the job; of its keys those of a check are replaced.
        max_ranks: processes of the largest layout.
        steps: of each run.
        limit: relative difference that is still the same where float32 is kept.
        checks: which keys.

    Raises:
        ValueError: the job does not fit.
        MoeTrainError: a rank failed, or the runs were stopped.
    """
    config, model = checked_job(config, steps)
    reports: list[KeyReport] = []
    jobs: list[tuple[JobLayout, Config]] = []
    places: list[tuple[KeyCheck, int]] = []
    for check in checks:
        try:
            found = _jobs(check, config, model, max_ranks)
        except MoeTrainError as error:
            reports.append(KeyReport(check=check, not_run=str(error), limit=limit))
            continue
        places.append((check, len(found)))
        jobs += found
    runs = iter(run_layouts(jobs, steps))
    for check, count in places:
        mine = tuple(next(runs) for _ in range(count))
        reports.append(KeyReport(check=check, runs=mine, limit=limit))
    return sorted(reports, key=lambda report: checks.index(report.check))


def _jobs(
    check: KeyCheck, config: Config, model: DecoderConfig, max_ranks: int
) -> list[tuple[JobLayout, Config]]:
    if check.cuda and not torch.cuda.is_available():
        raise TrainValueError("it needs a CUDA device")
    job = check.applied(config)
    check_model(job, model)
    layouts = choose_layouts(job, model, max_ranks=max_ranks, count=_LAYOUTS)
    if len(layouts) < 2:
        raise TrainValueError(f"the job has no second layout of at most {max_ranks} ranks with it")
    return [(layout, job) for layout in layouts]
