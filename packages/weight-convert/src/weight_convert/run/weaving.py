"""Carry out a `Weave` in bounded memory, without torch: ranges are read, cut into rows, and joined.

for chunk in woven(computed.operation, computed, files): ...
"""

from collections.abc import Iterator

from weight_convert.outputs import Computed, PlannedTensor, Weave
from weight_convert.staging import OpenFiles

BLOCK_BYTES = 1 << 20
_MOST_ROWS = 1 << 13  # each is an object meanwhile


def woven(weave: Weave, computed: Computed, files: OpenFiles) -> Iterator[memoryview]:
    """Yield the bytes of the result in order.

    Raises:
        CorruptFileError: a file became shorter meanwhile.
    """
    if weave.begins_with:
        yield memoryview(weave.begins_with)
    widest = max((run.stride_bytes for run in weave.runs), default=1)
    step = min(max(1, BLOCK_BYTES // max(widest, 1)), _MOST_ROWS)
    for row in range(0, weave.num_rows, step):
        if step > 1:
            yield _rows(weave, computed, files, row, min(step, weave.num_rows - row))
            continue
        for run in weave.runs:
            begin = run.offset_bytes + row * run.stride_bytes
            yield from _range(computed.inputs[run.input], begin, begin + run.size_bytes, files)
    for begin in range(0, weave.zero_bytes, BLOCK_BYTES):
        yield memoryview(bytes(min(BLOCK_BYTES, weave.zero_bytes - begin)))


def _rows(weave: Weave, computed: Computed, files: OpenFiles, row: int, count: int) -> memoryview:
    """Some short rows."""
    parts: list[list[memoryview]] = []
    for run in weave.runs:
        begin = run.offset_bytes + row * run.stride_bytes
        size_bytes = (count - 1) * run.stride_bytes + run.size_bytes
        tensor = computed.inputs[run.input]
        block = memoryview(b"".join(tensor.read(begin, size_bytes, files)))
        parts.append([block[i * run.stride_bytes :][: run.size_bytes] for i in range(count)])
    return memoryview(b"".join(part for of_row in zip(*parts, strict=True) for part in of_row))


def _range(tensor: PlannedTensor, begin: int, end: int, files: OpenFiles) -> Iterator[memoryview]:
    """A long range, block by block."""
    for offset in range(begin, end, BLOCK_BYTES):
        length = min(BLOCK_BYTES, end - offset)
        yield memoryview(b"".join(tensor.read(offset, length, files)))
