"""What a run will have resident at its peak, and chunks small enough for a limit.

    memory = Memory.of(plan, limit_bytes=512 << 20)
    memory.peak_bytes               # of this process, imports and the plan included
    memory.elements(computed)       # how many elements of a tensor may be computed at once

Copies need nothing of this process. A computed tensor needs what its operation holds whole
(factors, scales, ranks) and some bytes for each element of a chunk; the counts below are those of
the kernels in `compute/`, and a test holds them against what is measured.
"""

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from weight_convert.errors import WeightConvertError
from weight_convert.files import tensor_size_bytes
from weight_convert.operations import (
    AddLowRank,
    Cast,
    Combine,
    DrawRows,
    Factorise,
    FromBlocks,
    FromMx,
    Operation,
    ToBlocks,
    ToMx,
    Transpose,
)
from weight_convert.outputs import Computed, FilePlan, Weave
from weight_convert.run.weaving import BLOCK_BYTES

_STATUS = Path("/proc/self/status")
_BAND = 24  # bytes of a transposed band for each element of a chunk
_RANKS = 3 << 20
_COPYING = 2 << 20  # the other thread, small buffers, headers
_COMPUTING = 12 << 20  # what torch sets up when it first computes
_LIBRARIES = 16 << 20  # pages of code that sort and multiply


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """Bytes that one computed tensor takes.

    Attributes:
        whole: whatever the chunks.
        each: for each element of a chunk.
        band: for each element of a chunk, at most the bytes of one matrix.
        row: elements that a chunk holds at least.
        most: elements of a chunk where nothing limits them.
    """

    whole: int = 0
    each: int = 0
    band: int = 0
    row: int = 1
    most: int = Operation.CHUNK_ELEMENTS

    def at(self, computed: Computed, elements: int) -> int:
        """Bytes with chunks of so many elements."""
        rows, columns = (1, 1, *computed.shape)[-2:]
        matrix = tensor_size_bytes(computed.dtype, (rows, columns))
        held = min(max(elements, self.row), max(prod(computed.shape), 1))
        return self.whole + self.each * held + min(self.band * elements, matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a run.

    Attributes:
        peak_bytes: resident memory of this process at its peak, or None where torch is needed and
            absent.
        buffer_bytes: what a computed tensor may take; None for no limit.
    """

    peak_bytes: int | None
    buffer_bytes: int | None = None

    @classmethod
    def of(cls, plan: FilePlan, limit_bytes: int | None) -> "Memory":
        """What a plan needs, under a limit on the resident memory of this process.

        Raises:
            WeightConvertError: the limit is too low, whatever the chunks.
        """
        computed = [one for one in plan.computed if type(one.operation) is not Weave]
        if computed and not _has_torch():
            return cls(peak_bytes=None)
        base = _resident("VmRSS") + (_COMPUTING if computed else _COPYING)
        memory = cls(peak_bytes=None, buffer_bytes=limit_bytes and limit_bytes - base)
        if limit_bytes is not None and limit_bytes < base:
            raise WeightConvertError(_TOO_LOW.format(limit_bytes, "this process", base))
        sizes: set[tuple[object, ...]] = set()  # experts are many, and alike
        most = 0
        for one in plan.computed:
            kind = (one.operation, one.shape, one.dtype, *((i.shape, i.dtype) for i in one.inputs))
            if kind not in sizes:
                sizes.add(kind)
                most = max(most, _need(one).at(one, memory.elements(one)))
        return cls(
            peak_bytes=max(base + most, _resident("VmHWM")), buffer_bytes=memory.buffer_bytes
        )

    def elements(self, computed: Computed) -> int:
        """How many elements of a tensor may be computed at once.

        Raises:
            WeightConvertError: none, under this limit.
        """
        need = _need(computed)
        elements = need.most
        if self.buffer_bytes is None:
            return elements
        while elements > 1 and need.at(computed, elements) > self.buffer_bytes:
            elements //= 2
        lowest = need.at(computed, elements)
        if lowest > self.buffer_bytes:
            limit = _resident("VmRSS") + self.buffer_bytes
            lowest += limit - self.buffer_bytes
            raise WeightConvertError(_TOO_LOW.format(limit, computed.key, lowest))
        return elements


_TOO_LOW = "max_memory is {} bytes, but {} needs {}; give more, or leave it out for what is fastest"


def _has_torch() -> bool:
    """Import what computes, as the run will, so that it counts as resident."""
    try:
        import_module("weight_convert.compute")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return False
    return True


def _resident(field: str) -> int:
    """VmRSS or VmHWM in bytes; where the kernel is not Linux's, the peak stands for both."""
    if not _STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _need(computed: Computed) -> _Need:
    return _NEEDS[type(computed.operation)](computed.operation, computed)


def _bytes(computed: Computed, number: int) -> int:
    """Of an element of an input."""
    return tensor_size_bytes(computed.inputs[number].dtype, (1,))


def _cast(_: Operation, computed: Computed) -> _Need:
    return _Need(each=_bytes(computed, 0) + tensor_size_bytes(computed.dtype, (1,)) + 10)


def _transpose(_: Operation, computed: Computed) -> _Need:
    columns = computed.inputs[0].shape[-1]
    return _Need(each=2 * _bytes(computed, 0), band=_BAND, row=columns)


def _from_blocks(_: Operation, computed: Computed) -> _Need:
    return _Need(whole=computed.inputs[1].size_bytes, each=20, row=computed.shape[-1])


def _to_blocks(_: Operation, computed: Computed) -> _Need:
    given = computed.inputs[1:]
    whole = given[0].size_bytes if given else 0
    return _Need(whole=whole, each=20 + 16 * bool(given), row=computed.inputs[0].shape[-1])


def _mx(_: Operation, computed: Computed) -> _Need:
    return _Need(each=50, band=_BAND, row=computed.shape[-1])


def _combine(operation: Any, computed: Computed) -> _Need:
    models, method = len(computed.inputs), operation.method
    if method == "linear":
        return _Need(each=14 + _bytes(computed, 0), most=Combine.CHUNK_ELEMENTS)
    rows = (1, *computed.shape)[-1] if method.startswith("della") else 1
    return _Need(
        whole=_RANKS + _LIBRARIES, each=16 + 44 * models, row=rows, most=Combine.CHUNK_ELEMENTS
    )


def _add_low_rank(_: Operation, computed: Computed) -> _Need:
    factors = sum(4 * prod(one.shape) + one.size_bytes for one in computed.inputs[1:3])
    return _Need(whole=factors + _LIBRARIES, each=24, row=computed.shape[-1])


def _factorise(_: Operation, computed: Computed) -> _Need:
    rows, columns = computed.inputs[0].shape[-2:]
    return _Need(whole=_LIBRARIES + 4 * (6 * rows * columns + 2 * prod(computed.shape)))


def _draw_rows(_: Operation, computed: Computed) -> _Need:
    return _Need(whole=12 * computed.shape[-1])


def _weave(_: Operation, computed: Computed) -> _Need:
    return _Need(whole=4 * min(BLOCK_BYTES, tensor_size_bytes(computed.dtype, computed.shape)))


_NEEDS: Mapping[type[Operation], Callable[[Any, Computed], _Need]] = {
    AddLowRank: _add_low_rank,
    Cast: _cast,
    Combine: _combine,
    DrawRows: _draw_rows,
    Factorise: _factorise,
    FromBlocks: _from_blocks,
    FromMx: _mx,
    ToBlocks: _to_blocks,
    ToMx: _mx,
    Transpose: _transpose,
    Weave: _weave,
}
