"""Say what a model directory holds, from headers alone; its family need not be known.

summary = inspect("Qwen3-30B-A3B")
summary.format, summary.num_experts       # "transformers", 128
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weight_convert._checks import Record, check_kind
from weight_convert.errors import IncompleteExpertsError, UnknownFamilyError
from weight_convert.files import Catalog, read_catalog
from weight_convert.outputs import PlannedTensor
from weight_convert.plan import (
    check_complete,
    detect_format,
    in_memory,
    spec_of,
)
from weight_convert.specs import FamilySpec, Matcher, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Record):
    """What `inspect` found.

    Attributes:
        model_type: the family by which the tensors were read; "" where it is not known, and then
            the format is unknown, too, and nothing is said of experts.
        format: the format, by the names of the tensors.
        num_files: weight files.
        num_tensors: stored tensors.
        data_bytes: bytes of all tensors.
        bytes_by_dtype: the same by safetensors dtype.
        num_moe_layers: layers that have experts.
        num_experts: the largest number of experts in a layer.
        problem: why a conversion would be refused, or "".
    """

    model_type: str
    format: str
    num_files: int
    num_tensors: int
    data_bytes: int
    bytes_by_dtype: Mapping[str, int]
    num_moe_layers: int
    num_experts: int
    problem: str


def inspect(directory: Path | str, *, spec: FamilySpec | None = None) -> Summary:
    """Summarise a model directory; reads headers only.

    Args:
        directory: the model directory.
        spec: its family; None takes it from `config.json`, if that names a known one.

    Raises:
        WeightConvertError: the directory is damaged, has no weights, or is of another family.
    """
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    catalog = read_catalog(directory)
    bytes_by_dtype: Counter[str] = Counter()
    for tensor in catalog.tensors.values():
        bytes_by_dtype[tensor.dtype] += tensor.size_bytes
    family, problem = _family(catalog, spec)
    source, tensors = "", list[PlannedTensor]()
    if family is not None:
        source = detect_format(catalog, family)
        try:
            tensors = in_memory(catalog, family, source)
            check_complete(catalog, family, tensors)
        except IncompleteExpertsError as error:
            problem = str(error)
    layers = _expert_layers(tensors, family)
    return Summary(
        model_type=family.model_type if family else "",
        format=source,
        num_files=len(catalog.files),
        num_tensors=len(catalog.tensors),
        data_bytes=bytes_by_dtype.total(),
        bytes_by_dtype=dict(bytes_by_dtype),
        num_moe_layers=len(layers),
        num_experts=max(layers.values(), default=0),
        problem=problem,
    )


def _family(catalog: Catalog, spec: FamilySpec | None) -> tuple[FamilySpec | None, str]:
    """The family, or None and why it is not known."""
    try:
        return spec_of(catalog, spec), ""
    except UnknownFamilyError as error:
        return None, str(error)


def _expert_layers(
    tensors: list[PlannedTensor], family: FamilySpec | None
) -> dict[tuple[tuple[str, str], ...], int]:
    """The number of experts of each layer that has some."""
    names = () if family is None else family.experts
    matcher = Matcher([Side(names=(name,), groups=()) for name in names])
    layers: dict[tuple[tuple[str, str], ...], int] = {}
    for tensor in tensors:
        member = matcher.find(tensor.key)
        if member is not None and tensor.shape:
            layers[member.places] = max(layers.get(member.places, 0), tensor.shape[0])
    return layers
