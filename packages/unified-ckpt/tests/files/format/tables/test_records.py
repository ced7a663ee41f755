import random

import pytest

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.files.format.tables.records import (
    FileRecord,
    decode_records,
    encode_records,
    join_records,
    pack_record,
    packed_size,
    unpack_record,
)
from unified_ckpt.geometry.regions import Region

STRIDED = (Region(64, 4, (5, 2), (8, 4)), 7)


def random_record(rng: random.Random) -> FileRecord:
    begin, pieces = 0, []
    for _ in range(rng.randint(0, 30)):
        begin += rng.choice([0, 0, 0, 5])
        length = rng.choice([16, 16, 16, 3])
        pieces.append((Region(begin, length), rng.randrange(2**32)))
        begin += length
    return FileRecord.of(begin + 200, pieces)


def test_a_packed_record_comes_back_as_it_was() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(100):
        record = random_record(rng)
        assert unpack_record(pack_record(record)) == record, seed
        assert packed_size(pack_record(record)) == record.num_bytes
    strided = FileRecord.of(200, [STRIDED, (Region(0, 64), 1)])
    assert unpack_record(pack_record(strided)) == strided


def test_pieces_of_equal_length_take_four_bytes_each() -> None:
    pieces = [(Region(i << 20, 1 << 20), i) for i in range(5000)]
    assert len(pack_record(FileRecord.of(5000 << 20, pieces))) < 4 * 5000 + 64


def test_what_several_writers_know_of_a_file_is_joined() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    whole = random_record(rng)
    pieces = [*whole.pieces(), (Region(whole.num_bytes - 100, 4, (5, 2), (8, 4)), 7)]
    shares: list[list] = [[], [], []]
    for piece in pieces:
        rng.choice(shares).append(piece)
    told = [
        encode_records({"a": pack_record(FileRecord.of(whole.num_bytes, share))})
        for share in shares
    ]
    told.append(encode_records({"b": pack_record(whole)}))
    joined = join_records(map(decode_records, told))
    assert unpack_record(joined["a"]) == FileRecord.of(whole.num_bytes, pieces), seed
    assert joined["b"] == pack_record(whole)


def test_mutated_records_are_refused_or_lie_inside_their_file() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    good = pack_record(FileRecord.of(200, [STRIDED, (Region(0, 8), 1), (Region(8, 8), 2)]))
    refused = 0
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(len(bad))] = rng.choice([0, 1, 255, rng.randrange(256)])
        raw = bytes(bad[: rng.choice([len(bad), len(bad), rng.randrange(len(bad))])])
        try:
            record = unpack_record(raw)
        except CheckpointValueError:
            refused += 1
            continue
        assert record.covered_bytes <= record.num_bytes, seed
    assert refused > 1000, seed


@pytest.mark.parametrize("length", [0, 19, 20])
def test_too_few_bytes_are_no_record(length: int) -> None:
    good = pack_record(FileRecord.of(8, [(Region(0, 8), 1)]))
    with pytest.raises(CheckpointValueError):
        unpack_record(good[:length])
