"""Prove that two model directories hold the same tensors, in any formats and files.

Directories of one format are compared tensor by tensor as they stand. Of two formats, each side is
read by its own format's rules as tensors in memory. Bytes are compared, and never numbers: NaN,
-0.0 and every bit count. At level "values", numbers are compared where float dtypes differ, and
transformers loads both sides as a second opinion, since a wrong rule may agree with itself.

    verify("Qwen3-30B-A3B", "fused").equal      # True

Invariant: every byte of either directory is compared once, or stands in a difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from weight_convert._checks import Record, check_kind
from weight_convert._dtypes import FLOATS
from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.files import Catalog, read_catalog
from weight_convert.opinions import Opinion, numbers_differ, second_opinion
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.plan import detect_format, in_memory, spec_of
from weight_convert.specs import FamilySpec
from weight_convert.staging import OpenFiles
from weight_convert.verification.blocks import ReadSide, blocks

Level = Literal["headers", "bytes", "values", "logits"]
LEVELS: tuple[Level, ...] = ("headers", "bytes", "values", "logits")
_BLOCK_BYTES = 256 << 10
_LOGIT_LIMIT = 1e-5  # of the greatest logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that is not the same on both sides, and how."""

    key: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Record):
    """Result of a comparison.

    Attributes:
        formats: the formats of the two directories; empty where they were compared as they stand.
        num_tensors: tensors found on either side, as stored, or in memory where formats differ.
        compared_bytes: tensor bytes that were read and compared on each side.
        differences: what differs, in natural key order; empty when the directories hold the same.
        opinion: what transformers said of both, at levels "values" and "logits".
    """

    formats: tuple[str, ...]
    num_tensors: int
    compared_bytes: int
    differences: tuple[Difference, ...]
    opinion: Opinion | None = None

    @property
    def equal(self) -> bool:
        """Whether keys, dtypes, shapes and all bytes are the same, or values and logits."""
        return not self.differences


def verify(
    a: Path | str,
    b: Path | str,
    *,
    spec: FamilySpec | None = None,
    level: Level = "bytes",
) -> VerifyReport:
    """Compare the tensors of two model directories; the formats may differ.

    Args:
        a: a model directory.
        b: another one.
        spec: the family of both; None takes it from the `config.json` of either directory. Where
            neither names a known family, the tensors are compared as they stand.
        level: "headers" compares names, dtypes and shapes and reads no tensor; "bytes" all of it;
            "values" numbers where float dtypes differ, and all that transformers loads of either
            side (it holds both models in memory); "logits" those of one sequence, too, to 1e-5 of
            the greatest. Directories of different quantisation are compared by transformers alone.

    Returns:
        What was compared and what differs. Only tensors count: metadata and other files do not.

    Raises:
        IncompleteExpertsError: the formats differ and one directory lacks experts.
        WeightConvertError: a directory is damaged, has no weights, or is of another family;
            transformers is not installed, or cannot load a directory.
    """
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    if level not in LEVELS:
        raise WeightConvertError(f"level={level!r}; expected one of {', '.join(LEVELS)}")
    catalogs = (read_catalog(a), read_catalog(b))
    _refuse_two_families(catalogs, spec)
    if level in ("headers", "bytes"):
        return _compare(catalogs, spec, level)
    return _with_opinion(catalogs, spec, level)


def _refuse_two_families(catalogs: tuple[Catalog, Catalog], spec: FamilySpec | None) -> None:
    """Raise where names differ and one side is of a known family, the other of another one."""
    named = [side.config.get("model_type") for side in catalogs]
    are_two = spec is None and None not in named and named[0] != named[1]
    if are_two and not _have_one_layout(*catalogs) and _common_spec(*catalogs) is not None:
        raise WeightConvertError(
            f"{catalogs[0].directory} is of model_type {named[0]!r} and {catalogs[1].directory} of "
            f"{named[1]!r}; compare directories of one family"
        )


def _with_opinion(
    catalogs: tuple[Catalog, Catalog], spec: FamilySpec | None, level: Level
) -> VerifyReport:
    """The comparison by numbers, and what transformers says."""
    kinds = [side.config.get("quantization_config") for side in catalogs]
    opinion = second_opinion(
        catalogs[0].directory,
        catalogs[1].directory,
        logits=level == "logits",
        quantised=kinds != [None, None],
    )
    if kinds[0] == kinds[1]:
        report = _compare(catalogs, spec, level)
    else:
        report = VerifyReport(
            formats=(),
            num_tensors=opinion.num_tensors,
            compared_bytes=0,
            differences=tuple(
                Difference(key=key, detail="quantised otherwise, and transformers does not load it")
                for key in opinion.not_loaded
            ),
        )
    said = [Difference(key=key, detail=detail) for key, detail in opinion.differences.items()]
    if opinion.max_logit_difference is not None and opinion.largest_logit is not None:
        limit = _LOGIT_LIMIT * opinion.largest_logit
        if not opinion.max_logit_difference <= limit:
            detail = f"differ by {opinion.max_logit_difference:.3g}, more than {limit:.3g}"
            said.append(Difference(key="logits", detail=detail))
    return replace(report, differences=report.differences + tuple(said), opinion=opinion)


def _compare(
    catalogs: tuple[Catalog, Catalog], spec: FamilySpec | None, level: Level
) -> VerifyReport:
    """The comparison by names and bytes, or numbers."""
    works = [Computations(num_sources=len(side.files)) for side in catalogs]
    formats, sides = _readings(catalogs, spec, works)
    left, right = ({tensor.key: tensor for tensor in side} for side in sides)
    keys = sorted(left.keys() | right.keys(), key=natural_key)
    differences: list[Difference] = []
    compared_bytes = 0
    with _open(catalogs[0]) as files_a, _open(catalogs[1]) as files_b:
        read = [ReadSide(files=f, work=w) for f, w in zip((files_a, files_b), works, strict=True)]
        for key in keys:
            detail = _headers_differ(left.get(key), right.get(key), level)
            if detail is None and level != "headers":
                if left[key].dtype == right[key].dtype:
                    detail = _bytes_differ(left[key], right[key], read[0], read[1])
                else:
                    _refuse_computed((left[key], works[0]), (right[key], works[1]))
                    detail = numbers_differ(left[key], right[key], files_a, files_b)
                compared_bytes += left[key].size_bytes
            if detail is not None:
                differences.append(Difference(key=key, detail=detail))
    return VerifyReport(
        formats=formats,
        num_tensors=len(keys),
        compared_bytes=compared_bytes,
        differences=tuple(differences),
    )


def _refuse_computed(*sides: tuple[PlannedTensor, Computations]) -> None:
    """Raise where numbers of unlike dtypes would be compared, and one is made of others."""
    for tensor, work in sides:
        if work.is_computed(tensor):
            raise WeightConvertError(
                f"{tensor.key} stands transposed in one of the formats and has unlike dtypes; "
                f"convert that directory into the format fused first, and compare that"
            )


def _readings(
    catalogs: tuple[Catalog, Catalog], spec: FamilySpec | None, works: Sequence[Computations]
) -> tuple[tuple[str, ...], list[list[PlannedTensor]]]:
    """The formats and tensors to compare: in memory where both formats are known and differ."""
    as_they_stand = [[PlannedTensor.of(t) for t in side.tensors.values()] for side in catalogs]
    are_transposed = (catalogs[0].kind == "pdparams") != (catalogs[1].kind == "pdparams")
    if _have_one_layout(*catalogs) and not are_transposed:
        if spec is not None:
            for side in catalogs:
                spec_of(side, spec)
        return (), as_they_stand
    family = spec or _common_spec(*catalogs)
    if family is None:
        return (), as_they_stand
    families = [spec_of(side, family) for side in catalogs]
    formats = tuple(map(detect_format, catalogs, families))
    if formats[0] == formats[1]:
        return formats, as_they_stand
    return formats, [
        in_memory(side, family, name, work)
        for side, name, work in zip(catalogs, formats, works, strict=True)
    ]


def _have_one_layout(a: Catalog, b: Catalog) -> bool:
    """Whether names are the same; in one family, shapes too: a format may turn matrices alone."""
    if a.tensors.keys() != b.tensors.keys():
        return False
    is_one_family = a.config.get("model_type") == b.config.get("model_type")
    return not is_one_family or all(
        tensor.shape == b.tensors[key].shape for key, tensor in a.tensors.items()
    )


def _common_spec(a: Catalog, b: Catalog) -> FamilySpec | None:
    """The family that the config of `a`, or else that of `b`, names; None if it is not known."""
    for side in (a, b):
        try:
            return spec_of(side, None)
        except UnknownFamilyError:
            continue
    return None


def _open(catalog: Catalog) -> OpenFiles:
    return OpenFiles([catalog.directory / name for name in catalog.files])


def _headers_differ(a: PlannedTensor | None, b: PlannedTensor | None, level: Level) -> str | None:
    """Return how presence, dtype or shape differ; None when they agree, or float dtypes may not."""
    if a is None or b is None:
        return f"only in the {'second' if a is None else 'first'} directory"
    are_numbers = level in ("values", "logits") and {a.dtype, b.dtype} <= FLOATS
    if a.shape != b.shape or (a.dtype != b.dtype and not are_numbers):
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    return None


def _bytes_differ(a: PlannedTensor, b: PlannedTensor, in_a: ReadSide, in_b: ReadSide) -> str | None:
    """Return where the bytes of two tensors of one size first differ; None when they are equal."""
    offset = 0
    pairs = zip(blocks(a, in_a, _BLOCK_BYTES), blocks(b, in_b, _BLOCK_BYTES), strict=True)
    for block_a, block_b in pairs:
        if block_a != block_b:
            first = next(
                i for i, pair in enumerate(zip(block_a, block_b, strict=True)) if len(set(pair)) > 1
            )
            return f"bytes differ from byte {offset + first} of {a.size_bytes} on"
        offset += len(block_a)
    return None
