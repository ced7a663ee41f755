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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from weight_convert.errors import IncompleteExpertsError
from weight_convert.files import Catalog, tensor_size_bytes
from weight_convert.outputs import Piece, PlannedTensor, natural_key
from weight_convert.plan.completeness import check_alike, check_numbers, expected_experts
from weight_convert.specs import FamilySpec, Matcher, Rule, Side, fill


def in_memory(catalog: Catalog, spec: FamilySpec, source: str) -> list[PlannedTensor]:
    """The tensors in memory of a directory in the format `source`.

    Raises:
        IncompleteExpertsError: members of a tensor are missing, doubled or of different shapes.
    """
    tensors = (PlannedTensor.of(tensor) for tensor in catalog.tensors.values())
    count, why = expected_experts(catalog, spec)
    made = _apply(tensors, spec.format(source).rules, spec.companions, count, why)
    return [replace(tensor, order=(natural_key(tensor.key), 0, 0)) for tensor in made]


def as_stored(
    tensors: Iterable[PlannedTensor], spec: FamilySpec, target: str
) -> list[PlannedTensor]:
    """The stored tensors of the format `target`, from those in memory.

    Raises:
        IncompleteExpertsError: a tensor has not the shape that a rule needs, or has both forms.
    """
    return _apply(tensors, spec.format(target).inverse(), spec.companions, 0, "")


def by_modules(tensors: Sequence[PlannedTensor], spec: FamilySpec) -> list[PlannedTensor]:
    """The tensors in memory with the order of the spec's list, layer by layer; unknown ones last.

    Tensors before, in and behind the layers come in this order, as modules of a model do.
    """
    names = list(spec.tensors)
    matcher = Matcher([Side(names=(name,), groups=()) for name in names], spec.companions)
    in_layers = [number for number, name in enumerate(names) if name.startswith("{layer}")]
    first = in_layers[0] if in_layers else len(names)

    def place(tensor: PlannedTensor) -> tuple[tuple[int, str, int], ...]:
        member = matcher.find(tensor.key)
        if member is None:
            return (3, "", 0), *natural_key(tensor.key)
        layer = natural_key(member.places[0][1])[-1] if member.places else (0, "", 0)
        section = 1 if member.places else 0 if member.side < first else 2
        return (section, "", 0), layer, (0, "", member.side), (0, member.suffix, 0)

    return [replace(tensor, order=(place(tensor), 0, 0)) for tensor in tensors]


_Group = tuple[int, tuple[tuple[str, str], ...], str]


def _apply(
    tensors: Iterable[PlannedTensor],
    rules: Sequence[Rule],
    companions: tuple[str, ...],
    num_experts: int,
    why: str,
) -> list[PlannedTensor]:
    matcher = Matcher([rule.source for rule in rules], companions)
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
        if rule.is_rename:
            key = fill(rule.target.names[0], places) + suffix
            made.append(replace(members[0, 0], key=key))
            continue
        name = fill(rule.source.names[0], places) + suffix
        check_numbers(rule, name, members, num_experts, why)
        check_alike(members.values())
        made += _made(rule, places, suffix, members)
    return _unique(made)


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
    places: tuple[tuple[str, str], ...],
    suffix: str,
    members: Mapping[tuple[int, int], PlannedTensor],
) -> Iterator[PlannedTensor]:
    """The tensors of a rule's target from all of its source."""
    first = next(iter(members.values()))
    sizes = rule.sizes(first.shape, 1 + max(expert for expert, _ in members))
    shape = rule.target.shape(sizes)
    for expert, part in rule.targets(sizes):
        key = fill(rule.target.names[part], places, expert) + suffix
        pieces: list[Piece] = []
        for run in rule.runs(expert, part, sizes):
            member = members[run.expert, run.part]
            begin = _bytes(member, run.offset)
            pieces += member.cut(begin, _bytes(member, run.offset + run.length) - begin)
        yield PlannedTensor(
            key=key,
            dtype=first.dtype,
            shape=shape,
            pieces=tuple(pieces),
            order=(first.order[0], part, expert),
            ends=_ends(pieces),
        )


def _bytes(tensor: PlannedTensor, num_elements: int) -> int:
    try:
        return tensor_size_bytes(tensor.dtype, (num_elements,))
    except ValueError as error:
        raise IncompleteExpertsError(f"{tensor.key} cannot be split: {error}") from error


def _ends(pieces: Sequence[Piece]) -> tuple[int, ...]:
    ends, end = [], 0
    for piece in pieces:
        end += piece.size_bytes
        ends.append(end)
    return tuple(ends) if len(ends) > 1 else ()


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
