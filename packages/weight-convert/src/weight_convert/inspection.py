"""Say what a model directory holds, from headers alone.

summary = inspect("Qwen3-30B-A3B")
summary.form, summary.num_experts       # "per_expert", 128
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weight_convert._checks import Record, check_kind
from weight_convert.catalog import Catalog, detect_spec, read_catalog
from weight_convert.errors import IncompleteExpertsError
from weight_convert.families import FamilySpec
from weight_convert.regroup import check_experts, collect_experts, unmapped_expert_keys

StoredForm = Literal["fused", "per_expert", "mixed", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Record):
    """What `inspect` found.

    Attributes:
        model_type: the family by which the tensors were read.
        form: how the experts are stored; "mixed" when layers differ, "none" without experts.
        num_files: weight files.
        num_tensors: stored tensors.
        data_bytes: bytes of all tensors.
        bytes_by_dtype: the same by safetensors dtype.
        num_moe_layers: layers that have experts.
        num_experts: the largest number of experts in a layer.
        num_unmapped: tensors of single experts that the family spec does not know, such as scales.
        problem: why a conversion would be refused, or "" when the experts are complete.
    """

    model_type: str
    form: StoredForm
    num_files: int
    num_tensors: int
    data_bytes: int
    bytes_by_dtype: Mapping[str, int]
    num_moe_layers: int
    num_experts: int
    num_unmapped: int
    problem: str


def inspect(directory: Path | str, *, spec: FamilySpec | None = None) -> Summary:
    """Summarise a model directory; reads headers only.

    Args:
        directory: the model directory.
        spec: its family; None takes it from `config.json`.

    Raises:
        UnknownFamilyError: no spec is given and `config.json` names no known family.
        WeightConvertError: the directory is damaged or has no weights.
    """
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    family = spec if spec is not None else detect_spec(directory)
    catalog = read_catalog(directory)
    stored, fused, layers = collect_experts(catalog, family)
    counts = [1 + expert for members in stored.values() for expert, _ in members]
    counts += [tensor.shape[0] for tensor in fused.values() if tensor.shape]
    bytes_by_dtype: Counter[str] = Counter()
    for tensor in catalog.tensors.values():
        bytes_by_dtype[tensor.dtype] += tensor.size_bytes
    return Summary(
        model_type=family.model_type,
        form=_form(bool(stored), bool(fused)),
        num_files=len(catalog.files),
        num_tensors=len(catalog.tensors),
        data_bytes=bytes_by_dtype.total(),
        bytes_by_dtype=dict(bytes_by_dtype),
        num_moe_layers=len(layers),
        num_experts=max(counts, default=0),
        num_unmapped=len(unmapped_expert_keys(catalog, family)),
        problem=_problem(catalog, family),
    )


def _form(stored: bool, fused: bool) -> StoredForm:
    """Name the form of a directory that has stored and/or fused experts."""
    if stored and fused:
        return "mixed"
    if stored:
        return "per_expert"
    return "fused" if fused else "none"


def _problem(catalog: Catalog, spec: FamilySpec) -> str:
    """Return why the experts cannot be regrouped, or ""."""
    try:
        check_experts(catalog, spec)
    except IncompleteExpertsError as error:
        return str(error)
    return ""
