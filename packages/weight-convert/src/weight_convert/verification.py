"""Prove that two model directories hold the same tensors, bit for bit, in any form and files.

Both sides are read as their per-expert tensors, so a fused directory can be held against a
per-expert one, and one file against many. Bytes are compared, never numbers: NaN, -0.0 and every
bit count.

    verify("Qwen3-30B-A3B", "fused").equal      # True
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weight_convert._checks import Record, check_kind
from weight_convert.catalog import Catalog, detect_spec, read_catalog
from weight_convert.copying import OpenFiles
from weight_convert.errors import CorruptFileError, UnknownFamilyError
from weight_convert.families import FamilySpec
from weight_convert.regroup import Piece, TargetTensor, natural_key, split_experts

_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that is not the same on both sides, by its per-expert name, and how."""

    key: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Record):
    """Result of a comparison.

    Attributes:
        num_tensors: per-expert tensors found on either side.
        compared_bytes: tensor bytes that were read and compared on each side.
        differences: what differs, in natural key order; empty when the directories hold the same.
    """

    num_tensors: int
    compared_bytes: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether keys, dtypes, shapes and all bytes are the same."""
        return not self.differences


def verify(a: Path | str, b: Path | str, *, spec: FamilySpec | None = None) -> VerifyReport:
    """Compare the tensors of two model directories bit for bit; the forms may differ.

    Args:
        a: a model directory.
        b: another one.
        spec: the family of both; None takes it from the `config.json` of either directory.

    Returns:
        What was compared and what differs. Only tensors count: metadata and other files do not.

    Raises:
        UnknownFamilyError: no spec is given and neither `config.json` names a known family.
        WeightConvertError: a directory is damaged or has no weights.
    """
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    catalogs = (read_catalog(a), read_catalog(b))
    family = spec if spec is not None else _common_spec(*catalogs)
    left, right = ({t.key: t for t in split_experts(side, family)} for side in catalogs)
    keys = sorted(left.keys() | right.keys(), key=natural_key)
    differences: list[Difference] = []
    compared_bytes = 0
    with _open(catalogs[0]) as files_a, _open(catalogs[1]) as files_b:
        for key in keys:
            detail = _headers_differ(left.get(key), right.get(key))
            if detail is None:
                detail = _bytes_differ(left[key], right[key], files_a, files_b)
                compared_bytes += left[key].size_bytes
            if detail is not None:
                differences.append(Difference(key=key, detail=detail))
    return VerifyReport(
        num_tensors=len(keys), compared_bytes=compared_bytes, differences=tuple(differences)
    )


def _common_spec(a: Catalog, b: Catalog) -> FamilySpec:
    """Return the family that the config of `a`, or else that of `b`, names."""
    try:
        return detect_spec(a.directory)
    except UnknownFamilyError:
        return detect_spec(b.directory)


def _open(catalog: Catalog) -> OpenFiles:
    return OpenFiles([catalog.directory / name for name in catalog.files])


def _headers_differ(a: TargetTensor | None, b: TargetTensor | None) -> str | None:
    """Return how presence, dtype or shape differ; None when they agree."""
    if a is None or b is None:
        return f"only in the {'second' if a is None else 'first'} directory"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    return None


def _bytes_differ(
    a: TargetTensor, b: TargetTensor, files_a: OpenFiles, files_b: OpenFiles
) -> str | None:
    """Return where the bytes of two tensors of one size first differ; None when they are equal."""
    offset = 0
    for block_a, block_b in zip(_blocks(a, files_a), _blocks(b, files_b), strict=True):
        if block_a != block_b:
            first = next(
                i for i, pair in enumerate(zip(block_a, block_b, strict=True)) if len(set(pair)) > 1
            )
            return f"bytes differ from byte {offset + first} of {a.size_bytes} on"
        offset += len(block_a)
    return None


def _blocks(tensor: TargetTensor, files: OpenFiles) -> Iterator[bytes]:
    """Yield the bytes of a tensor, which is one piece in the per-expert form, block by block."""
    (piece,) = tensor.pieces
    for begin in range(0, piece.size_bytes, _BLOCK_BYTES):
        yield _read(piece, begin, min(_BLOCK_BYTES, piece.size_bytes - begin), files)


def _read(piece: Piece, begin: int, size_bytes: int, files: OpenFiles) -> bytes:
    """Read a range of a piece in full."""
    parts: list[bytes] = []
    while size_bytes > 0:
        part = os.pread(files.fd(piece.file), size_bytes, piece.offset_bytes + begin)
        if not part:
            raise CorruptFileError("a weight file became shorter while it was compared")
        parts.append(part)
        begin += len(part)
        size_bytes -= len(part)
    return b"".join(parts)
