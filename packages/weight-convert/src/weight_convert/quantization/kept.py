"""The file of kept scales, by which a dequantised model is quantised again bit for bit.

It stands beside the weights as `quantization.kept`, a safetensors file that no loader reads: all
scales under their names, the `quantization_config`, and the codes of the few tensors whose scales
are so extreme that plain numbers could not hold them.

    kept = read_kept(catalog)
    kept.tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files import Catalog, SourceTensor, read_header
from weight_convert.outputs import PlannedTensor, TargetFile, lay_out
from weight_convert.staging import OpenFiles

KEPT_NAME = "quantization.kept"
_ENTRY = "quantization_config"
# By dtype of scales: how to read them, and between which bits every code comes back from bfloat16
# and float32, whose normal numbers end at 2 ** -126 and 2 ** 128. Codes of e4m3 lie between 2 ** -9
# and 448, those of e2m1 between 0.5 and 6; numbers below 0 have larger bits than all of these.
_SAFE: Mapping[str, tuple[str, int, int]] = {
    "F32": ("I", (127 - 117) << 23, (127 + 118) << 23),
    "BF16": ("H", (127 - 117) << 7, (127 + 118) << 7),
    "F8_E8M0": ("B", 127 - 117, 127 + 118),
    "U8": ("B", 2, 127 + 125),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the file holds."""

    tensors: Mapping[str, SourceTensor]
    config: Mapping[str, Any]


def read_kept(catalog: Catalog) -> Kept | None:
    """The kept scales of a directory, with files numbered behind its weights; None without them.

    Raises:
        CorruptFileError: the file is damaged.
    """
    path = catalog.directory / KEPT_NAME
    if not path.exists():
        return None
    header = read_header(path)
    try:
        config = json.loads(header.metadata[_ENTRY])
    except (KeyError, json.JSONDecodeError) as error:
        raise CorruptFileError(f"{path} has no {_ENTRY} in its metadata") from error
    tensors = {
        entry.key: SourceTensor(
            key=entry.key,
            dtype=entry.dtype,
            shape=entry.shape,
            file=len(catalog.files),
            offset_bytes=entry.offset_bytes,
            size_bytes=entry.size_bytes,
        )
        for entry in header.tensors
    }
    return Kept(tensors=tensors, config=config)


def kept_file(tensors: Sequence[PlannedTensor], config: Mapping[str, Any]) -> TargetFile:
    """The file to write."""
    return lay_out(KEPT_NAME, tensors, {_ENTRY: json.dumps(config, sort_keys=True)})


def is_safe(catalog: Catalog, scales: SourceTensor) -> bool:
    """Whether every code comes back by these scales; reads them.

    Raises:
        WeightConvertError: scales of a dtype that is not known.
        CorruptFileError: a file became shorter meanwhile.
    """
    if scales.dtype not in _SAFE:
        raise WeightConvertError(
            f"{scales.key} is {scales.dtype}; scales are known in {', '.join(_SAFE)}"
        )
    kind, low, high = _SAFE[scales.dtype]
    with OpenFiles([catalog.directory / name for name in catalog.files]) as files:
        content = b"".join(PlannedTensor.of(scales).read(0, scales.size_bytes, files))
    bits = array(kind, content)
    return not bits or (low <= min(bits) and max(bits) <= high)
