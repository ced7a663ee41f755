"""What differs between two checkpoints: keys, shapes, dtypes, values, other files.

Values are compared bit by bit, at most 16 MiB at a time, however the two are divided into files.

    [str(d) for d in diff_checkpoints("run/checkpoint-10", "run/checkpoint-20")]
    # ["model 'w': 3 of 12 elements differ, the first at [0, 2]"]
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from unified_ckpt.errors import LoadError
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.files.format.tables import TABLES_NAME
from unified_ckpt.files.storage import Location
from unified_ckpt.geometry import Shape, split_box
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.plans import DEFAULT_CHUNK_BYTES, SplitTensor, StoredTensor
from unified_ckpt.plans.checkpoint import Checkpoint
from unified_ckpt.tools.box_reader import BoxReader


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: the part and key, or the file (`part` None), and what it is."""

    part: str | None
    name: str
    message: str

    def __str__(self) -> str:
        where = f"{self.part} {self.name!r}" if self.part else f"file {self.name!r}"
        return f"{where}: {self.message}"


def diff_checkpoints(a: Path | str | Location, b: Path | str | Location) -> Iterator[Difference]:
    """Yield every difference; not collective. How tensors are divided into files does not count.

    Files that hold no tensors of a part are compared whole, one at a time.

    Raises:
        LoadError: one of them cannot be read, or is no checkpoint.
        CorruptCheckpointError: one of them is damaged.
    """
    return _differences(Checkpoint(a), Checkpoint(b))


def _differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    with first, second:
        for one in (first, second):
            if not one.parts() and one.manifest is None:
                raise LoadError(f"{one.folder} holds no safetensors part; name a checkpoint")
        yield from _diff_parts(first, second)
        yield from _diff_files(first, second)


def _diff_parts(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    parts_a, parts_b = set(first.parts()), set(second.parts())
    for part in sorted(parts_a | parts_b):
        if part in parts_a & parts_b:
            with BoxReader(first, part) as boxes_a, BoxReader(second, part) as boxes_b:
                yield from _diff_part(part, boxes_a, boxes_b)
        else:
            yield Difference(part, "*", f"only in {(first if part in parts_a else second).folder}")


def _diff_part(part: str, a: BoxReader, b: BoxReader) -> Iterator[Difference]:
    for key in sorted(set(a.tensors) | set(b.tensors)):
        if key not in a.tensors or key not in b.tensors:
            side = "first" if key in a.tensors else "second"
            yield Difference(part, key, f"only in the {side} checkpoint")
            continue
        said_a, said_b = _describe(a.tensors[key]), _describe(b.tensors[key])
        message = f"{said_a} against {said_b}" if said_a != said_b else _diff_values(key, a, b)
        if message is not None:
            yield Difference(part, key, message)


def _describe(stored: StoredTensor | SplitTensor) -> str:
    return f"{stored.dtype} {'?' if stored.shape is None else list(stored.shape)}"


def _diff_values(key: str, a: BoxReader, b: BoxReader) -> str | None:
    shape = a.shape(key)
    item = dtype_of(a.tensors[key].dtype).itemsize_bytes
    count, place = 0, ""
    for offset, box in split_box(shape, item, DEFAULT_CHUNK_BYTES):
        block_a, block_b = a.read(key, offset, box), b.read(key, offset, box)
        if torch.equal(block_a, block_b):
            continue
        differs = (block_a.view(-1, item) != block_b.view(-1, item)).any(dim=1)
        if not count:
            number = int(differs.nonzero()[0])
            place = str([o + i for o, i in zip(offset, _unravel(number, box), strict=True)])
        count += int(differs.sum())
    if not count:
        return None
    return f"{count} of {math.prod(shape)} elements differ, the first at {place}"


def _unravel(number: int, shape: Shape) -> list[int]:
    place = []
    for length in reversed(shape):
        number, index = divmod(number, length)
        place.append(index)
    return place[::-1]


def _diff_files(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    files_a, files_b = other_files(a), other_files(b)
    for name in sorted(files_a | files_b):
        if name not in files_a or name not in files_b:
            side = "first" if name in files_a else "second"
            yield Difference(None, name, f"only in the {side} checkpoint")
        elif a.read_file(name) != b.read_file(name):
            yield Difference(None, name, "contents differ")


def other_files(checkpoint: Checkpoint) -> set[str]:
    """Names of the files that belong to no part, relative to the directory.

    Those that the manifest lists are here also if they are missing; what others put there is, too.
    Shards of a part that its index does not name are not.
    """
    names = (checkpoint.names() | checkpoint.opened.names()) - {MANIFEST_NAME, TABLES_NAME}
    for part in checkpoint.parts():
        of_part = re.compile(rf"{re.escape(part)}(-\d+-of-\d+)?\.safetensors(\.index\.json)?\Z")
        names -= {name for name in names if of_part.match(name)}
        names -= set(checkpoint.stored_keys(part).all().values())
    return names
