"""Three readers of safetensors headers on one corpus: ours, the other package's, the library's.

The corpus is odd headers written by hand and mutants of a good one; every difference is named here.
"""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from unified_ckpt.errors import CheckpointError
from unified_ckpt.files import OpenFolder
from unified_ckpt.files.format import read_header as read_checkpoint_header
from weight_convert import read_header
from weight_convert.errors import CorruptFileError

W = '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
ODD: dict[str, tuple[str, int]] = {
    "plain": (f"{{{W}}}", 8),
    "metadata null": (f'{{"__metadata__":null,{W}}}', 8),
    "metadata list": (f'{{"__metadata__":[],{W}}}', 8),
    "metadata empty": (f'{{"__metadata__":{{}},{W}}}', 8),
    "metadata of a number": (f'{{"__metadata__":{{"a":1}},{W}}}', 8),
    "no tensors": ("{}", 0),
    "a list": ("[{}]", 0),
    "a list of names": ('[["a"]]', 0),
    "null": ("null", 0),
    "65 dims": (
        f'{{"w":{{"dtype":"U8","shape":[{",".join(["1"] * 65)}],"data_offsets":[0,1]}}}}',
        1,
    ),
    "a dim of 2^70": (f'{{"w":{{"dtype":"U8","shape":[0,{2**70}],"data_offsets":[0,0]}}}}', 0),
    "a dim of 2^63": (f'{{"w":{{"dtype":"U8","shape":[0,{2**63}],"data_offsets":[0,0]}}}}', 0),
    "extra field": ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}', 8),
    "duplicate key": (f"{{{W},{W}}}", 8),
    "duplicate inner key": (
        '{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
    ),
    "NaN": ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":NaN}}', 8),
    "odd F4": ('{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', 1),
    "not ASCII": ("{" + W.replace("w", "é") + "}", 8),
    "half a surrogate pair": (
        '{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
    ),
    "hole": ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', 12),
    "trailing": (f"{{{W}}}", 9),
    "bool in a shape": ('{"w":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', 4),
    "dtype is a list": ('{"w":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', 4),
    "empty name": ('{"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
    "negative offsets": ('{"w":{"dtype":"U8","shape":[2],"data_offsets":[-2,0]}}', 0),
    "100 GB": ('{"w":{"dtype":"U8","shape":[100000000000],"data_offsets":[0,100000000000]}}', 8),
}
# What the library accepts, and who refuses it: torch has no tensor of such a shape, and of a name
# that stands twice a reader would lose one tensor.
REFUSED_BY = {
    "65 dims": {"unified_ckpt"},
    "a dim of 2^63": {"unified_ckpt"},
    "duplicate key": {"unified_ckpt", "weight_convert"},
}


def by_library(path: Path) -> bool:
    try:
        with safe_open(path, "np") as opened:
            opened.keys()
    except (SafetensorError, UnicodeError):
        return False
    return True


def by_weight_convert(path: Path) -> bool:
    try:
        read_header(path)
    except CorruptFileError:
        return False
    return True


def by_unified_ckpt(path: Path) -> bool:
    try:
        with OpenFolder(path.parent) as folder:
            read_checkpoint_header(folder, path.name)
    except CheckpointError:
        return False
    return True


READERS: dict[str, Callable[[Path], bool]] = {
    "library": by_library,
    "weight_convert": by_weight_convert,
    "unified_ckpt": by_unified_ckpt,
}


def file_of(text: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("name", ODD)
def test_odd_headers_have_one_verdict(tmp_path: Path, name: str) -> None:
    text, size = ODD[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(text.encode()) + bytes(size))
    accepted = by_library(path)
    refused = REFUSED_BY.get(name, set())
    verdicts = {reader: read(path) for reader, read in READERS.items()}
    assert verdicts == {reader: accepted and reader not in refused for reader in READERS}


def mutant(rng: random.Random) -> bytes:
    fields = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
    }
    text = bytearray(file_of(json.dumps(fields).encode()) + bytes(32))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        kind = rng.randrange(4)
        if kind == 0:
            text[at] = rng.choice(b'{}[]",:0123456789-.eE\x00\xff tnf')
        elif kind == 1:
            del text[at : at + rng.randint(1, 4)]
        elif kind == 2:
            text[at:at] = rng.choice([b"[", b"}", b'"', b"9", b",", b"-", b"1e9", b"null", b"\\u"])
        else:
            text[at : at + 1] = bytes([text[at] ^ 1 << rng.randrange(8)])
    return bytes(text)


def has_a_name_twice(content: bytes) -> bool:
    text = content[8 : 8 + int.from_bytes(content[:8], "little")]
    names = [name for name, _ in json.loads(text, object_pairs_hook=list)]
    return len(set(names)) < len(names)


def check_mutants(path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        path.write_bytes(content := mutant(rng))
        verdicts = {name: read(path) for name, read in READERS.items()}
        if len(set(verdicts.values())) > 1:
            ours = verdicts["weight_convert"] or verdicts["unified_ckpt"]
            assert not ours, (seed, number, verdicts, content)
            assert has_a_name_twice(content), (seed, number, verdicts, content)


def test_mutants_of_a_header_have_one_verdict_and_crash_nobody(tmp_path: Path) -> None:
    check_mutants(tmp_path / "model.safetensors", random.randrange(2**32), 1000)
