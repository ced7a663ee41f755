"""One relation between stored tensors and tensors in memory, readable in both directions.

Both sides of a rule cut the same array, whose axes have names. An axis stands in the shape of a
side's tensors, or chooses among them: `expert` by the number in a name, `part` by the place in the
list of names. So stacking, concatenation in a declared order, interleaving of rows and reshaping
are one notation, and the inverse is the rule with its sides exchanged.

    rule = Rule.parse(
        stored=["{layer}.experts.{expert}.w1.weight", "{layer}.experts.{expert}.w3.weight"],
        memory=["{layer}.experts.gate_up_proj"],
        dims="row column -> expert (part row) column",
    )
    rule.inverse().source.names     # ("{layer}.experts.gate_up_proj",)

Invariant: every axis of one side is an axis of the other, and the last one is the same, so that
each side is made of byte ranges of the other. Without `dims` a rule renames one tensor. Where files
hold matrices with their two dims exchanged, that is said beside (`transposed`), and comes first.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weight_convert._checks import Record
from weight_convert.errors import IncompleteExpertsError, WeightConvertError

EXPERT, PART = "expert", "part"
_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_AXIS = re.compile(r"[a-z_]\w*")
_PLACES = re.compile(r"\{(\w+)\}")
_KNOWN_PLACES = {"layer", "n", EXPERT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Record):
    """The tensors of one side.

    Attributes:
        names: templates of their names, in the order of the axis `part`. `{layer}` stands for a
            path that ends in `layers.<number>`, `{n}` for a number, `{expert}` for an expert's.
        groups: for each dim of the tensors, the axes that it is made of, the slowest first; empty
            for a renamed tensor of any shape.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a tensor's elements, the slowest first."""
        return tuple(axis for group in self.groups for axis in group)

    @property
    def chosen_by(self) -> tuple[str, ...]:
        """The axes that choose among the tensors of this side."""
        expert = (EXPERT,) if "{expert}" in self.names[0] else ()
        return expert + ((PART,) if len(self.names) > 1 else ())

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a tensor of this side."""
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups)

    def sizes(self, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes of all axes, from a tensor's shape and those that are known; None if neither.

        A dim of several axes gives the size of one of them; the others must be known.
        """
        if len(shape) != len(self.groups):
            return None
        sizes = dict(known)
        for length, group in zip(shape, self.groups, strict=True):
            unknown = [axis for axis in group if axis not in sizes]
            rest = math.prod(sizes[axis] for axis in group if axis in sizes)
            if len(unknown) > 1 or not rest or length % rest:
                return None
            if unknown:
                sizes[unknown[0]] = length // rest
            elif length != rest:
                return None
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`length` elements from `offset` of the source tensor of `expert` and `part`."""

    expert: int
    part: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Record):
    """The tensors of `target` are made of those of `source`, byte range by byte range.

    Attributes:
        source, target: the sides; of a rule of a spec, stored and in memory.
        sizes_of: sizes of axes that no shape tells, such as those of length 1.
        transposed: whether stored matrices stand with their last two dims exchanged.
        beside: a tensor in memory; where it is absent, the way from memory passes this rule by.
        behind: 1 where files count the layers behind the last one, those of multi-token prediction,
            from 0; -1 of the inverse; 0 of all other rules.
        num_layers: how many layers those stand behind; -1 until a `config.json` says it.
    """

    source: Side
    target: Side
    sizes_of: Mapping[str, int] = field(default_factory=dict)
    transposed: bool = False
    beside: str = ""
    behind: int = 0
    num_layers: int = -1

    def __post_init__(self) -> None:
        """Refuse what could not be read in both directions."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        for side, other in ((self.source, self.target), (self.target, self.source)):
            _check_names(side, other)
        if not self.is_rename:
            _check_axes(self.source, self.target)
        elif len(self.source.names) != 1 or len(self.target.names) != 1:
            raise WeightConvertError(
                f"{', '.join(self.source.names)}: a rule without dims renames one tensor; "
                f"say dims of both sides, such as 'row column -> (part row) column'"
            )

    @classmethod
    def parse(
        cls,
        *,
        stored: Sequence[str],
        memory: Sequence[str],
        dims: str = "",
        sizes_of: Mapping[str, int] | None = None,
        transposed: bool = False,
        beside: str = "",
    ) -> "Rule":
        """A rule that reads stored tensors into memory.

        Args:
            stored, memory: names on each side, in the order of `part`.
            dims: `stored dims -> memory dims`; axes in brackets share a dim.
            sizes_of, transposed, beside: see the class.

        Raises:
            WeightConvertError: it could not be read in both directions.
        """
        halves = [_parse_dims(half) for half in dims.split("->")] if dims else [(), ()]
        if len(halves) != 2:
            raise WeightConvertError(f"dims {dims!r}: expected 'stored dims -> memory dims'")
        return cls(
            source=Side(names=tuple(stored), groups=halves[0]),
            target=Side(names=tuple(memory), groups=halves[1]),
            sizes_of=sizes_of or {},
            transposed=transposed,
            beside=beside,
        )

    @property
    def is_rename(self) -> bool:
        """Whether it changes a name alone."""
        return not self.source.groups and not self.target.groups

    @property
    def is_itself(self) -> bool:
        """Whether it keeps even the name."""
        return self.is_rename and self.source == self.target

    @property
    def is_packed(self) -> bool:
        """Whether parts of different heights alternate in one tensor; see `PackedRule`."""
        return False

    def inverse(self) -> "Rule":
        """The rule that undoes this one."""
        return replace(self, source=self.target, target=self.source, behind=-self.behind)

    def with_config(self, config: Mapping[str, Any]) -> "Rule":
        """The rule where a `config.json` is known; see `PackedRule`."""
        return replace(self, num_layers=layers_of(config)) if self.behind else self

    def takes(self, places: Sequence[tuple[str, str]]) -> bool:
        """Whether tensors in memory of this layer may be stored by this rule."""
        return self.behind == 0 or 0 <= self.num_layers <= int(dict(places)["n"])

    def places_of_target(self, places: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """What places of the target's names stand for, where those of the source's do for this.

        Raises:
            WeightConvertError: `config.json` does not say how many layers stand before.
        """
        if not self.behind:
            return tuple(places)
        if self.num_layers < 0:
            raise WeightConvertError(
                f"{self.source.names[0]} is of a layer behind the others, and config.json has no "
                f"num_hidden_layers; add it to the config.json beside the weights"
            )
        number = int(dict(places)["n"]) + self.behind * self.num_layers
        return tuple((name, str(number) if name == "n" else at) for name, at in places)

    def shape(self, sizes: Mapping[str, int], part: int) -> tuple[int, ...]:
        """The shape of the target's tensor `part`."""
        return self.target.shape(sizes)

    def sizes(self, shape: Sequence[int], num_experts: int, part: int = 0) -> dict[str, int]:
        """The sizes of all axes, from the shape of the source's tensor `part`.

        Raises:
            IncompleteExpertsError: the shape is not as `dims` says.
        """
        known = {PART: max(len(self.source.names), len(self.target.names)), **self.sizes_of}
        if EXPERT in self.source.chosen_by:
            known[EXPERT] = num_experts
        sizes = self.source.sizes(shape, known)
        if sizes is None or sizes.get(EXPERT, 1) < 1:
            expected = " ".join(
                group[0] if len(group) == 1 else f"({' '.join(group)})"
                for group in self.source.groups
            )
            raise IncompleteExpertsError(
                f"{self.source.names[0]} has shape {list(shape)}; expected [{expected}] "
                f"with {known[PART]} parts and at least one expert"
            )
        return sizes

    def runs(self, expert: int, part: int, sizes: Mapping[str, int]) -> Iterator[Run]:
        """The source's elements of the target tensor of `expert` and `part`, in its order."""
        fixed = {EXPERT: expert, PART: part}
        fixed = {axis: fixed[axis] for axis in self.target.chosen_by}
        stride, strides = 1, {}
        for axis in reversed(self.source.axes):
            strides[axis] = stride
            stride *= sizes[axis]
        outer = list(self.target.axes)
        length = 1
        for axis in reversed(self.source.axes):  # what is contiguous on both sides
            if not outer or outer[-1] != axis:
                break
            length *= sizes[outer.pop()]
        for values in itertools.product(*(range(sizes[axis]) for axis in outer)):
            at = fixed | dict(zip(outer, values, strict=True))
            yield Run(
                expert=at[EXPERT] if EXPERT in self.source.chosen_by else 0,
                part=at[PART] if PART in self.source.chosen_by else 0,
                offset=sum(at[axis] * strides[axis] for axis in strides if axis in at),
                length=length,
            )

    def targets(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """(expert, part) of every tensor of the target side, expert by expert."""
        by = self.target.chosen_by
        experts = range(sizes[EXPERT]) if EXPERT in by else (0,)
        parts = range(sizes[PART]) if PART in by else (0,)
        return itertools.product(experts, parts)


def layers_of(config: Mapping[str, Any]) -> int:
    """The number of layers that a `config.json` says; -1 where it says none."""
    value = config.get("num_hidden_layers")
    return value if type(value) is int else -1


def _parse_dims(text: str) -> tuple[tuple[str, ...], ...]:
    groups = tuple(
        tuple(inner.split()) if inner else (outer,) for inner, outer in _GROUP.findall(text)
    )
    bad = [axis for group in groups for axis in group if not _AXIS.fullmatch(axis)]
    if bad or not groups:
        raise WeightConvertError(f"dims {text!r}: expected names of axes, got {bad or 'none'}")
    return groups


def _check_names(side: Side, other: Side) -> None:
    """Raise unless the names of a side tell its tensors apart."""
    if not side.names or len(set(side.names)) != len(side.names):
        raise WeightConvertError(f"a rule needs names, each once; got {list(side.names)}")
    places = [_PLACES.findall(name) for name in side.names]
    for name, found in zip(side.names, places, strict=True):
        unknown = set(found) - _KNOWN_PLACES
        if unknown or len(set(found)) != len(found) or set(found) != set(places[0]):
            raise WeightConvertError(
                f"template {name!r}: {{layer}}, {{n}} and {{expert}} stand at most once, the same "
                f"ones in each name of a side"
            )
    there = {place for place in _PLACES.findall(other.names[0]) if place != EXPERT}
    if {place for place in places[0] if place != EXPERT} != there:
        raise WeightConvertError(f"{side.names[0]!r} and {other.names[0]!r} differ in places")


def _check_axes(source: Side, target: Side) -> None:
    """Raise unless both sides cut the same array into byte ranges of the other."""
    what = f"{source.names[0]} -> {target.names[0]}"
    every = [*source.axes, *source.chosen_by], [*target.axes, *target.chosen_by]
    if any(len(set(axes)) != len(axes) for axes in every) or set(every[0]) != set(every[1]):
        raise WeightConvertError(
            f"{what}: the axes are {every[0]} and {every[1]}; both sides must have the same ones, "
            f"each once ({{expert}} and a list of names count as the axes expert and part)"
        )
    if source.axes[-1:] != target.axes[-1:]:
        raise WeightConvertError(
            f"{what}: the last axis is {source.axes[-1:]} and {target.axes[-1:]}; it must be the "
            f"same, since only byte ranges are moved"
        )
