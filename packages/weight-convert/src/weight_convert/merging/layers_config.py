"""What a `config.json` says of single layers, where layers of several models are stacked.

A number of layers alone is not enough: lists have an entry for each layer (`layer_types`), or name
layers by their numbers (`mlp_only_layers`), and some rules say by its number what a layer is
(`first_k_dense_replace`). transformers refuses a list of another length, and gives a layer that it
expects to be of another kind new random weights, with no more than a warning.

    stacked_config(slices, configs)      # {"num_hidden_layers": 4, "layer_types": [...]}

Invariant: each layer of the output is by the new config of the kind that it was of by its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weight_convert.errors import WeightConvertError
from weight_convert.merging.config import Slice

_COUNT = "num_hidden_layers"
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
_NUMBERS = ("mlp_only_layers", "moe_layers")
_LAST_MOE = "moe_layer_end_index"
_Config = Mapping[str, Any]
_Rule = Callable[[int, int, int], object]


def _is_every(layer: int, period: int, offset: int) -> bool:
    return layer % max(period, 1) == offset


# What families say of a layer by its number: the entries that are read (the first one must be
# there), and what they make of the layer. An entry that is missing or null counts as 0.
_RULES: tuple[tuple[tuple[str, str], _Rule], ...] = (
    (("first_k_dense_replace", ""), lambda layer, first, _: layer >= first),
    (("moe_layer_freq", ""), lambda layer, step, _: _is_every(layer, step, 0)),
    (("decoder_sparse_step", ""), lambda layer, step, _: _is_every(layer + 1, step, 0)),
    (("expert_layer_period", "expert_layer_offset"), _is_every),
    (("attn_layer_period", "attn_layer_offset"), _is_every),
    (("moe_layer_interval", ""), lambda layer, step, _: _is_every(layer + 1, step, 0)),
    (("moe_layer_start_index", ""), lambda layer, first, _: layer >= first),
    ((_LAST_MOE, ""), lambda layer, last, _: last < 0 or layer <= last),
)


def num_layers(config: _Config) -> int | None:
    """How many layers the decoder has; None where a `config.json` says nothing of it."""
    count = config.get(_entry(config), config).get(_COUNT)
    return count if type(count) is int else None


def stacked_config(slices: Sequence[Slice], configs: Sequence[_Config]) -> dict[str, Any]:
    """Entries of the first model's `config.json` to change.

    Args:
        slices: which layers of which model.
        configs: `config.json` of each slice's model.

    Raises:
        WeightConvertError: a layer would be of another kind than before, or only some of the models
            have a list with an entry for each layer.
    """
    entry = _entry(configs[0])
    inner = [config.get(entry, config) for config in configs]
    places = [
        (part.path, config, layer)
        for part, config in zip(slices, inner, strict=True)
        for layer in range(part.begin, part.end)
    ]
    first = inner[0]
    changes: dict[str, Any] = {_COUNT: len(places)}
    changes |= {name: _by_layer(name, places) for name in _BY_LAYER if name in first}
    changes |= {name: _numbers(name, places) for name in _NUMBERS if name in first}
    count = num_layers(configs[0])
    if _LAST_MOE in first and count is not None and first[_LAST_MOE] == count - 1:
        changes[_LAST_MOE] = len(places) - 1  # which said: to the last layer
    changes = {name: value for name, value in changes.items() if value is not None}
    new = {**first, **changes}
    for layer, (path, config, former) in enumerate(places):
        for name, now, before in _kinds(new, layer, config, former):
            if now != before:
                raise WeightConvertError(
                    f"layer {former} of {path} would be layer {layer}, which is of another kind "
                    f"there: {name} is {first.get(name)!r} in config.json of {slices[0].path}; "
                    f"choose slices that leave each layer where {name} says the same of it"
                )
    return {entry: {**first, **changes}} if entry else changes


def _entry(config: _Config) -> str:
    """The entry that describes the decoder, "" for all of it."""
    inner = config.get("text_config")
    return "text_config" if _COUNT not in config and isinstance(inner, dict) else ""


def _by_layer(name: str, places: Sequence[tuple[str, _Config, int]]) -> list[Any] | None:
    """A list that has one entry for each layer, or None where there is no list."""
    if not any(isinstance(config.get(name), list) for _, config, _ in places):
        return None
    made = []
    for path, config, layer in places:
        known = config.get(name)
        if not isinstance(known, list) or layer >= len(known):
            raise WeightConvertError(
                f"{name} in config.json of {path} is {known!r}; expected a list with an entry for "
                f"layer {layer}, as in the others' config.json"
            )
        made.append(known[layer])
    return made


def _numbers(name: str, places: Sequence[tuple[str, _Config, int]]) -> list[int] | None:
    """A list of the layers' numbers, or None where there is no list."""
    if not any(isinstance(config.get(name), list) for _, config, _ in places):
        return None
    return [
        number
        for number, (_, config, layer) in enumerate(places)
        if layer in (config.get(name) or ())
    ]


def _kinds(
    new: _Config, layer: int, config: _Config, former: int
) -> Iterator[tuple[str, object, object]]:
    """Of each rule its name, what it says of the layer in the output, and what it said before."""
    for names, rule in _RULES:
        if type(new.get(names[0])) is int or type(config.get(names[0])) is int:
            now, before = (
                rule(number, *(_number(found, name) for name in names))
                for found, number in ((new, layer), (config, former))
            )
            yield names[0], now, before


def _number(config: _Config, name: str) -> int:
    value = config.get(name)
    return value if type(value) is int else 0
