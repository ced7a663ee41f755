"""Random damage: every flipped bit and cut file is named; malformed tables are errors of ours.

`benchmarks/unified_ckpt_flips.py` and `benchmarks/unified_ckpt_fuzz.py` run the same with large
counts. Tables (headers, indexes, manifests) are mutated with their checksums set right again, so
that the parsers and not the checksums have to find what is wrong.
"""

import json
import os
import random
import signal
import struct
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import (
    CheckpointError,
    Shard,
    load,
    load_files,
    read_index,
    save,
    verify_checkpoint,
)
from unified_ckpt.errors import CorruptCheckpointError

LIMIT_S = 5.0


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.of(key, tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def tensors_of(rank: int) -> list[Shard]:
    half = Shard.of("split", torch.rand(9, 40), global_shape=(9, 80), offset=(0, 40 * rank))
    return [
        half,
        whole(f"own{rank}", torch.rand(70)),
        whole(f"scalar{rank}", torch.tensor(2.5, dtype=torch.bfloat16)),
        whole(f"small{rank}", torch.rand(3, 5).to(torch.float8_e4m3fn)),
        whole(f"empty{rank}", torch.rand(0, 3)),
    ]


def make(folder: Path) -> Path:
    """Save a checkpoint with files of one and of two writers, indexes and other files."""

    def fn(rank: int, world_size: int) -> None:
        save(
            {"model": tensors_of(rank), "optimizer": tensors_of(rank)[:2]},
            checkpoint_id=folder / "c",
            files={"config.json": b'{"a": 1}'},
            rank_files={f"rng-{rank}": os.urandom(30)},
        )

    run_ranks(fn, 2)
    return folder / "c"


def wants_of(checkpoint: Path, part: str) -> list[Shard]:
    wants = []
    for key, stored in read_index(checkpoint, part).items():
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}.get(stored.dtype)
        wants.append(whole(key, torch.zeros(stored.shape, dtype=dtype or torch.float8_e4m3fn)))
    return wants


class Damage:
    """An intact checkpoint whose files are damaged one at a time and then put right."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
        self.good = {path: path.read_bytes() for path in self.files}
        self.wants = {part: wants_of(checkpoint, part) for part in ("model", "optimizer")}
        self.index = {part: read_index(checkpoint, part) for part in self.wants}

    def key_at(self, path: Path, offset: int) -> str | None:
        for part, index in self.index.items():
            for key, stored in index.items():
                here = stored.begin <= offset < stored.end
                if here and stored.file == path.name and path.name.startswith(part):
                    return key
        return None

    def once(self, rng: random.Random) -> str | None:
        """Flip one bit or cut one file; return what was not found or not named, or None."""
        path = rng.choice(self.files)
        good = self.good[path]
        offset = rng.randrange(len(good))
        if rng.random() < 0.2:
            path.write_bytes(good[:offset])
            what, key = f"{path.name} cut at {offset}", None
        else:
            bad = bytearray(good)
            bad[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            what, key = f"{path.name} flipped at {offset}", self.key_at(path, offset)
        try:
            return self._verified(path, key, offset, what) or self._loaded(path, key, what)
        finally:
            path.write_bytes(good)

    def _verified(self, path: Path, key: str | None, offset: int, what: str) -> str | None:
        problems = verify_checkpoint(self.checkpoint).problems
        if [(p.file, p.key) for p in problems] != [(path.name, key)]:
            return f"{what}: verify_checkpoint said {problems}"
        begin, end = problems[0].begin, problems[0].end
        if begin is not None and not begin <= offset < (end or 0):
            return f"{what}: verify_checkpoint named bytes {begin} to {end}"
        return None if key is None or begin is not None else f"{what}: no offset was named"

    def _loaded(self, path: Path, key: str | None, what: str) -> str | None:
        try:
            for part, wants in self.wants.items():
                load(wants, checkpoint_id=self.checkpoint, part=part)
            for name in ("config.json", "rng-0", "rng-1"):
                load_files(self.checkpoint, name)
        except CorruptCheckpointError as error:
            named = path.name in str(error) and (key is None or repr(key) in str(error))
            return None if named else f"{what}: load said {error}"
        return f"{what}: load did not notice"


def table_of(raw: bytes, name: str) -> tuple[bytes, bytes]:
    """Split a file into its JSON table and the rest."""
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", raw[:8])
        return raw[8 : 8 + length], raw[8 + length :]
    return raw, b""


def mutate_text(text: bytes, rng: random.Random) -> bytes:
    bad = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(bad))
        kind = rng.randrange(4)
        if kind == 0:
            bad[place] = rng.randrange(256)
        elif kind == 1:
            del bad[place : place + rng.randint(1, 20)]
        elif kind == 2:
            bad[place:place] = rng.choice(
                [b"9" * 30, b"9" * 5000, b"-", b"[" * 2000, b'{"a":', b"null", b"1e999", b"\xff"]
            )
        else:
            start = rng.randrange(len(bad))
            bad[place:place] = bad[start : start + rng.randint(1, 60)]
        bad = bad or bytearray(b" ")
    return bytes(bad)


def mutate_value(value: object, rng: random.Random) -> object:
    """Change one number, text or list somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {(k if k != key else rng.choice(["", "__metadata__", "a:b"])): v
                    for k, v in value.items()}  # fmt: skip
        return {**value, key: mutate_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutate_value(value[place], rng), *value[place + 1 :]]
    numbers = [-1, 0, 1, 7, 2**31, 2**53, 2**63, 2**64, 10**40, 1.5, float("nan"), True]
    others = [None, "", "F32", "F6_E2M3", "../x", "model.safetensors", [], {}, [2**62] * 3]
    nested: list = []
    for _ in range(300):
        nested = [nested]
    return rng.choice([*numbers, *others, [1] * 5000, nested])


def mutate_table(raw: bytes, name: str, rng: random.Random) -> bytes:
    """Mutate the table of a file and set its frame right: the length, the manifest's checksum."""
    table, rest = table_of(raw, name)
    if rng.random() < 0.5:
        bad = mutate_text(table, rng)
    else:
        value = json.loads(table)
        value.pop("crc32", None)
        bad = json.dumps(mutate_value(value, rng)).encode()
        if name == "manifest.json":
            bad = bad[:-1] + b',"crc32":"00000000"}\n'
    if name == "manifest.json":
        body = bad.rpartition(b',"crc32":"')[0] or bad
        return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)
    if name.endswith(".safetensors"):
        length = len(bad) if rng.random() < 0.9 else rng.choice([0, 2**32, 2**63, len(bad) + 1])
        return struct.pack("<Q", length) + bad + rest
    return bad


@contextmanager
def limited() -> Iterator[None]:
    """Turn a hang into a TimeoutError."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Fuzz:
    """A checkpoint whose tables are mutated one at a time; `peak_share` is memory per file size."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        names = [p.name for p in checkpoint.iterdir()]
        self.tables = sorted(n for n in names if "safetensors" in n or n == "manifest.json")
        self.good = {name: (checkpoint / name).read_bytes() for name in self.tables}
        self.num_bytes = sum(map(len, self.good.values()))
        self.wants = {part: wants_of(checkpoint, part) for part in ("model", "optimizer")}
        self.peak_share = 0.0
        self.slowest_s = 0.0
        self.refused = 0

    def once(self, rng: random.Random) -> str | None:
        """Mutate one table; return what was neither a result nor an error of ours, or None."""
        name = rng.choice(self.tables)
        path, manifest = self.checkpoint / name, self.checkpoint / "manifest.json"
        if name != manifest.name:
            manifest.unlink()  # so that no checksum stands before the parser
        path.write_bytes(mutate_table(self.good[name], name, rng))
        begin = time.monotonic()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            with limited():
                self.use(rng)
        except CheckpointError:
            self.refused += 1
        except Exception as error:  # noqa: BLE001 - any other error is what this looks for
            return f"{name}: {type(error).__name__}: {error}"
        finally:
            peak = tracemalloc.get_traced_memory()[1] - before
            self.peak_share = max(self.peak_share, peak / self.num_bytes)
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
            path.write_bytes(self.good[name])
            manifest.write_bytes(self.good[manifest.name])
        return None

    def use(self, rng: random.Random) -> None:
        verify_checkpoint(self.checkpoint)
        for part, wants in self.wants.items():
            read_index(self.checkpoint, part)
            load(wants, checkpoint_id=self.checkpoint, part=part)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("damage"))


def test_every_flipped_bit_and_cut_file_is_found_and_named(checkpoint: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    damage = Damage(checkpoint)
    found = [damage.once(rng) for _ in range(150)]
    assert not any(found), (seed, [f for f in found if f])
    assert verify_checkpoint(checkpoint).problems == ()


def test_a_mutated_table_is_a_result_or_an_error_of_ours(checkpoint: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    fuzz = Fuzz(checkpoint)
    found = [fuzz.once(rng) for _ in range(300)]
    assert not any(found), (seed, [f for f in found if f])
    assert fuzz.refused > 200, fuzz.refused
    assert verify_checkpoint(checkpoint).problems == ()
