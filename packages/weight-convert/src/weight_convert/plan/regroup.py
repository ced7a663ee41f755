"""Which source bytes make up each tensor, in memory and in another format: as pure data.

A rule says where each element of its target lies in its source; here that becomes byte ranges of
files. Stored tensors become tensors in memory, and these the stored tensors of another format; a
range of the second step is looked up in the ranges of the first. Nothing is read or computed.

    tensors = in_memory(catalog, spec, "transformers")
    tensors[0].key, tensors[0].pieces
    as_stored(tensors, spec, "transformers")

Invariant: the pieces of the returned tensors cover every byte of every source tensor exactly
once, and a tensor that no rule names keeps its key, dtype, shape and bytes.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import ne
from typing import Any

from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files import Catalog, tensor_size_bytes
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.plan.completeness import (
    check_alike,
    check_numbers,
    check_packed,
    expected_experts,
)
from weight_convert.specs import FamilySpec, Matcher, Rule, Side, fill


def in_memory(
    catalog: Catalog, spec: FamilySpec, source: str, work: Computations | None = None
) -> list[PlannedTensor]:
    """The tensors in memory of a directory in the format `source`.

    Args:
        catalog: the directory.
        spec: its family.
        source: one of the family's formats.
        work: where tensors that must be computed are noted, as those that files hold transposed;
            None for who needs nothing but dtypes and shapes.

    Raises:
        IncompleteExpertsError: members of a tensor are missing, doubled or of different shapes.
        WeightConvertError: `config.json` lacks what tells packed tensors apart.
    """
    tensors = (PlannedTensor.of(tensor) for tensor in catalog.tensors.values())
    count, why = expected_experts(catalog, spec)
    config = spec.config_of(catalog.config)
    rules = [rule.with_config(config) for rule in spec.format(source).rules]
    work = work if work is not None else Computations(num_sources=len(catalog.files))
    made = _apply(tensors, rules, _Frame(spec.companions, work, False, count, why))
    return [replace(tensor, order=(natural_key(tensor.key), 0, 0)) for tensor in made]


def copied_in_memory(catalog: Catalog, spec: FamilySpec, source: str) -> list[PlannedTensor]:
    """The same for who only copies bytes.

    Raises:
        WeightConvertError: a tensor would have to be computed.
    """
    work = Computations(num_sources=len(catalog.files))
    tensors = in_memory(catalog, spec, source, work)
    if work.all:
        raise WeightConvertError(
            f"{catalog.directory} is in the format {source}, whose matrices stand transposed; "
            f"convert it into the format fused first, and use that"
        )
    return tensors


def as_stored(
    tensors: Sequence[PlannedTensor],
    spec: FamilySpec,
    target: str,
    work: Computations | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[PlannedTensor]:
    """The stored tensors of the format `target`, from those in memory.

    Args:
        tensors: those in memory.
        spec: the family.
        target: one of its formats.
        work: where tensors that must be computed are noted; None for who only copies.
        config: `config.json`.

    Raises:
        IncompleteExpertsError: a tensor has not the shape that a rule needs, or has both forms.
        WeightConvertError: `config.json` lacks what tells packed tensors apart.
    """
    known = spec.config_of(config or {})
    rules = [rule.with_config(known) for rule in spec.format(target).inverse()]
    copies = work is None
    work = work if work is not None else Computations(num_sources=sys.maxsize)
    made = _apply(tensors, rules, _Frame(spec.companions, work, True, 0, ""))
    if copies and work.all:
        raise WeightConvertError(
            f"the matrices of the format {target} stand transposed; convert that directory into "
            f"the format fused first, and use that"
        )
    return [work.settled(tensor) for tensor in made]


def by_modules(tensors: Sequence[PlannedTensor], spec: FamilySpec) -> list[PlannedTensor]:
    """The tensors in memory with the order of the spec's list, layer by layer; unknown ones last.

    Names that differ in what stands before a layer's number are of different lists of layers, which
    come one after the other, with what stands between them, as modules of a model do.
    """
    names = list(spec.tensors)
    matcher = Matcher([Side(names=(name,), groups=()) for name in names], spec.companions)
    matches = [_UP_TO_LAYER.match(name) for name in names]
    stems = [match[0] if match else "" for match in matches]
    sections = list(accumulate(map(ne, stems[1:], stems), initial=0))

    def place(tensor: PlannedTensor) -> tuple[tuple[int, str, int], ...]:
        member = matcher.find(tensor.key)
        if member is None:
            return (len(names), "", 0), *natural_key(tensor.key)
        layer = natural_key(member.places[0][1])[-1] if member.places else (0, "", 0)
        return (sections[member.side], "", 0), layer, (0, "", member.side), (0, member.suffix, 0)

    return [replace(tensor, order=(place(tensor), 0, 0)) for tensor in tensors]


_UP_TO_LAYER = re.compile(r".*?\{(?:layer|n)\}")
_Places = tuple[tuple[str, str], ...]
_Group = tuple[int, _Places, str]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all rules of one way share.

    Attributes:
        companions: suffixes.
        work: computed tensors.
        is_storing: whether the way is from memory to files.
        num_experts, why: how many experts are expected and who says so, on the way to memory.
    """

    companions: tuple[str, ...]
    work: Computations
    is_storing: bool
    num_experts: int
    why: str


def _apply(
    tensors: Iterable[PlannedTensor], rules: Sequence[Rule], frame: _Frame
) -> list[PlannedTensor]:
    tensors = list(tensors)
    sides = [rule.source for rule in rules]
    matcher = Matcher(sides, frame.companions, _allowance(rules, tensors, frame))
    found: dict[_Group, dict[tuple[int, int], PlannedTensor]] = defaultdict(dict)
    made: list[PlannedTensor] = []
    for tensor in tensors:
        member = matcher.find(tensor.key)
        if member is None:
            made.append(tensor)
        else:
            members = found[member.side, member.places, member.suffix]
            _join(members, (member.expert, member.part), tensor)
    for (side, places, suffix), members in found.items():
        rule = rules[side]
        if rule.transposed and not frame.is_storing:
            members = {place: frame.work.transposed(one) for place, one in members.items()}
        at = rule.places_of_target(places)
        results: Iterable[PlannedTensor]
        if rule.is_rename:
            results = [replace(members[0, 0], key=fill(rule.target.names[0], at) + suffix)]
        else:
            name = fill(rule.source.names[0], places) + suffix
            check_numbers(rule, name, members, frame.num_experts, frame.why)
            if not rule.is_packed:
                check_alike(members.values())
            results = _made(rule, at, suffix, members)
        if rule.transposed and frame.is_storing:
            results = [frame.work.transposed(one) for one in results]
        made += results
    return _unique(made)


def _allowance(
    rules: Sequence[Rule], tensors: Sequence[PlannedTensor], frame: _Frame
) -> Callable[[int, _Places], bool] | None:
    """Says of a rule and its places whether it is for that layer, and what it stands beside is
    there."""
    if not frame.is_storing or not any(rule.beside or rule.behind for rule in rules):
        return None
    keys = {tensor.key for tensor in tensors}

    def allows(side: int, places: _Places) -> bool:
        rule = rules[side]
        return rule.takes(places) and (not rule.beside or fill(rule.beside, places) in keys)

    return allows


def _join(
    members: dict[tuple[int, int], PlannedTensor], place: tuple[int, int], tensor: PlannedTensor
) -> None:
    other = members.setdefault(place, tensor)
    if other is not tensor:
        raise IncompleteExpertsError(
            f"{other.key} and {tensor.key} are the same tensor under two names; remove one of them"
        )


def _made(
    rule: Rule,
    places: _Places,
    suffix: str,
    members: Mapping[tuple[int, int], PlannedTensor],
) -> Iterator[PlannedTensor]:
    """The tensors of a rule's target from all of its source."""
    (_, number), first = next(iter(members.items()))
    sizes = rule.sizes(first.shape, 1 + max(expert for expert, _ in members), number)
    if rule.is_packed:
        check_packed(rule, members, sizes)
    for expert, part in rule.targets(sizes):
        key = fill(rule.target.names[part], places, expert) + suffix
        made = PlannedTensor(
            key=key,
            dtype=first.dtype,
            shape=rule.shape(sizes, part),
            pieces=(),
            order=(first.order[0], part, expert),
        )
        spans = ((members[run.expert, run.part], run) for run in rule.runs(expert, part, sizes))
        yield made.made_of(
            [
                piece
                for tensor, run in spans
                for piece in tensor.cut(
                    _bytes(tensor, run.offset),
                    _bytes(tensor, run.offset + run.length) - _bytes(tensor, run.offset),
                )
            ]
        )


def _bytes(tensor: PlannedTensor, num_elements: int) -> int:
    try:
        return tensor_size_bytes(tensor.dtype, (num_elements,))
    except ValueError as error:
        raise IncompleteExpertsError(f"{tensor.key} cannot be split: {error}") from error


def _unique(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """Return the tensors, or raise when two of them have the same key."""
    by_key: dict[str, PlannedTensor] = {}
    for tensor in tensors:
        if by_key.setdefault(tensor.key, tensor) is not tensor:
            raise IncompleteExpertsError(
                f"{tensor.key} is stored in two forms, such as fused and per expert; "
                f"remove one of the two"
            )
    return list(by_key.values())
