"""Tensors of different heights packed into one, group by group: Megatron-Core's `linear_qkv`.

Of each group of heads there stand the rows of its queries, then of its keys, then of its values.
No shape tells how many groups there are, or how the parts relate: `config.json` does.

    rule = PackedRule.of(
        stored="decoder.layers.{n}.self_attention.linear_qkv.weight",
        memory=["model.layers.{n}.self_attn.q_proj.weight", "...k_proj.weight", "...v_proj.weight"],
        groups="num_key_value_heads",
        parts=("num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
    )
    config = {"num_attention_heads": 32, "num_key_value_heads": 4}
    rule.with_config(config).numbers   # (4, 32, 4, 4)

Only the first dim is packed; what follows it may be anything.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.specs.rules import Rule, Run, Side, layers_of

_HEADS = "num_attention_heads"
_KEY_HEADS = "num_key_value_heads"  # as many as heads where a config.json has none
_REST = "inner"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRule(Rule):
    """One stored tensor is several in memory.

    Attributes:
        groups: the entry of `config.json` with the number of groups.
        parts: for each part, the entry to which its rows are proportional.
        numbers: what those entries are, groups first; empty until `with_config`.
        packs: whether the source is the parts.
    """

    groups: str
    parts: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    packs: bool = False

    def __post_init__(self) -> None:
        """Refuse a rule whose parts are not as many as its names."""
        stored, memory = (self.target, self.source) if self.packs else (self.source, self.target)
        if len(stored.names) != 1 or len(memory.names) != len(self.parts) or len(self.parts) < 2:
            raise WeightConvertError(
                f"{', '.join(stored.names)}: a packed rule has one stored name, and as many parts "
                f"as names in memory; got {len(stored.names)}, {len(self.parts)} and "
                f"{len(memory.names)}"
            )

    @classmethod
    def of(
        cls, *, stored: str, memory: Sequence[str], groups: str, parts: Sequence[str]
    ) -> "PackedRule":
        """A rule that reads one stored tensor into several in memory."""
        return cls(
            source=Side(names=(stored,), groups=()),
            target=Side(names=tuple(memory), groups=()),
            groups=groups,
            parts=tuple(parts),
        )

    @property
    def is_rename(self) -> bool:
        """Never."""
        return False

    @property
    def is_packed(self) -> bool:
        """Always."""
        return True

    def inverse(self) -> Rule:
        """The rule that packs again."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            packs=not self.packs,
            behind=-self.behind,
        )

    def with_config(self, config: Mapping[str, Any]) -> Rule:
        """The rule with its numbers.

        Raises:
            WeightConvertError: `config.json` lacks one.
        """
        numbers = []
        for name in (self.groups, *self.parts):
            value = config.get(name, config.get(_HEADS) if name == _KEY_HEADS else None)
            if type(value) is not int or value < 1:
                stored = (self.target if self.packs else self.source).names[0]
                raise WeightConvertError(
                    f"{stored} is packed by groups of heads, and config.json has no {name}; "
                    f"add it to the config.json beside the weights"
                )
            numbers.append(value)
        return replace(self, numbers=tuple(numbers), num_layers=layers_of(config))

    def sizes(self, shape: Sequence[int], num_experts: int, part: int = 0) -> dict[str, int]:
        """Rows of each part in a group, as `"0"`, `"1"`, ..., and what a row has.

        Raises:
            IncompleteExpertsError: the rows are not whole groups.
        """
        groups, *parts = self.numbers
        unit = groups * (parts[part] if self.packs else sum(parts))
        rows = [number * (shape[0] if shape else 0) for number in parts]
        if not shape or not shape[0] or any(row % unit for row in rows):
            raise IncompleteExpertsError(
                f"{self.source.names[part]} has shape {list(shape)}, whose rows are not "
                f"{groups} groups of {self.parts}, which config.json says are {parts}"
            )
        heights = {str(number): row // unit for number, row in enumerate(rows)}
        return heights | {_REST: math.prod(shape[1:]), **_dims(shape[1:])}

    def shape(self, sizes: Mapping[str, int], part: int) -> tuple[int, ...]:
        """The shape of the target's tensor `part`."""
        rows = sum(self._heights(sizes)) if self.packs else sizes[str(part)]
        rest = (sizes[f"dim{number}"] for number in range(len(sizes) - 1 - len(self.parts)))
        return (self.numbers[0] * rows, *rest)

    def _heights(self, sizes: Mapping[str, int]) -> list[int]:
        return [sizes[str(number)] for number in range(len(self.parts))]

    def runs(self, expert: int, part: int, sizes: Mapping[str, int]) -> Iterator[Run]:
        """The source's elements of the target's tensor `part`, in its order."""
        heights, inner = self._heights(sizes), sizes[_REST]
        for group in range(self.numbers[0]):
            for number, height in enumerate(heights):
                if self.packs:
                    offset = group * height
                elif number != part:
                    continue
                else:
                    offset = group * sum(heights) + sum(heights[:part])
                yield Run(
                    expert=0,
                    part=number if self.packs else 0,
                    offset=offset * inner,
                    length=height * inner,
                )

    def targets(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """(0, part) of every tensor of the target side."""
        return ((0, part) for part in range(len(self.target.names)))


def _dims(rest: Sequence[int]) -> dict[str, int]:
    return {f"dim{number}": length for number, length in enumerate(rest)}
