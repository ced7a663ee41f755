"""Hold a directory against a family's spec: what the spec names, and what it does not explain.

    explain("Qwen3-30B-A3B").unknown      # () when every tensor is named

A spec gives every dim a name, and dims of one name have one size in all tensors of a model. So a
spec that is wrong for a directory is seen from headers alone, without `config.json`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weight_convert._checks import Record, check_kind
from weight_convert.errors import IncompleteExpertsError
from weight_convert.files import read_catalog
from weight_convert.outputs import PlannedTensor
from weight_convert.plan import check_complete, detect_format, in_memory, spec_of
from weight_convert.specs import FamilySpec, Matcher, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Record):
    """What a spec says of a directory.

    Attributes:
        model_type: the spec's family.
        format: the directory's format, by the names of its tensors.
        num_named: tensors in memory that the spec names.
        unknown: names of those that it does not.
        conflicts: tensors whose dims are not as the spec says, in sentences.
        problem: why the tensors do not make up a model's, or "".
    """

    model_type: str
    format: str
    num_named: int
    unknown: tuple[str, ...]
    conflicts: tuple[str, ...]
    problem: str

    @property
    def is_whole(self) -> bool:
        """Whether the spec explains everything."""
        return not (self.unknown or self.conflicts or self.problem)


def explain(directory: Path | str, *, spec: FamilySpec | None = None) -> Explanation:
    """Say what a directory has that a spec does not explain; reads headers only.

    Args:
        directory: a model directory.
        spec: the family; None takes it from `config.json`.

    Raises:
        UnknownFamilyError: no spec is given and `config.json` names no known family.
        WeightConvertError: the directory is damaged or has no weights, or is of another family.
    """
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    catalog = read_catalog(directory)
    family = spec_of(catalog, spec)
    source = detect_format(catalog, family)
    tensors: list[PlannedTensor] = []
    problem = ""
    try:
        tensors = in_memory(catalog, family, source)
        check_complete(catalog, family, tensors)
    except IncompleteExpertsError as error:
        problem = str(error)
    names = list(family.tensors)
    sides = [Side(names=(name,), groups=()) for name in names]
    matcher = Matcher(sides, family.companions)
    found = [(tensor, matcher.find(tensor.key)) for tensor in tensors]
    return Explanation(
        model_type=family.model_type,
        format=source,
        num_named=sum(member is not None for _, member in found),
        unknown=tuple(tensor.key for tensor, member in found if member is None),
        conflicts=_conflicts(
            (tensor, family.tensors[names[member.side]].dims)
            for tensor, member in found
            if member is not None and not member.suffix and family.tensors[names[member.side]].dims
        ),
        problem=problem,
    )


def _conflicts(tensors: Iterable[tuple[PlannedTensor, tuple[str, ...]]]) -> tuple[str, ...]:
    """One sentence for each tensor with another number of dims, or a dim of another size."""
    sizes: dict[str, tuple[int, str]] = {}
    conflicts: list[str] = []
    for tensor, dims in tensors:
        if len(dims) != len(tensor.shape):
            conflicts.append(
                f"{tensor.key} has shape {list(tensor.shape)}, expected [{', '.join(dims)}]"
            )
            continue
        for dim, length in zip(dims, tensor.shape, strict=True):
            first, key = sizes.setdefault(dim, (length, tensor.key))
            if first != length:
                conflicts.append(f"{tensor.key} has {dim} {length}, but {key} has {first}")
    return tuple(conflicts)
