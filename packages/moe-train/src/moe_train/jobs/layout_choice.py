"""Which layouts of a job are compared with each other: as unlike as few can be; pure.

for layout in choose_layouts(config, model, max_ranks=4, count=12):
    print(layout)                    # pp=2 ep=2, 1f1b, 4 microbatches, train.recompute=layers
    run(layout.applied(config))

A new key that keeps the mathematics gets its values in `_VALUES`, or in `_values` where they depend
on the axes; every value then stands in some layout.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from moe_train.config import Config
from moe_train.errors import MoeTrainError
from moe_train.jobs.job import check_model
from moe_train.model import DecoderConfig
from moe_train.training import aux_loss_coef

_AXES = ("parallel.pp", "parallel.dp", "parallel.ep")
_MICROBATCHES = "train.gradient_accumulation_steps"
_SCHEDULE = "parallel.schedule"

_VALUES: dict[str, tuple[Any, ...]] = {
    _SCHEDULE: ("1f1b", "forward_then_backward", "zb_1p", "zb_2p"),
    "train.recompute": (None, "layers"),
}
"""What is tried of each key, beside the job's own value, which comes first."""

_Keys = dict[str, Any]
_Pair = frozenset[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """One way to run a job that keeps its mathematics: names of keys and their values."""

    keys: tuple[tuple[str, Any], ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """Each key's value."""
        return dict(self.keys)

    @property
    def world_size(self) -> int:
        """Processes that it takes."""
        return math.prod(self.values[axis] for axis in _AXES)

    def __str__(self) -> str:
        values = dict(self.keys)
        sizes = {axis: values.pop(axis) for axis in _AXES}
        axes = " ".join(f"{a.partition('.')[2]}={n}" for a, n in sizes.items() if n > 1)
        count = values.pop(_MICROBATCHES)
        parts = [axes or "one rank", str(values.pop(_SCHEDULE))]
        parts.append(f"{count} microbatch{'es' * (count > 1)}")
        return ", ".join(parts + [f"{name}={value}" for name, value in values.items() if value])

    def applied(self, config: Config) -> Config:
        """The job under this layout alone, without states on nodes.

        Raises:
            ValueError: the batch does not divide.
        """
        tables: dict[str, dict[str, Any]] = {"checkpoint": {"node_folder": None}}
        tables["parallel"] = {"relayout": ()}
        for name, value in self.keys:
            table, _, field = name.partition(".")
            tables.setdefault(table, {})[field] = value
        changed: dict[str, Any] = {
            name: dataclasses.replace(getattr(config, name), **values)
            for name, values in tables.items()
        }
        return dataclasses.replace(config, **changed)


def choose_layouts(
    config: Config, model: DecoderConfig, *, max_ranks: int, count: int
) -> list[JobLayout]:
    """Up to `count` layouts of at most `max_ranks`; one rank alone, as the job is, comes first.

    Each next one brings the most pairs of values that none before had, so that few layouts have
    every pair. The number of microbatches changes only where the job means the same with another.
    """
    bases = [keys for keys in _bases(config, model, max_ranks) if _fits(keys, config, model)]
    chosen: list[JobLayout] = []
    seen: set[_Pair] = set()
    while len(chosen) < count:
        layouts = (_extended(keys, config, seen, new=bool(chosen)) for keys in bases)
        left = sorted(layouts, key=lambda keys: -len(_pairs(keys) - seen))
        alone = [keys for keys in left if _num_ranks(keys) == 1]
        best = next(
            (
                keys
                for keys in (left if chosen else alone + left)
                if _layout(keys) not in chosen and _fits(keys, config, model)
            ),
            None,
        )
        if best is None:
            break
        chosen.append(_layout(best))
        seen |= _pairs(best)
    return chosen


def _bases(config: Config, model: DecoderConfig, max_ranks: int) -> Iterator[_Keys]:
    """The axes, microbatches and schedules; all other keys as the job has them."""
    counts = _microbatch_counts(config, model)
    sizes = [s for s in product(range(1, max_ranks + 1), repeat=3) if math.prod(s) <= max_ranks]
    for axes, count, how in product(sizes, counts, _own_first(_SCHEDULE, config)):
        keys: _Keys = dict(zip(_AXES, axes, strict=True)) | {_SCHEDULE: how, _MICROBATCHES: count}
        yield keys | {name: _own(name, config) for name in _VALUES if name != _SCHEDULE}


def _extended(base: _Keys, config: Config, seen: set[_Pair], *, new: bool) -> _Keys:
    """The base with the values of the other keys that bring the most pairs; without `new` as is."""
    keys = dict(base)
    for name in _VALUES if new else ():
        if name != _SCHEDULE:
            others = [item for item in keys.items() if item[0] != name]
            keys[name] = max(
                _own_first(name, config),
                key=lambda value, name=name, others=others: sum(  # type: ignore[misc]
                    frozenset(((name, value), other)) not in seen for other in others
                ),
            )
    return keys


def _own(name: str, config: Config) -> Any:
    table, _, field = name.partition(".")
    return getattr(getattr(config, table), field)


def _own_first(name: str, config: Config) -> list[Any]:
    own = _own(name, config)
    return [own, *(value for value in _VALUES[name] if value != own)]


def _layout(keys: _Keys) -> JobLayout:
    return JobLayout(keys=tuple(keys.items()))


def _num_ranks(keys: _Keys) -> int:
    return math.prod(keys[axis] for axis in _AXES)


def _microbatch_counts(config: Config, model: DecoderConfig) -> list[int]:
    own, batch = config.train.gradient_accumulation_steps, config.train.global_batch_size
    moe = config.moe
    by_microbatch = aux_loss_coef(config, model) and moe.aux_loss_scope == "microbatch"
    if by_microbatch or moe.z_loss_coef or moe.capacity_factor is not None:
        return [own]
    return [own, *(n for n in (own * 2, own * 4, own // 2) if n and batch % n == 0)]


def _fits(keys: _Keys, config: Config, model: DecoderConfig) -> bool:
    try:
        check_model(_layout(keys).applied(config), model)
    except MoeTrainError:
        return False
    return True


def _pairs(keys: _Keys) -> set[_Pair]:
    return set(map(frozenset, combinations(keys.items(), 2)))
