"""Which layouts of a job are compared with each other: as unlike as few can be; pure.

for layout in choose_layouts(config, model, max_ranks=4, count=12):
    print(layout)                    # pp=2 ep=2, 1f1b, 4 microbatches, recompute
    run(layout.applied(config))
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from moe_train.config import Config
from moe_train.errors import MoeTrainError
from moe_train.jobs.job import check_model
from moe_train.model import DecoderConfig
from moe_train.training import aux_loss_coef

_Schedule = Literal["1f1b", "forward_then_backward", "zb_1p", "zb_2p"]
_SCHEDULES: tuple[_Schedule, ...] = ("1f1b", "forward_then_backward", "zb_1p", "zb_2p")
_RECOMPUTE: tuple[Literal["layers"] | None, ...] = (None, "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """One way to run a job that keeps its mathematics; the attributes are the job's keys."""

    pp: int
    dp: int
    ep: int
    schedule: _Schedule
    gradient_accumulation_steps: int
    recompute: Literal["layers"] | None

    @property
    def world_size(self) -> int:
        """Processes that it takes."""
        return math.prod((self.pp, self.dp, self.ep))

    def __str__(self) -> str:
        axes = [f"{a}={getattr(self, a)}" for a in ("pp", "dp", "ep") if getattr(self, a) > 1]
        count = self.gradient_accumulation_steps
        microbatches = f"{count} microbatch{'es' * (count > 1)}"
        parts = [" ".join(axes) or "one rank", self.schedule, microbatches]
        return ", ".join(parts + ["recompute"] * (self.recompute is not None))

    def applied(self, config: Config) -> Config:
        """The job under this layout alone, without states on nodes.

        Raises:
            ValueError: the batch does not divide.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tables: dict[str, Any] = {}
        for name in ("parallel", "train"):
            table = getattr(config, name)
            own = {key: value for key, value in values.items() if hasattr(table, key)}
            own |= {"relayout": ()} if name == "parallel" else {}
            tables[name] = dataclasses.replace(table, **own)
        checkpoint = dataclasses.replace(config.checkpoint, node_folder=None)
        return dataclasses.replace(config, checkpoint=checkpoint, **tables)


def choose_layouts(
    config: Config, model: DecoderConfig, *, max_ranks: int, count: int
) -> list[JobLayout]:
    """Up to `count` layouts of at most `max_ranks`; one rank alone comes first.

    Each next one brings the most pairs of values that none before had, so that few layouts have
    every pair. The number of microbatches changes only where the job means the same with another.
    """
    left = [
        layout for layout in _all_layouts(config, model, max_ranks) if _fits(layout, config, model)
    ]
    chosen: list[JobLayout] = []
    seen: set[tuple[Any, ...]] = set()
    while left and len(chosen) < count:
        alone = (layout for layout in left if layout.world_size == 1)
        best = max(left, key=lambda layout: len(_pairs(layout) - seen))
        best = best if chosen else next(alone, best)
        left.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return chosen


def _all_layouts(config: Config, model: DecoderConfig, max_ranks: int) -> Iterator[JobLayout]:
    train = config.train
    counts = _microbatch_counts(config, model)
    sizes = [s for s in product(range(1, max_ranks + 1), repeat=3) if math.prod(s) <= max_ranks]
    schedules = sorted(_SCHEDULES, key=lambda name: name != config.parallel.schedule)
    recompute = sorted(_RECOMPUTE, key=lambda value: value != train.recompute)
    for (pp, dp, ep), count, how, again in product(sizes, counts, schedules, recompute):
        yield JobLayout(
            pp=pp,
            dp=dp,
            ep=ep,
            schedule=how,
            gradient_accumulation_steps=count,
            recompute=again,
        )


def _microbatch_counts(config: Config, model: DecoderConfig) -> list[int]:
    own, batch = config.train.gradient_accumulation_steps, config.train.global_batch_size
    moe = config.moe
    by_microbatch = aux_loss_coef(config, model) and moe.aux_loss_scope == "microbatch"
    if by_microbatch or moe.z_loss_coef or moe.capacity_factor is not None:
        return [own]
    return [own, *(n for n in (own * 2, own * 4, own // 2) if n and batch % n == 0)]


def _fits(layout: JobLayout, config: Config, model: DecoderConfig) -> bool:
    try:
        check_model(layout.applied(config), model)
    except MoeTrainError:
        return False
    return True


def _pairs(layout: JobLayout) -> set[tuple[Any, ...]]:
    values: Iterable[tuple[str, Any]] = dataclasses.asdict(layout).items()
    return set(combinations(sorted(values, key=lambda item: item[0]), 2))
