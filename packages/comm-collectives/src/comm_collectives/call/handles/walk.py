"""Walk through the tensors inside nested lists, tuples, dicts and dataclasses.

list(tensors_in({"a": [x, (y, None)]}))                    # [x, y]
replace_tensors([x, y], {id(x): z})                        # [z, y]
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors inside nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def replace_tensors(value: Any, new_of: Mapping[int, torch.Tensor]) -> Any:
    """Return the value with the tensors of these ids exchanged, and what holds them made anew."""
    if isinstance(value, torch.Tensor):
        return new_of.get(id(value), value)
    if isinstance(value, list):
        return [replace_tensors(item, new_of) for item in value]
    if type(value) is tuple:
        return tuple(replace_tensors(item, new_of) for item in value)
    if not _is_record(value):
        return value
    changed = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if any(id(tensor) in new_of for tensor in tensors_in(held)):
            changed[field.name] = replace_tensors(held, new_of)
    return dataclasses.replace(value, **changed) if changed else value


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
