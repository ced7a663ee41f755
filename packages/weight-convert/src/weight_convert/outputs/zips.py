"""The zip that `torch.save` writes, as parts: bytes that are known, and tensors.

    parts, sums = torch_zip("pytorch_model", data_pickle, tensors)

Checksums of tensors are known when they are written: until then their places hold zeros, and `sums`
says which bytes each is of. Tensors stand at multiples of 64 bytes, as torch puts them.
"""

import struct
import zlib
from collections.abc import Sequence

from weight_convert.outputs.target_file import Sum
from weight_convert.outputs.tensors import PlannedTensor

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIII")
_CENTRAL_END = struct.Struct("<HHHHHII")
_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
_DATE = 0x21  # 1980-01-01, the first one of a zip
_VERSION = 45  # with sizes of 64 bits
Part = bytes | PlannedTensor


def torch_zip(
    stem: str, data: bytes, tensors: Sequence[PlannedTensor], begin: int = 0
) -> tuple[list[Part], list[Sum]]:
    """A file of `torch.save`.

    Args:
        stem: folder of its entries, which torch takes from the file's name.
        data: its pickle, which calls the tensors `0`, `1`, ...
        tensors: one for each storage.
        begin: where in its file it will stand.
    """
    entries: list[tuple[str, Part]] = [("data.pkl", data), ("byteorder", b"little")]
    entries += [(f"data/{number}", tensor) for number, tensor in enumerate(tensors)]
    entries.append(("version", b"3\n"))
    parts: list[Part] = []
    sums: list[Sum] = []
    central = b""
    at = 0
    unknown: list[tuple[int, int, int, int]] = []
    for name, content in entries:
        path = f"{stem}/{name}".encode()
        size = len(content) if isinstance(content, bytes) else content.size_bytes
        crc = zlib.crc32(content) if isinstance(content, bytes) else 0
        header = _local_header(path, crc, size, at)
        parts += [header, content] if size else [header]
        if not isinstance(content, bytes) and size:
            unknown.append((at + len(header), size, at + 14, len(central) + 16))
        central += _central_header(path, crc, size, at)
        at += len(header) + size
    for first, size, local_place, central_place in unknown:
        places = (begin + local_place, begin + at + central_place)
        sums.append(Sum(begin=begin + first, end=begin + first + size, places=places))
    parts.append(central + _end(len(entries), len(central), at))
    return parts, sums


def _local_header(path: bytes, crc: int, size: int, at: int) -> bytes:
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
    begin = at + _LOCAL.size + len(path) + len(wide) + 4
    fill = -begin % _ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", fill) + b"Z" * fill
    shown = min(size, _LIMIT)
    return (
        _LOCAL.pack(
            b"PK\3\4", _VERSION, 0x800, 0, 0, _DATE, crc, shown, shown, len(path), len(extra)
        )
        + path
        + extra
    )


def _central_header(path: bytes, crc: int, size: int, at: int) -> bytes:
    values = [size, size] if size >= _LIMIT else []
    values += [at] if at >= _LIMIT else []
    extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    shown, place = min(size, _LIMIT), min(at, _LIMIT)
    return (
        _CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, 0x800, 0, 0, _DATE, crc, shown, shown)
        + _CENTRAL_END.pack(len(path), len(extra), 0, 0, 0, 0, place)
        + path
        + extra
    )


def _end(count: int, size: int, at: int) -> bytes:
    """What ends a zip: the record with 64 bits, where it is, and the former one."""
    wide = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, size, at
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
    number, place = min(count, 0xFFFF), min(at, _LIMIT)
    return (
        wide
        + locator
        + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, min(size, _LIMIT), place, 0)
    )
