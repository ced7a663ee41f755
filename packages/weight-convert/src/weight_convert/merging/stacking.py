"""Layers of several models stacked into a deeper one: copied, nothing computed.

    tensors = stacked(slices, models, counts)

Layers of the decoder are numbered anew in the order of the slices; what stands outside of them is
the first model's, layers of a vision tower or of multi-token prediction included: these stand
behind the last layer, with numbers above those that `config.json` counts, or under another name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weight_convert.errors import WeightConvertError
from weight_convert.merging.config import Slice
from weight_convert.outputs import PlannedTensor, natural_key

_LAYER = re.compile(r"((?:.*?\.)??layers\.)\d+\..*")
# What a decoder's path is made of where other parts have layers too.
_OF_DECODER = re.compile(
    r"((model|language_model|text_model|decoder|transformer|backbone|llm)\.)*layers\."
)


def stacked(
    slices: Sequence[Slice],
    models: Sequence[Mapping[str, PlannedTensor]],
    counts: Sequence[int | None],
) -> list[PlannedTensor]:
    """The tensors of the output.

    Args:
        slices: which layers of which model; the models stand in their order.
        models: tensors by name.
        counts: how many layers each model's decoder has, as its `config.json` says; None where
            it does not, and then all of them are the decoder's.

    Raises:
        WeightConvertError: a model has not all layers of its slice, or names do not tell which
            layers are the decoder's.
    """
    decoder = _decoder(slices[0].path, models[0])
    of_layer = re.compile(re.escape(decoder) + r"(\d+)(\..*)")
    tensors = _outside(models[0], of_layer, counts[0], sum(p.end - p.begin for p in slices))
    offset = 0
    for part, model, count in zip(slices, models, counts, strict=True):
        if count is not None and part.end > count:
            raise WeightConvertError(
                f"{part.path} has no layer {part.end - 1} in its decoder, which has {count} "
                f"(config.json); layers {part.begin} to {part.end - 1} were asked for"
            )
        found: set[int] = set()
        for key, tensor in model.items():
            match = of_layer.fullmatch(key)
            if match is None or not part.begin <= int(match[1]) < part.end:
                continue
            found.add(int(match[1]))
            name = f"{decoder}{int(match[1]) - part.begin + offset}{match[2]}"
            tensors.append(_named(tensor, name))
        missing = sorted(set(range(part.begin, part.end)) - found)
        if missing:
            raise WeightConvertError(
                f"{part.path} has no layer {missing[0]}; layers {part.begin} to {part.end - 1} "
                f"were asked for"
            )
        offset += part.end - part.begin
    return tensors


def _named(tensor: PlannedTensor, name: str) -> PlannedTensor:
    return replace(tensor, key=name, order=(natural_key(name), 0, 0))


def _outside(
    model: Mapping[str, PlannedTensor], of_layer: re.Pattern[str], count: int | None, stacked: int
) -> list[PlannedTensor]:
    """The tensors outside of the decoder's layers; what stands behind those stays behind them."""
    tensors = []
    for key, tensor in model.items():
        match = of_layer.fullmatch(key)
        if match is None:
            tensors.append(_named(tensor, key))
        elif count is not None and int(match[1]) >= count:
            number = int(match[1]) - count + stacked
            tensors.append(_named(tensor, f"{key[: match.start(1)]}{number}{match[2]}"))
    return tensors


def _decoder(path: str, model: Mapping[str, PlannedTensor]) -> str:
    """What stands before the numbers of the decoder's layers."""
    matches = [match for match in map(_LAYER.fullmatch, model) if match is not None]
    found = sorted({match[1] for match in matches})
    known = [name for name in found if len(found) == 1 or _OF_DECODER.fullmatch(name)]
    has_encoder = any(name.replace("decoder.", "encoder.") in {*found} - {name} for name in known)
    if found and (len(known) != 1 or has_encoder):
        raise WeightConvertError(
            f"{path} has layers under {', '.join(found)}, and their names do not say which are "
            f"those of one decoder; passthrough stacks decoders alone, so merge such models by "
            f"another method"
        )
    return known[0] if found else "layers."
