"""Python values as JSON, and back to the types that a template has.

JSON knows neither tuples nor dicts whose keys are numbers (the milestones of a scheduler). Such a
dict becomes `{"@items": [[key, value], ...]}`; a tuple becomes a list, and a tuple again where the
state that is loaded into has one.

    restore_value(encode_value({30: (1, 2)}, "milestones"), {30: (0, 0)})  # {30: (1, 2)}
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from unified_ckpt.errors import CheckpointTypeError

_ITEMS = "@items"
_PLAIN = (bool, int, float, str)


def encode_value(value: Any, path: str) -> Any:
    """Return a value as JSON types."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [encode_value(item, f"{path}.{number}") for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        encoded = [(name, encode_value(item, f"{path}.{name}")) for name, item in value.items()]
        if all(type(name) is str and name != _ITEMS for name, _ in encoded):
            return dict(encoded)
        return {_ITEMS: [[encode_value(name, f"{path} key"), item] for name, item in encoded]}
    raise CheckpointTypeError(
        f"{path}: a {type(value).__name__} is neither a tensor nor a JSON value (bool, int, "
        "float, str, None, lists and dicts of them); convert it or add it to ignored_keys"
    )


def restore_value(encoded: Any, template: Any) -> Any:
    """Return what `encode_value` was given, with the template's collection types where they fit."""
    if isinstance(encoded, list):
        items: list[Any] = [None] * len(encoded)
        if isinstance(template, list | tuple) and len(template) == len(encoded):
            items = list(template)
        restored = [restore_value(e, t) for e, t in zip(encoded, items, strict=True)]
        return like_tuple(template, restored) if isinstance(template, tuple) else restored
    if isinstance(encoded, dict):
        pairs = encoded[_ITEMS] if encoded.keys() == {_ITEMS} else encoded.items()
        known = template if isinstance(template, Mapping) else {}
        values = {name: restore_value(item, known.get(name)) for name, item in pairs}
        if not isinstance(template, dict):
            return values
        like = copy.copy(template)  # a defaultdict keeps its factory
        like.clear()
        like.update(values)
        return like
    return encoded


def like_tuple(template: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """Return items as a tuple, as a named one where the template is one of that many fields."""
    make = getattr(type(template), "_make", None)
    return make(items) if make is not None and len(template) == len(items) else tuple(items)


def find_value(values: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Look a dotted path up among saved values; return whether it is there, and the value.

    A dict is saved as one value, or item by item where it holds tensors too or something of it is
    ignored; what was saved in the one way is found in the other.
    """
    if path in values:
        return True, values[path]
    head, dot, tail = path.rpartition(".")
    while dot:
        if isinstance(values.get(head), dict) and head in values:
            found, value = find_value(values[head], tail)
            if found:
                return True, value
        head, dot, more = head.rpartition(".")
        tail = f"{more}.{tail}"
    prefix = f"{path}."
    items = {
        name.removeprefix(prefix): item for name, item in values.items() if name.startswith(prefix)
    }
    nested: dict[str, Any] = {}
    for name, item in items.items():
        *outer, last = name.split(".")
        place = nested
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = item
    return bool(nested), nested
