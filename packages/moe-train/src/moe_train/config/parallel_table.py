"""The table that says how a job is spread over ranks, and when that changes.

ParallelConfig(pp=2, ep=2)
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moe_train.config.keys import Table, key
from moe_train.config.layout_changes import (
    BY_LOAD,
    LayoutChange,
    check_parts,
    parsed_parts,
)
from moe_train.config.layout_fit import (
    check_expert_width,
    check_experts,
    check_experts_shared_out,
    check_heads,
    check_layers,
    check_shared_out,
    check_sharing,
    check_vocabulary,
)
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
        "ranks that have the same experts: replicas, or with etp shares of these",
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
    cp: int = key(
        "context parallelism: ranks that share out the positions of each sample, of the dp * ep "
        "ranks of a stage, which hold different samples otherwise; for long sequences",
        unit="ranks",
        default=1,
        minimum=1,
        on_resume="free",
    )
    tp: int = key(
        "tensor parallelism: ranks that share out the heads of attention, the inner widths of "
        "dense MLPs and shared experts, the rows of embedding and head and, everywhere else, the "
        "positions of each sample (sequence parallelism), of the dp * ep ranks of a stage",
        unit="ranks",
        default=1,
        minimum=1,
        on_resume="free",
    )
    etp: int = key(
        "expert tensor parallelism: ranks that share out the inner width of each expert, each with "
        "tokens of its own, of the dp ranks that have the same experts",
        unit="ranks",
        default=1,
        minimum=1,
        on_resume="free",
    )
    cp_attention: Literal["all_to_all", "ring"] = key(
        "how attention sees the positions of the cp ranks: each rank all of them with some of the "
        "heads, or keys and values go around among ranks of any number of heads",
        default="all_to_all",
        on_resume="free",
    )
    sharding: int = key(
        "what is shared out among ranks that hold the same parameters: nothing (0), moments and "
        "master weights (1), of which each rank keeps and updates those of its own rows, their "
        "gradients as well (2), summed after each microbatch, layer by layer, or the parameters "
        "too (3), which are whole only while a layer is computed",
        unit="level",
        default=0,
        minimum=0,
        maximum=3,
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
    overlap_grad_reduce: bool = key(
        "sum gradients over ranks while the backward of the step's last microbatch still makes "
        "others; takes a copy of the gradients and groups of ranks of its own",
        default=False,
        on_resume="free",
    )
    agreement_every: int = key(
        "where NCCL moves the data, calls that exchange no counts are compared among their ranks "
        "each so-manieth time, which names ranks that do not make the same one (1: always, 0: "
        "never); all other calls always are",
        unit="calls",
        default=64,
        minimum=0,
        on_resume="free",
    )
    timeout_s: float = key(
        "longest wait of a rank for another one before the job fails",
        unit="seconds",
        default=120.0,
        above=0,
        maximum=1e9,
        on_resume="free",
    )
    expert_parts: tuple[str, ...] = key(
        'experts of each rank along ep, as in "3,5" for every layer or "7: 3,5" for layer 7; '
        "layers without parts have equal ones",
        default=(),
        on_resume="free",
    )
    relayout: tuple[str, ...] = key(
        'layouts of later steps, as in "100: pp=2 ep=4": after so many steps the ranks, as many as '
        "before, move weights, moments and master weights in memory; sizes that are left "
        "out are 1; experts=3,5 gives the ranks along ep uneven experts, "
        "experts=load as the tokens of the steps before were spread",
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
        check_sharing("parallel.", cp=self.cp, tp=self.tp, num_token_ranks=self.dp * self.ep)
        check_experts_shared_out(self.etp, dp=self.dp)
        for parts, text in zip(
            parsed_parts(self.expert_parts).values(), self.expert_parts, strict=True
        ):
            check_parts("parallel.expert_parts", text, parts, self.ep)
        self._check_changes()

    def _check_changes(self) -> None:
        last = 0
        for text, change in zip(self.relayout, self._changes, strict=True):
            if math.prod(change.sizes.values()) != self.world_size:
                raise TrainValueError(
                    f"parallel.relayout: {text!r} needs {math.prod(change.sizes.values())} ranks, "
                    f"but the job has {self.world_size}; the number of ranks stays the same"
                )
            if change.step <= last:
                raise TrainValueError(
                    f"parallel.relayout: {text!r} does not come after step {last}; list the "
                    "changes in the order of their steps, the first one after step 1 or later"
                )
            last = change.step

    @property
    def _changes(self) -> list[LayoutChange]:
        return [LayoutChange.parsed(text) for text in self.relayout]

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

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """pp, dp, ep, cp, tp and etp: where a rank stands follows from these."""
        return *self.axis_sizes, self.cp, self.tp, self.etp

    @property
    def num_sample_ranks(self) -> int:
        """Into how many parts a microbatch's samples are shared out: dp * ep / (cp * tp)."""
        return self.dp * self.ep // (self.cp * self.tp)

    def at_step(self, step: int) -> "ParallelConfig":
        """The layout that `relayout` asks for once `step` steps are finished.

        Parts that are to follow the load (`is_by_load`) are equal ones here.
        """
        change = self._last_change(step)
        if change is None:
            return self
        parts = (",".join(map(str, change.parts)),) if change.parts else ()
        sizes: dict[str, Any] = change.sizes | {"cp": change.cp, "tp": change.tp, "etp": change.etp}
        return dataclasses.replace(self, **sizes, expert_parts=parts)

    @property
    def layouts(self) -> list["ParallelConfig"]:
        """This one and all later ones."""
        return [self, *(self.at_step(change.step) for change in self._changes)]

    def is_by_load(self, step: int) -> bool:
        """Whether experts are to lie as the load wants it once `step` steps are finished."""
        change = self._last_change(step)
        return change is not None and change.experts == BY_LOAD

    def last_change(self, step: int) -> int:
        """After how many steps the layout has changed last, once `step` are finished; or 0."""
        change = self._last_change(step)
        return 0 if change is None else change.step

    def _last_change(self, step: int) -> LayoutChange | None:
        before = [change for change in self._changes if change.step <= step]
        return before[-1] if before else None

    def changed(
        self, step: int, sizes: tuple[int, int, int, int, int, int], experts: str = ""
    ) -> "ParallelConfig":
        """The same with one more change of layout, to these `sizes` after `step` steps.

        Args:
            experts: their parts, as in `relayout`: "3,5" or "load"; "" for equal ones.

        Raises:
            ValueError: the number of ranks would be another one, or the parts do not fit.
        """
        text = "{}: pp={} dp={} ep={}".format(step, *sizes)
        shared = zip(("cp", "tp", "etp"), sizes[3:], strict=True)
        text += "".join(f" {name}={size}" for name, size in shared if size > 1)
        text += f" experts={experts}" if experts else ""
        kept = [
            (change.step, other)
            for change, other in zip(self._changes, self.relayout, strict=True)
            if change.step != step
        ]
        return dataclasses.replace(
            self, relayout=tuple(other for _, other in sorted([*kept, (step, text)]))
        )

    def next_change(self, step: int) -> int | None:
        """After how many steps the layout changes next, once `step` are finished."""
        return next((change.step for change in self._changes if change.step > step), None)

    def parts_by_layer(self, layers: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """The experts of each rank along ep, of those layers that do not have equal parts."""
        parts = parsed_parts(self.expert_parts)
        wanted = {layer: parts.get(layer, parts.get(None)) for layer in layers}
        return {layer: found for layer, found in wanted.items() if found is not None}

    @property
    def layers_with_parts(self) -> set[int]:
        """The layers that `expert_parts` names."""
        return {layer for layer in parsed_parts(self.expert_parts) if layer is not None}

    def check_divides(
        self,
        *,
        num_hidden_layers: int | None,
        num_experts: int | None,
        num_heads: int | None = None,
    ) -> None:
        """Hold a decoder's sizes against the layout; None is not looked at.

        Raises:
            ValueError: layers or experts do not divide, or heads do not suffice; with the numbers
                that would.
        """
        if num_hidden_layers is not None:
            check_layers(
                num_hidden_layers,
                pp=self.pp,
                per_rank=self.per_rank,
                is_equal=self.layer_split == "equal",
            )
        if num_experts is not None:
            parts = parsed_parts(self.expert_parts)
            check_experts(num_experts, ep=self.ep, texts=self.expert_parts, parts=parts)
        if num_heads is not None:
            check_heads(
                num_heads,
                cp=self.cp,
                tp=self.tp,
                ranks=self.dp * self.ep,
                all_to_all=self.cp_attention == "all_to_all",
            )

    def check_tensor(
        self, *, widths: Mapping[str, int], vocab_size: int, norms_all_heads: bool
    ) -> None:
        """Hold what tensor-parallel ranks share out, besides heads, against the layout.

        Args:
            widths: of dense MLPs and shared experts, by name.
            vocab_size: rows of embedding and head, which need not divide.
            norms_all_heads: queries, or keys, of all heads are normed together.

        Raises:
            ValueError: the width does not divide, with those that do; or such norms.
        """
        ranks = self.dp * self.ep // self.cp
        check_vocabulary(self.tp, vocab_size, num_token_ranks=ranks)
        for name, width in widths.items():
            check_shared_out(self.tp, name, width, num_token_ranks=ranks)
        if self.tp > 1 and norms_all_heads:
            raise TrainValueError(
                f"parallel.tp={self.tp} cuts attention by heads, but this family norms queries and "
                f"keys of all heads together; use parallel.cp={self.tp * self.cp}, which shares "
                "out positions, or parallel.sharding=3, which shares out parameters"
            )

    def check_expert_width(self, width: int, *, has_bias: bool) -> None:
        """Hold the inner width of experts against the ranks that share it out (ValueError)."""
        check_expert_width(self.etp, width, has_bias=has_bias, dp=self.dp)

    def check_dropout(self, attention_dropout: float) -> None:
        """Refuse what drops attention weights where no rank sees all of a head's (ValueError)."""
        if self.cp > 1 and self.cp_attention == "ring" and attention_dropout:
            raise TrainValueError(
                f'parallel.cp_attention="ring" drops no attention weights, but attention_dropout='
                f'{attention_dropout} in config.json; use parallel.cp_attention="all_to_all"'
            )
