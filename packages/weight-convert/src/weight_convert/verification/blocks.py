"""The bytes of a tensor in blocks of one size, whether they are stored or computed.

for block in blocks(tensor, side, 1 << 20): ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from weight_convert.errors import WeightConvertError
from weight_convert.outputs import Computations, PlannedTensor
from weight_convert.staging import OpenFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSide:
    """One of two directories that are compared: its open files, and what is computed of them."""

    files: OpenFiles
    work: Computations


def blocks(tensor: PlannedTensor, side: ReadSide, size_bytes: int) -> Iterator[bytes]:
    """Yield all bytes of a tensor, `size_bytes` at a time and the rest at the end.

    Raises:
        WeightConvertError: values must be computed and there is no torch.
    """
    held = bytearray()
    for part in _parts(tensor, side, size_bytes):
        held += part
        while len(held) >= size_bytes:
            yield bytes(held[:size_bytes])
            del held[:size_bytes]
    if held:
        yield bytes(held)


def _parts(tensor: PlannedTensor, side: ReadSide, size_bytes: int) -> Iterator[bytes | memoryview]:
    if not side.work.is_computed(tensor):
        for begin in range(0, tensor.size_bytes, size_bytes):
            yield from tensor.read(begin, min(size_bytes, tensor.size_bytes - begin), side.files)
        return
    try:
        tensor_chunks = import_module("weight_convert.compute").tensor_chunks
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise WeightConvertError(
            f"{tensor.key} stands transposed in one of the formats, and comparing it needs torch: "
            f"pip install 'weight-convert[compute]'"
        ) from error
    for piece in side.work.settled(tensor).pieces:
        yield from tensor_chunks(side.work.all[piece.file - side.work.num_sources], side.files)
