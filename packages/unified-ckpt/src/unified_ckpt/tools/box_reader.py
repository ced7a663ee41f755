"""Read any box of a checkpoint's tensors as bytes, one at a time: for what rewrites or compares.

with BoxReader(Checkpoint("run/checkpoint-10"), "model") as boxes:
    memory = boxes.read("w", (0, 0), (2, 8))  # uint8, row-major bytes of the box
"""

import math
import mmap
from contextlib import AbstractContextManager

import torch

from unified_ckpt.errors import LoadError
from unified_ckpt.geometry import Box, BoxMeta, Shape
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.loading import Destination, PartIndex, Reader
from unified_ckpt.plans import SplitTensor, StoredTensor, plan_load
from unified_ckpt.plans.checkpoint import Checkpoint

_PAGES_BYTES = 1024 * 1024  # from this size on memory comes from the system and goes back to it


class BoxReader(AbstractContextManager["BoxReader"]):
    """Reads boxes of one part; every byte that is read is compared with its checksum.

    Attributes:
        tensors: dtype, shape and place of every tensor of the part, by key; what is kept
            sharded is one tensor here, and compressed moments are as they are stored.
    """

    def __init__(self, checkpoint: Checkpoint, part: str) -> None:
        index = PartIndex(checkpoint, part)
        keys = index.tensor_keys()
        self.tensors: dict[str, StoredTensor | SplitTensor] = index.resolve(sorted(keys))
        scales = {scale.key for key in keys for scale in index.scales(key)}
        self.tensors |= checkpoint.tensors(part, sorted(scales))
        self._reader = Reader(checkpoint, verify=True, touched=True)
        self._where = f"{checkpoint.folder}: part {part!r}"

    def shape(self, key: str) -> Shape:
        """Return the shape of a tensor."""
        stored = self.tensors[key]
        if stored.shape is None or dtype_of(stored.dtype).torch_dtype is None:
            raise LoadError(f"{self._where}: torch cannot hold {key!r}, which is {stored.dtype}")
        return stored.shape

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the row-major bytes of a box, uint8 `[bytes]`."""
        stored = self.tensors[key]
        meta = BoxMeta(key, stored.dtype, Box(self.shape(key), offset, shape))
        dtype = dtype_of(stored.dtype)
        if dtype.torch_dtype is None:
            raise LoadError(f"{self._where}: torch cannot hold {key!r}")
        memory = _empty_bytes(math.prod(shape) * dtype.itemsize_bytes)
        if memory.numel():
            plan = plan_load([meta], {key: stored})
            typed = memory.view(dtype.torch_dtype).view(shape)
            self._reader.run(plan, [Destination(key, typed, dtype.torch_dtype)])
        return memory

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__(None, None, None)


def _empty_bytes(num_bytes: int) -> torch.Tensor:
    """Return memory, uint8 `[num_bytes]`, of which nothing stays with the process when it is freed.

    A heap would keep gaps between blocks that other threads free, and grow with what was read.
    """
    if num_bytes < _PAGES_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)
