"""Geometry of boxes inside stored tensors, and where their bytes lie in a file.

A stored tensor is row-major in its file, so a box of it is a strided set of equally long runs of
bytes: a `Region`. The row-major bytes of the box are the runs one after the other.

    box_region((4, 6), (0, 2), (4, 3), itemsize_bytes=2, start=100)
    # Region(start=104, run_bytes=6, counts=(4,), strides=(12,))
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Region(NamedTuple):
    """Runs of bytes in a file: run (i, j, ...) begins at `start + i*strides[0] + j*strides[1] ...`.

    `counts` and `strides` (bytes) are empty for one contiguous run.
    """

    start: int
    run_bytes: int
    counts: Shape = ()
    strides: Shape = ()

    @property
    def contiguous(self) -> bool:
        """Whether the region is one run."""
        return not self.counts

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return self.run_bytes * math.prod(self.counts)

    @property
    def end(self) -> int:
        """The byte after the last one of the region."""
        if not self.counts:
            return self.start + self.run_bytes
        last = sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True))
        return self.start + last + self.run_bytes

    def run_starts(self) -> Iterator[int]:
        """Yield the file offset of every run, in row-major order of the box."""
        if not self.counts:
            yield self.start
            return
        *outer, inner = (range(0, n * s, s) for n, s in zip(self.counts, self.strides, strict=True))
        for steps in itertools.product(*outer):
            start = self.start + sum(steps)
            yield from range(start, start + inner.stop, inner.step)


def box_region(
    global_shape: Sequence[int],
    offset: Sequence[int],
    shape: Sequence[int],
    *,
    itemsize_bytes: int,
    start: int,
) -> Region:
    """Return where a non-empty box of a row-major tensor that begins at byte `start` lies."""
    if shape == global_shape:
        return Region(start, math.prod(shape) * itemsize_bytes)
    strides = [0] * len(global_shape)
    step = itemsize_bytes
    for dim in reversed(range(len(global_shape))):
        strides[dim] = step
        step *= global_shape[dim]
    first = start + sum(o * s for o, s in zip(offset, strides, strict=True))
    run_bytes = itemsize_bytes
    counts: list[int] = []
    outer: list[int] = []
    for dim in reversed(range(len(global_shape))):
        if shape[dim] == 1:
            continue
        if not counts and strides[dim] == run_bytes:
            run_bytes *= shape[dim]
        elif counts and strides[dim] == counts[0] * outer[0]:
            counts[0] *= shape[dim]
        else:
            counts.insert(0, shape[dim])
            outer.insert(0, strides[dim])
    return Region(first, run_bytes, tuple(counts), tuple(outer))


def split_box(shape: Shape, itemsize_bytes: int, chunk_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box into (offset, shape) sub-boxes of at most `chunk_bytes`, in row-major order.

    The sub-boxes follow each other in the box's row-major bytes, so each of them is contiguous
    wherever the box is. One element is never cut. An empty box yields nothing.
    """
    total = math.prod(shape) * itemsize_bytes
    if total == 0:
        return
    if total <= chunk_bytes or not shape:
        yield (0,) * len(shape), shape
        return
    dim, inner = 0, total // shape[0]
    while inner > chunk_bytes and dim + 1 < len(shape):
        dim += 1
        inner //= shape[dim]
    step = max(1, chunk_bytes // inner)
    tail_offset, tail_shape = (0,) * (len(shape) - dim - 1), shape[dim + 1 :]
    for index in itertools.product(*(range(n) for n in shape[:dim])):
        for begin in range(0, shape[dim], step):
            length = min(step, shape[dim] - begin)
            yield (*index, begin, *tail_offset), (*((1,) * dim), length, *tail_shape)


def check_tiling(global_shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> str | None:
    """Say how (offset, shape) boxes fail to cover a tensor exactly once, or None if they do.

    The boxes must be non-empty and inside the tensor. The cost of a sharding without fault is
    linear in its boxes; only the search for the fault's place costs more.
    """
    if _tiles(global_shape, boxes):
        return None
    clash = _find_overlap(boxes) if len(boxes) > 1 else None
    if clash is not None:
        a, b = boxes[clash[0]], boxes[clash[1]]
        return f"{describe_box(*a)} and {describe_box(*b)} overlap without being equal"
    held = sum(math.prod(shape) for _, shape in boxes)
    wanted = math.prod(global_shape)
    return (
        f"no rank holds {wanted - held} of its {wanted} elements; "
        f"held: {', '.join(describe_box(*b) for b in boxes[:4]) or 'nothing'}"
        + (f" and {len(boxes) - 4} more" if len(boxes) > 4 else "")
    )


def _tiles(global_shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether boxes cover a tensor exactly once.

    A box is determined by its corners with alternating signs (the mixed difference of its indicator
    function), and sums of boxes by the sums of their corners. So the boxes tile the tensor if and
    only if all inner corners cancel and those of the tensor remain.
    """
    if len(boxes) == 1 and boxes[0][1] == global_shape:
        return True
    if math.prod(global_shape) == 0:
        return not boxes
    cut = [d for d, n in enumerate(global_shape) if any(shape[d] != n for _, shape in boxes)]
    if not cut or not boxes:
        return False
    corners: dict[tuple[int, ...], int] = defaultdict(int)
    for sign, box in ((-1, ((0,) * len(global_shape), global_shape)), *((1, b) for b in boxes)):
        offset, shape = box
        ends = [((offset[d], 1), (offset[d] + shape[d], -1)) for d in cut]
        for corner in itertools.product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * math.prod(s for _, s in corner)
    return not any(corners.values())


def overlap(a: tuple[Shape, Shape], b: tuple[Shape, Shape]) -> tuple[Shape, Shape] | None:
    """Return the (offset, shape) box that two boxes share, None if it is empty."""
    offset, shape = [], []
    for a_begin, a_size, b_begin, b_size in zip(*a, *b, strict=True):
        begin, end = max(a_begin, b_begin), min(a_begin + a_size, b_begin + b_size)
        if begin >= end:
            return None
        offset.append(begin)
        shape.append(end - begin)
    return tuple(offset), tuple(shape)


def describe_box(offset: Shape, shape: Shape) -> str:
    """Write a box as slices: `[0:4, 6:12]`."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True)) + "]"


def _find_overlap(boxes: Sequence[tuple[Shape, Shape]]) -> tuple[int, int] | None:
    num_dims = len(boxes[0][0])
    if num_dims == 0:
        return (0, 1)
    dim = max(range(num_dims), key=lambda d: len({offset[d] for offset, _ in boxes}))
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][0][dim])
    active: list[int] = []
    for i in order:
        offset, shape = boxes[i]
        active = [j for j in active if boxes[j][0][dim] + boxes[j][1][dim] > offset[dim]]
        for j in active:
            other_offset, other_shape = boxes[j]
            if all(
                offset[d] < other_offset[d] + other_shape[d]
                and other_offset[d] < offset[d] + shape[d]
                for d in range(num_dims)
            ):
                return (j, i)
        active.append(i)
    return None
