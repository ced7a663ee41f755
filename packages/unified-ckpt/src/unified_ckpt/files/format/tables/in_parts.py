"""The parts of a large manifest that are read one at a time: records of files, and blocks of keys.

A large manifest keeps them in a file beside it, `manifest.bin`, and says where each lies there with
its CRC-32. Opening a checkpoint reads none of them, and a rank those of the files and tensors that
it asks for; up to `WHOLE_BYTES` the file is read at once.

    raw, said = encode_tables({"model.safetensors": packed}, {"model": {"w": "model.safetensors"}})
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from unified_ckpt.errors import MALFORMED, CheckpointValueError, CorruptCheckpointError
from unified_ckpt.files import ReadFolder, read_at
from unified_ckpt.files.checksums import crc32
from unified_ckpt.files.format.tables.records import (
    FileRecord,
    check_numbers,
    packed_size,
    unpack_record,
)

TABLES_NAME = "manifest.bin"
WHOLE_BYTES = 1024 * 1024
_KEYS_A_BLOCK = 2048
_MOST_RECORDS = 8  # kept after they were read


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table lies in `manifest.bin`, and its CRC-32."""

    begin: int
    length: int
    crc: int

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> "Place":
        """Take three numbers."""
        check_numbers(value)
        return cls(*value)


class Tables:
    """Reads tables of an open checkpoint, each compared with its checksum."""

    def __init__(self, folder: ReadFolder, num_bytes: int) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._whole: bytes | None = None

    def read(self, place: Place, what: str) -> bytes:
        """Return the bytes of a table; `what` names it in messages.

        Raises:
            CorruptCheckpointError: the file is missing or too short, or differs from its checksum.
        """
        if self._num_bytes > WHOLE_BYTES:
            raw = self._range(place.begin, place.length)
        else:
            if self._whole is None:
                self._whole = self._range(0, self._num_bytes)
            raw = self._whole[place.begin : place.begin + place.length]
        if len(raw) != place.length or crc32(raw) != place.crc:
            raise CorruptCheckpointError(
                f"{self.path}: {what}: bytes {place.begin} to {place.begin + place.length} differ "
                "from their checksum"
            )
        return raw

    @property
    def path(self) -> object:
        """What the file is called."""
        return self._folder.path / TABLES_NAME

    def _range(self, begin: int, length: int) -> bytes:
        size = self._folder.size(TABLES_NAME)
        if size != self._num_bytes:  # before memory is taken for what the manifest says
            said = "is missing" if size is None else f"has {size} bytes"
            raise CorruptCheckpointError(f"{self.path}: {said}, expected {self._num_bytes}")
        with self._folder.open(TABLES_NAME) as file:
            raw = bytearray(length)
            return bytes(raw[: read_at(file, [memoryview(raw)], begin)])


class StoredRecords(Mapping[str, FileRecord]):
    """The records of all files by name; each is read when it is asked for."""

    def __init__(
        self,
        tables: Tables,
        places: Mapping[str, Place],
        sizes: Mapping[str, int],
        all_places: Sequence[Place],
    ) -> None:
        self._tables = tables
        self._places = places
        own = sorted(all_places, key=lambda place: place.begin)
        self._own = FileRecord(
            sizes[TABLES_NAME],
            tuple(place.begin for place in own),
            tuple(place.length for place in own),
            tuple(place.crc for place in own),
        )
        self._own.check_bounds()
        self._sizes = sizes
        self._last: dict[str, FileRecord] = {}

    def __getitem__(self, name: str) -> FileRecord:
        if name == TABLES_NAME:
            return self._own
        if name not in self._last:
            while len(self._last) >= _MOST_RECORDS:
                self._last.pop(next(iter(self._last)))
            self._last[name] = self._read(name)
        return self._last[name]

    def _read(self, name: str) -> FileRecord:
        raw = self._tables.read(self._places[name], f"the record of {name!r}")
        try:
            record = unpack_record(raw)
        except MALFORMED as error:
            raise CorruptCheckpointError(f"{self._tables.path}: {name!r}: {error}") from error
        if record.num_bytes != self._sizes[name]:
            raise CorruptCheckpointError(
                f"{self._tables.path}: {name!r} has {record.num_bytes} bytes there, "
                f"{self._sizes[name]} in the manifest"
            )
        return record

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Some keys of a part that follow each other, of which `first` is the first one."""

    first: str
    place: Place


class StoredKeys:
    """The keys of a part in blocks, each read when a key is looked for that it may hold."""

    def __init__(self, tables: Tables, blocks: Sequence[KeyBlock], names: Sequence[str]) -> None:
        self._tables = tables
        self._blocks = blocks
        self._firsts = [block.first for block in blocks]
        self._names = names
        self._read: dict[int, list[str]] = {}
        self._file_of: dict[str, str] = {}  # of all blocks that were read

    def find(self, key: str) -> str | None:
        """Return the file that holds a key, None if none does."""
        known = self._file_of.get(key)
        if known is not None:
            return known
        number = bisect_right(self._firsts, key) - 1
        if number < 0 or number in self._read:
            return None
        self._block(number)
        return self._file_of.get(key)

    def starting(self, prefix: str) -> list[str]:
        """Return the keys that begin with a text, in order."""
        found: list[str] = []
        for number in range(max(0, bisect_right(self._firsts, prefix) - 1), len(self._blocks)):
            if (
                number
                and self._firsts[number] > prefix
                and not self._firsts[number].startswith(prefix)
            ):
                break
            keys = self._block(number)
            for key in islice(keys, bisect_left(keys, prefix), None):
                if not key.startswith(prefix):
                    return found
                found.append(key)
        return found

    def all(self) -> Mapping[str, str]:
        """Return the file of every key."""
        for number in range(len(self._blocks)):
            self._block(number)
        return self._file_of

    def _block(self, number: int) -> list[str]:
        """Return the keys of a block in order, and know their files from now on."""
        if number not in self._read:
            block = self._blocks[number]
            raw = self._tables.read(block.place, f"the keys from {block.first!r}")
            try:
                keys, files = json.loads(raw)
                check_numbers(files)
                if [type(key) for key in keys] != [str] * len(files) or keys != sorted(set(keys)):
                    raise CheckpointValueError("keys must be texts in order, each with a file")
                self._check_between(number, keys)
                self._file_of.update(zip(keys, [self._names[file] for file in files], strict=True))
                self._read[number] = keys
            except (*MALFORMED, IndexError) as error:
                raise CorruptCheckpointError(
                    f"{self._tables.path}: the keys from {block.first!r}: {error}"
                ) from error
        return self._read[number]

    def _check_between(self, number: int, keys: Sequence[str]) -> None:
        """Refuse keys that belong into another block."""
        following = self._firsts[number + 1 : number + 2]
        if keys[:1] != [self._firsts[number]] or (following and keys[-1] >= following[0]):
            raise CheckpointValueError("keys of another block")


class ListedKeys:
    """The keys of a part that an index or a header lists; as `StoredKeys`."""

    def __init__(self, file_of: Mapping[str, str]) -> None:
        self._file_of = file_of

    def find(self, key: str) -> str | None:
        """Return the file that holds a key, None if none does."""
        return self._file_of.get(key)

    def starting(self, prefix: str) -> list[str]:
        """Return the keys that begin with a text, which holds an @, in order."""
        marked = self._marked
        begin = bisect_left(marked, prefix)
        end = begin
        while end < len(marked) and marked[end].startswith(prefix):
            end += 1
        return marked[begin:end]

    def all(self) -> Mapping[str, str]:
        """Return the file of every key."""
        return self._file_of

    @cached_property
    def _marked(self) -> list[str]:
        """The keys of boxes and scales, which alone are looked for by how they begin."""
        return sorted(key for key in self._file_of if "@" in key)


def encode_tables(
    records: Mapping[str, bytes], keys: Mapping[str, Mapping[str, str]]
) -> tuple[bytes, dict[str, Any]]:
    """Return the contents of `manifest.bin`, and what the manifest says of it: JSON types.

    Args:
        records: packed records by file name, in the order that numbers the files.
        keys: by part, the file of each key in order.
    """
    raw = bytearray()

    def add(table: bytes) -> list[int]:
        raw.extend(table)
        return [len(raw) - len(table), len(table), crc32(table)]

    files = {name: [packed_size(record), *add(record)] for name, record in records.items()}
    number_of = {name: number for number, name in enumerate(records)}
    blocks: dict[str, list[list[Any]]] = {}
    for part, file_of in keys.items():
        rest = iter(sorted(file_of.items()))
        blocks[part] = []
        while block := [*islice(rest, _KEYS_A_BLOCK)]:
            table = [[key for key, _ in block], [number_of[name] for _, name in block]]
            text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
            blocks[part].append([block[0][0], *add(text)])
    return bytes(raw), {"tables": len(raw), "files": files, "keys": blocks}


def open_tables(
    said: Mapping[str, Any], folder: ReadFolder
) -> tuple[Mapping[str, FileRecord], Mapping[str, int], Mapping[str, StoredKeys]]:
    """Return records and sizes of all files, and the keys of parts, as the manifest says of them.

    Nothing is read from `manifest.bin` before it is asked for.

    Raises:
        CheckpointValueError: what the manifest says is not what `encode_tables` returned.
    """
    names = [*said["files"]]
    sizes = {name: said["files"][name][0] for name in names} | {TABLES_NAME: said["tables"]}
    check_numbers([*sizes.values()])
    tables = Tables(folder, sizes[TABLES_NAME])
    places = {name: Place.from_json(said["files"][name][1:]) for name in names}
    blocks = {
        part: [KeyBlock(first, Place.from_json(place)) for first, *place in of_part]
        for part, of_part in said["keys"].items()
    }
    for part, of_part in blocks.items():
        firsts = [block.first for block in of_part]
        if set(map(type, firsts)) - {str} or firsts != sorted(firsts):
            raise CheckpointValueError(f"the keys of part {part!r} are not in order")
    every = [*places.values(), *(block.place for each in blocks.values() for block in each)]
    records = StoredRecords(tables, places, sizes, every)
    keys = {part: StoredKeys(tables, of_part, names) for part, of_part in blocks.items()}
    return records, sizes, keys
