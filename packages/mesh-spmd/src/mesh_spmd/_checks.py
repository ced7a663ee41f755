"""Checks of arguments that several modules share, so that equal mistakes give equal messages."""

import operator
from collections.abc import Iterable
from types import UnionType
from typing import SupportsIndex

from mesh_spmd.errors import MeshTypeError, MeshValueError

RANKS_AT_MOST = 1 << 24  # of a mesh, and of a list of ranks


def check_kind(value: object, kind: type | UnionType, rule: str) -> None:
    """Raise MeshTypeError with the `rule` that is broken unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise MeshTypeError(f"{rule}, got the {type(value).__name__} {value!r}")


def checked_sizes(
    sizes: Iterable[SupportsIndex], *, what: str, smallest_size: int
) -> tuple[int, ...]:
    """Return `sizes` as a tuple of plain integers.

    Raises:
        MeshTypeError: `sizes` is not a sequence of integers.
        MeshValueError: a size is below `smallest_size`.
    """
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise MeshTypeError(f"{what} must be a sequence of integers, got {sizes!r}")
    items = tuple(sizes)
    try:
        checked = tuple(operator.index(item) for item in items)
    except TypeError as error:
        raise MeshTypeError(f"{what} must hold integers only, got {items!r}") from error
    for position, size in enumerate(checked):
        if size < smallest_size:
            raise MeshValueError(
                f"{what}[{position}] is {size} in {checked}; it must be at least {smallest_size}"
            )
    return checked
