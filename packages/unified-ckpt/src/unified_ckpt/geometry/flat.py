"""Flat ranges of row-major tensors as boxes: what sharding stage 1 and flat FSDP parameters hold.

A rank that holds elements 5 to 20 of a (4, 6) tensor holds the end of a row, whole rows, and the
start of another: at most 2 * dims - 1 boxes, whose row-major elements follow each other in the
range. So a flat shard is planned, checked, written and read like any other.

    flat_boxes((4, 6), 5, 20)  # [((0, 5), (1, 1)), ((1, 0), (2, 6)), ((3, 0), (1, 2))]
"""

import math

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry.regions import Shape


def flat_boxes(shape: Shape, begin: int, end: int) -> list[tuple[Shape, Shape]]:
    """Decompose elements `begin` to `end` of a row-major tensor into (offset, shape) boxes.

    The boxes are in row-major order and none is empty; an empty range gives none.
    """
    if not 0 <= begin <= end <= math.prod(shape):
        raise CheckpointValueError(
            f"flattened_range ({begin}, {end}) does not lie in the {math.prod(shape)} elements "
            f"of {shape}"
        )
    return _boxes(shape, begin, end) if begin < end else []


def _boxes(shape: Shape, begin: int, end: int) -> list[tuple[Shape, Shape]]:
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = begin // inner, (end - 1) // inner
    starts_inside, ends_inside = begin % inner != 0, end % inner != 0
    if first == last and (starts_inside or ends_inside):
        return _row(shape, first, begin - first * inner, end - first * inner)
    head = _row(shape, first, begin - first * inner, inner) if starts_inside else []
    tail = _row(shape, last, 0, end - last * inner) if ends_inside else []
    top, bottom = first + starts_inside, last + 1 - ends_inside
    rest = (0,) * (len(shape) - 1)
    middle = [((top, *rest), (bottom - top, *shape[1:]))] if bottom > top else []
    return [*head, *middle, *tail]


def _row(shape: Shape, row: int, begin: int, end: int) -> list[tuple[Shape, Shape]]:
    return [((row, *o), (1, *s)) for o, s in _boxes(shape[1:], begin, end)]


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `value`."""
    return value + -value % unit
