"""Which layouts of a job are compared with each other: as unlike as few can be; pure.

for layout in choose_layouts(config, model, max_ranks=4, count=12):
    print(layout)                    # pp=2 ep=2, 1f1b, 4 microbatches, recompute=layers
    run(layout.applied(config))

A new key that keeps the mathematics gets its values in `_VALUES`, or in `_values` where they depend
on the axes; every value then stands in some layout.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, get_args, get_type_hints

from moe_train.config import Config, ParallelConfig
from moe_train.errors import MoeTrainError
from moe_train.jobs.job import check_model
from moe_train.model import DecoderConfig
from moe_train.training.experts import aux_loss_coef

_AXES = ("parallel.pp", "parallel.dp", "parallel.ep")
_SIZES = (*_AXES, "parallel.cp", "parallel.tp", "parallel.etp")
_RING = "parallel.cp_attention"
_MICROBATCHES = "train.gradient_accumulation_steps"
_SCHEDULE, _SPLIT = "parallel.schedule", "parallel.layer_split"

_VALUES: dict[str, tuple[Any, ...]] = {
    _SCHEDULE: get_args(get_type_hints(ParallelConfig)["schedule"]),
    _SPLIT: ("equal", "cost"),
    _RING: ("all_to_all", "ring"),
    "parallel.overlap_grad_reduce": (False, True),
    "parallel.sharding": (0, 1, 2, 3),
    "train.recompute": (None, "layers", "selective", "outputs"),
    "train.gradient_accumulation_fusion": (False, True),
    "train.loss_chunk_tokens": (None, 24),
    "moe.dispatch_route": ("flat", "dedup", "hierarchical"),
    "moe.dispatch_chunks": (1, 2),
    "moe.shared_expert_overlap": (False, True),
    "model.experts_implementation": ("auto", "loop", "grouped_mm", "fused"),
}
"""What is tried of each key, the default first; a job's own value is tried before all others."""

_CHOSEN_LAST = tuple(name for name in _VALUES if name not in (_SCHEDULE, _SPLIT, _RING))

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
        sizes = {name: values.pop(name, 1) for name in _SIZES}
        axes = " ".join(f"{name.partition('.')[2]}={n}" for name, n in sizes.items() if n > 1)
        count = values.pop(_MICROBATCHES)
        parts = [axes or "one rank", str(values.pop(_SCHEDULE))]
        parts.append(f"{count} microbatch{'es' * (count > 1)}")
        return ", ".join(
            parts + [f"{k.partition('.')[2]}={v}" for k, v in values.items() if v != _VALUES[k][0]]
        )

    @property
    def _ranks_per_node(self) -> int | None:
        """Nodes of the hierarchical route: at least two, so that rows are handed on."""
        values, ep = self.values, self.values["parallel.ep"]
        if values.get("moe.dispatch_route") != "hierarchical":
            return None
        return max((n for n in range(1, ep) if ep % n == 0), default=1)

    def applied(self, config: Config) -> Config:
        """The job under this layout alone, without states on nodes and records of choices; with its
        uneven parts of the experts where as many ranks share them out.

        Raises:
            ValueError: the batch does not divide.
        """
        keys: _Keys = {
            "checkpoint.node_folder": None,
            "moe.record_routing": None,
            "parallel.relayout": (),
            "moe.dispatch_ranks_per_node": self._ranks_per_node,
        }
        if self.values[_SCHEDULE] != config.parallel.schedule:  # what only the job's own keeps
            keys |= {"parallel.stages_per_rank": None, "parallel.memory_limit_mib": None}
        if self.values["parallel.ep"] != config.parallel.ep:
            keys |= {"parallel.expert_parts": ()}
        return config.with_keys(keys | dict(self.keys))


def choose_layouts(
    config: Config, model: DecoderConfig, *, max_ranks: int, count: int
) -> list[JobLayout]:
    """Up to `count` layouts of at most `max_ranks`; one rank alone, as the job is, comes first.

    Each next one brings the most values that none before had, and of those that bring as many the
    most pairs of them, so that few layouts have every value and many pairs. The number of
    microbatches changes only where the job means the same with another.
    """
    bases = []
    for keys in _bases(config, model, max_ranks):
        uneven = keys | {_SPLIT: "cost"}
        bases += [fit for fit in (keys, uneven) if _fits(fit, config, model)][:1]
    if not bases:
        return []
    tried = _Tried.of(bases[0], config, model)
    chosen: list[JobLayout] = []
    seen: set[_Pair] = set()
    while len(chosen) < count:
        layouts = (tried.extended(keys, seen) if chosen else keys for keys in bases)
        left = sorted(layouts, key=lambda keys: _brings(keys, seen), reverse=True)
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
    """The axes, microbatches and, of pipelines, schedules; all other keys as the job has them."""
    counts = _microbatch_counts(config, model)
    sizes = [s for s in product(range(1, max_ranks + 1), repeat=3) if math.prod(s) <= max_ranks]
    shared = [
        (*each, cp, tp, etp, how)
        for each in sizes
        for cp, tp in product(range(1, max_ranks + 1), repeat=2)
        for how in (_own_first(_RING, config) if cp > 1 else (config.parallel.cp_attention,))
        if each[1] * each[2] % (cp * tp) == 0
        for etp in range(1, each[1] + 1)
        if each[1] % etp == 0
    ]
    for axes, count, how in product(shared, counts, _own_first(_SCHEDULE, config)):
        if axes[0] == 1 and how != config.parallel.schedule:
            continue  # a rank alone has nobody to wait for
        keys: _Keys = dict(zip((*_SIZES, _RING), axes, strict=True)) | {
            _SCHEDULE: how,
            _MICROBATCHES: count,
        }
        keys[_SPLIT] = config.parallel.layer_split
        yield keys | {name: _own_first(name, config)[0] for name in _CHOSEN_LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What is tried of the keys that are chosen last, and which values contradict each other."""

    values: Mapping[str, list[Any]]
    contradictions: frozenset[_Pair]

    @classmethod
    def of(cls, base: _Keys, config: Config, model: DecoderConfig) -> "_Tried":
        """The values that the job takes at all, found by asking it."""
        values: dict[str, list[Any]] = {}
        for name in _CHOSEN_LAST:
            own, *others = _own_first(name, config)
            values[name] = [own, *(v for v in others if _fits(base | {name: v}, config, model))]
        items = [(name, value) for name, found in values.items() for value in found]
        pairs = ((one, other) for one, other in combinations(items, 2) if one[0] != other[0])
        apart = (pair for pair in pairs if not _fits(base | dict(pair), config, model))
        return cls(values=values, contradictions=frozenset(map(frozenset, apart)))

    def extended(self, base: _Keys, seen: set[_Pair]) -> _Keys:
        """The base with the values of the other keys that bring the most pairs."""
        keys = {name: value for name, value in base.items() if name not in self.values}
        for name, values in self.values.items():
            allowed = {
                value: {frozenset(((name, value), other)) for other in keys.items()}
                for value in values
            }
            keys[name] = max(
                (v for v, pairs in allowed.items() if not pairs & self.contradictions),
                key=lambda value, allowed=allowed: len(allowed[value] - seen),  # type: ignore[misc]
            )
        return keys


def _own_first(name: str, config: Config) -> list[Any]:
    table, _, field = name.partition(".")
    own = getattr(getattr(config, table), field)
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


def _brings(keys: _Keys, seen: set[_Pair]) -> tuple[int, int]:
    """How many values, and pairs of them, are in no layout so far."""
    values = {item for pair in seen for item in pair}
    return len(set(keys.items()) - values), len(_pairs(keys) - seen)


def _pairs(keys: _Keys) -> set[_Pair]:
    return set(map(frozenset, combinations(keys.items(), 2)))
