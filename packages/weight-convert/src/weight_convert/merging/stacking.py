"""Layers of several models stacked into a deeper one: copied, nothing computed.

    tensors = stacked(slices, models)

Layers are numbered anew in the order of the slices; what stands outside of layers is the first
model's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weight_convert.errors import WeightConvertError
from weight_convert.merging.config import Slice
from weight_convert.outputs import PlannedTensor, natural_key

_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..*)")


def stacked(
    slices: Sequence[Slice], models: Sequence[Mapping[str, PlannedTensor]]
) -> list[PlannedTensor]:
    """The tensors of the output.

    Args:
        slices: which layers of which model; the models stand in their order.
        models: tensors by name.

    Raises:
        WeightConvertError: a model has not all layers of its slice.
    """
    tensors = [
        replace(tensor, order=(natural_key(key), 0, 0))
        for key, tensor in models[0].items()
        if not _LAYER.fullmatch(key)
    ]
    offset = 0
    for part, model in zip(slices, models, strict=True):
        found: set[int] = set()
        for key, tensor in model.items():
            match = _LAYER.fullmatch(key)
            if match is None or not part.begin <= int(match[2]) < part.end:
                continue
            found.add(int(match[2]))
            name = f"{match[1]}{int(match[2]) - part.begin + offset}{match[3]}"
            tensors.append(replace(tensor, key=name, order=(natural_key(name), 0, 0)))
        missing = sorted(set(range(part.begin, part.end)) - found)
        if missing:
            raise WeightConvertError(
                f"{part.path} has no layer {missing[0]}; layers {part.begin} to {part.end - 1} "
                f"were asked for"
            )
        offset += part.end - part.begin
    return tensors
