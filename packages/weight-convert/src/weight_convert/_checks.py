"""Checks of arguments: one of a wrong type is named before any work is done."""

import os
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from weight_convert.errors import WeightConvertError, WeightConvertTypeError


def check_kind(value: object, kind: type | tuple[type, ...], rule: str) -> None:
    """Raise WeightConvertTypeError with the `rule` that is broken unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise WeightConvertTypeError(f"{rule}, got the {type(value).__name__} {value!r}")


def check_sizes(record: object, *names: str) -> None:
    """Raise WeightConvertError unless each of these fields is 1 or more, or None."""
    for name in names:
        value = getattr(record, name)
        if value is not None and value < 1:
            raise WeightConvertError(f"{name}={value}; expected at least 1")


def is_block(value: object) -> TypeGuard[list[int]]:
    """Whether a `weight_block_size` of a config is rows and columns."""
    sizes = value if isinstance(value, list) else []
    return len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a `Path`."""
    check_kind(path, (str, os.PathLike), "a directory or file must be given as a str or a Path")
    return Path(path)


class Record:
    """Base of dataclasses whose fields are checked against their annotations when one is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kinds in _kinds_of_fields(type(self)):  # type: ignore[arg-type]
            check_kind(getattr(self, name), kinds, f"{name} has a wrong type")


@cache
def _kinds_of_fields(record: type) -> tuple[tuple[str, tuple[type, ...]], ...]:
    return tuple((name, _kinds(hint)) for name, hint in get_type_hints(record).items())


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes of an annotation: `Mapping[str, int] | None` is Mapping or None."""
    origin = get_origin(hint)
    if origin in (UnionType, Union):
        return tuple(kind for part in get_args(hint) for kind in _kinds(part))
    if hint is float:
        return float, int  # as Python takes one for the other
    return (str,) if origin is Literal else (origin or hint,)
