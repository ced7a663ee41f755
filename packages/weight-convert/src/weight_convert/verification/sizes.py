"""How many bytes the tensors of a directory have, by name, and on each rank of a layout.

    tensor_tree(catalog)[0].name                            # "lm_head.weight"
    rank_bytes(catalog, SplitLayout(tp=8, ep=8), dtype="fp8")

Headers alone are read.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

from weight_convert._checks import Record
from weight_convert._dtypes import TORCH_NAMES, stored_dtype, takes_fp8
from weight_convert.cutting import ModelCuts, SplitLayout
from weight_convert.errors import WeightConvertError
from weight_convert.files import Catalog, tensor_size_bytes
from weight_convert.outputs import PlannedTensor, natural_key
from weight_convert.plan import detect_format, in_memory, spec_of
from weight_convert.specs import FamilySpec, Matcher, Side

_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")  # whole fields
_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch(Record):
    """Tensors whose names differ in numbers alone, for each dtype and shape of them.

    Attributes:
        name: their name, each number that differs as `*`.
        dtype, shape: of each.
        count: how many.
        size_bytes: of all.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    size_bytes: int


def tensor_tree(catalog: Catalog) -> tuple[Branch, ...]:
    """The stored tensors of a directory, numbers taken together, in natural order."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for key in sorted(catalog.tensors, key=natural_key):
        tensor = catalog.tensors[key]
        kind = (_NUMBERS.sub("*", key), tensor.dtype, tensor.shape)
        counts[kind] += 1
        sizes[kind] += tensor.size_bytes
    return tuple(
        Branch(name=name, dtype=dtype, shape=shape, count=counts[name, dtype, shape], size_bytes=n)
        for (name, dtype, shape), n in sizes.items()
    )


def rank_bytes(
    catalog: Catalog, layout: SplitLayout, *, spec: FamilySpec | None = None, dtype: str = ""
) -> tuple[int, ...]:
    """The bytes of weights that each rank of a layout holds.

    Args:
        catalog: the directory.
        layout: the degrees.
        spec: the family; None takes it from `config.json`.
        dtype: "" as stored; "bfloat16", "float16", "float32" for all parameters; "fp8" for the
            matrices that `quantize` takes, in blocks of 128 x 128 with one scale each, other
            tensors as stored.

    Raises:
        UnknownFamilyError: no spec is given and `config.json` names no known family.
        IncompleteExpertsError: experts are missing or differ.
        WeightConvertError: a tensor cannot be cut, or an unknown dtype.
    """
    if dtype not in ("", "fp8", *TORCH_NAMES):
        raise WeightConvertError(f"dtype {dtype!r}; expected one of fp8, {', '.join(TORCH_NAMES)}")
    family = spec_of(catalog, spec)
    tensors = in_memory(catalog, family, detect_format(catalog, family))
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    model = ModelCuts.of(shapes, family, catalog.config, layout)
    roles = Matcher([Side(names=(name,), groups=()) for name in family.tensors], family.companions)
    notes = list(family.tensors.values())
    held = [0] * layout.world_size
    for tensor in tensors:
        member = roles.find(tensor.key)
        role = "" if member is None else notes[member.side].role
        is_scale = member is not None and bool(member.suffix)
        for rank in range(layout.world_size):
            local = model.shape_on(rank, tensor.key, tensor.shape)
            if local is not None and not (is_scale and dtype):
                held[rank] += _size_in(tensor, local, role, dtype)
    return tuple(held)


def _size_in(tensor: PlannedTensor, shape: tuple[int, ...], role: str, dtype: str) -> int:
    """The bytes of a tensor's part of this shape once it is in `dtype`."""
    is_parameter = role not in ("", "buffer")
    if dtype == "fp8" and takes_fp8(tensor.key, role, shape):
        *_, rows, columns = shape
        blocks = -(-rows // _FP8_BLOCK) * -(-columns // _FP8_BLOCK)
        return math.prod(shape) + 4 * blocks * math.prod(shape[:-2])
    if dtype and dtype != "fp8" and is_parameter:
        return tensor_size_bytes(stored_dtype(dtype), shape)
    return tensor_size_bytes(tensor.dtype, shape)
