"""Checking of tuples of sizes, shared by meshes and tensors so that both give the same message."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from mesh_spmd.errors import MeshTypeError, MeshValueError


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
