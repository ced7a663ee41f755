"""The table that says how a job is spread over ranks, and when that changes.

ParallelConfig(pp=2, ep=2)
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import Table, key
from moe_train.config.pipelines import stages_needed, stages_of_rank
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Table):
    """How the job is spread over processes; their number is pp * dp * ep."""

    table: ClassVar[str] = "parallel"
    pp: int = key(
        "ranks of the pipeline, each with one stage or more",
        unit="ranks",
        default=1,
        minimum=1,
        on_resume="free",
    )
    dp: int = key(
        "data-parallel replicas of the experts",
        unit="ranks",
        default=1,
        minimum=1,
        on_resume="free",
    )
    ep: int = key(
        "ranks that share the experts of a layer, each with tokens of its own",
        unit="ranks",
        default=1,
        minimum=1,
        on_resume="free",
    )
    schedule: Literal[
        "1f1b",
        "forward_then_backward",
        "zb_1p",
        "zb_2p",
        "interleaved_1f1b",
        "interleaved_forward_then_backward",
        "interleaved_zero_bubble",
        "looped_bfs",
        "zbv",
        "v_half",
        "v_min",
        "dualpipe_v",
        "auto",
    ] = key(
        "order in which a rank runs its microbatches; zb_1p and zb_2p fill the bubble with weight "
        "gradients, in the memory of 1f1b and in up to twice that; looped_bfs and interleaved_* "
        "have several stages on each rank, zbv, v_half, v_min and dualpipe_v two in a V; auto: "
        "planned when the job starts, from what the stages are measured to take",
        default="1f1b",
        on_resume="free",
    )
    stages_per_rank: int | None = key(
        "pipeline stages on each rank; without it as few as the schedule needs, 1 or 2",
        unit="stages",
        default=None,
        minimum=1,
        on_resume="free",
    )
    layer_split: Literal["equal", "cost"] = key(
        "how layers are divided among stages: equal numbers, or so that the dearest stage, with "
        "head and multi-token prediction counted, has as little work as can be",
        default="equal",
        on_resume="free",
    )
    memory_limit_mib: float | None = key(
        "the most that activations may take on a rank; what auto plans within",
        unit="MiB",
        default=None,
        above=0,
        on_resume="free",
    )
    timeout_s: float = key(
        "longest wait of a rank for another one before the job fails",
        unit="seconds",
        default=120.0,
        above=0,
        on_resume="free",
    )
    relayout: tuple[str, ...] = key(
        'layouts of later steps, as in "100: pp=2 ep=4": after so many steps the ranks, as many as '
        "before, move weights, moments and master weights in memory; axes that are left out are 1",
        default=(),
        on_resume="free",
    )

    def _check(self) -> None:
        least, most = stages_needed(self.schedule)
        if self.per_rank < least or (most is not None and self.per_rank > most):
            needed = (
                f"{least} stages or more" if most is None else f"{least} stage{'s'[: least - 1]}"
            )
            raise TrainValueError(
                f"parallel.stages_per_rank={self.per_rank} does not fit "
                f'parallel.schedule="{self.schedule}", which has {needed} on a rank; leave the key '
                "out, or choose another schedule"
            )
        if self.memory_limit_mib is not None and self.schedule != "auto":
            raise TrainValueError(
                f"parallel.memory_limit_mib={self.memory_limit_mib:g} is only kept by "
                f'parallel.schedule="auto", got "{self.schedule}"; leave it out, or plan with auto'
            )
        last = 0
        for text in self.relayout:
            step, sizes = _parsed_relayout(text)
            if math.prod(sizes.values()) != self.world_size:
                raise TrainValueError(
                    f"parallel.relayout: {text!r} needs {math.prod(sizes.values())} ranks, but the "
                    f"job has {self.world_size}; the number of ranks stays the same"
                )
            if step <= last:
                raise TrainValueError(
                    f"parallel.relayout: {text!r} does not come after step {last}; list the "
                    "changes in the order of their steps, the first one after step 1 or later"
                )
            last = step

    @property
    def world_size(self) -> int:
        """Number of processes: pp * dp * ep."""
        return self.pp * self.dp * self.ep

    @property
    def per_rank(self) -> int:
        """Pipeline stages on each rank."""
        least = stages_needed(self.schedule)[0]
        return least if self.stages_per_rank is None else self.stages_per_rank

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all ranks."""
        return self.pp * self.per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank of the pipeline, 0 to pp - 1."""
        return stages_of_rank(self.schedule, pp=self.pp, per_rank=self.per_rank, rank=rank)

    @property
    def axis_sizes(self) -> tuple[int, int, int]:
        """pp, dp and ep."""
        return self.pp, self.dp, self.ep

    def at_step(self, step: int) -> "ParallelConfig":
        """The layout that `relayout` asks for once `step` steps are finished."""
        sizes = [found for first, found in map(_parsed_relayout, self.relayout) if first <= step]
        if not sizes:
            return self
        last = sizes[-1]
        return dataclasses.replace(self, pp=last["pp"], dp=last["dp"], ep=last["ep"])

    def changed(self, step: int, sizes: tuple[int, int, int]) -> "ParallelConfig":
        """The same with one more change of layout, to pp, dp and ep after `step` steps.

        Raises:
            ValueError: the number of ranks would be another one.
        """
        text = "{}: pp={} dp={} ep={}".format(step, *sizes)
        others = [(_parsed_relayout(other)[0], other) for other in self.relayout]
        kept = [(first, other) for first, other in others if first != step]
        return dataclasses.replace(
            self, relayout=tuple(other for _, other in sorted([*kept, (step, text)]))
        )

    def next_change(self, step: int) -> int | None:
        """After how many steps the layout changes next, once `step` are finished."""
        later = (first for first, _ in map(_parsed_relayout, self.relayout) if first > step)
        return next(later, None)

    def check_divides(self, *, num_hidden_layers: int | None, num_experts: int | None) -> None:
        """Hold a decoder's sizes against the layout; None is not looked at.

        Raises:
            ValueError: layers or experts do not divide; with the numbers that would.
        """
        if num_hidden_layers is not None:
            self._check_layers(num_hidden_layers)
        if num_experts is not None and num_experts % self.ep:
            raise TrainValueError(
                f"parallel.ep={self.ep} ranks cannot share num_experts={num_experts} evenly; "
                f"choose ep among {_divisors(num_experts)}"
            )

    def _check_layers(self, num_layers: int) -> None:
        each = f" x {self.per_rank} on a rank" if self.per_rank > 1 else ""
        if self.layer_split == "cost" and num_layers < self.num_stages:
            raise TrainValueError(
                f"num_hidden_layers={num_layers} are fewer than parallel.pp={self.pp}{each} "
                "stages; choose fewer"
            )
        if self.layer_split == "equal" and num_layers % self.num_stages:
            each_rank = num_layers // self.per_rank if num_layers % self.per_rank == 0 else 0
            among = f"choose pp among {_divisors(each_rank)}" if each_rank else "have fewer of them"
            raise TrainValueError(
                f"num_hidden_layers={num_layers} is not divisible by parallel.pp={self.pp}{each} "
                f'stages; {among}, or in training set parallel.layer_split="cost"'
            )


def _parsed_relayout(text: str) -> tuple[int, dict[str, int]]:
    """Of "100: pp=2 ep=4" the step, and the size of every axis."""
    found = re.fullmatch(r"\s*(\d+)\s*:((?:[\s,]*(?:pp|dp|ep)=[1-9]\d*)+)\s*", text)
    pairs = re.findall(r"(\w+)=(\d+)", found[2]) if found else []
    if not found or len(dict(pairs)) < len(pairs):
        raise TrainValueError(
            f"parallel.relayout: {text!r} is no change of layout; write the finished steps and the "
            'sizes of axes, each once, as in "100: pp=2 ep=4"'
        )
    return int(found[1]), {"pp": 1, "dp": 1, "ep": 1} | {a: int(size) for a, size in pairs}


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
