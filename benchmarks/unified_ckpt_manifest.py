"""Opening a checkpoint of 10 TB, and finding what one of 4,096 ranks needs in it.

The checkpoint has 442,368 stored tensors of 23 MiB and a bit in 2,048 files: real headers, indexes
and checksums of ten million pieces, and files that are as long as they should be but hold nothing
(sparse). A new process opens it, finds 108 tensors (their places and the checksums of their files)
and says how long that took, CPU time and all, and by how much its memory grew. The files of the
manifest have just been written, so they are read from memory.

    python benchmarks/unified_ckpt_manifest.py --files 2048
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from ranktest.memory import peak_resident_bytes
from unified_ckpt.files.checksums import CHUNK_BYTES, chunk_lengths
from unified_ckpt.files.format import HeaderEntry, encode_header, encode_manifest
from unified_ckpt.files.format.tables import FileRecord, pack_record
from unified_ckpt.geometry import Region
from unified_ckpt.loading import PartIndex
from unified_ckpt.plans.checkpoint import Checkpoint

TENSORS_PER_FILE = 216
SHAPE = (2048, 5888)  # 23 MiB of BF16 and a bit


def make(folder: Path, num_files: int) -> int:
    """Write the checkpoint; return its bytes."""
    keys: dict[str, str] = {}
    records: dict[str, bytes] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        of_file = [
            f"model.layers.{number:04d}.experts.{i:03d}.weight" for i in range(TENSORS_PER_FILE)
        ]
        header, entries = encode_header(
            [HeaderEntry(key=k, dtype="BF16", shape=SHAPE) for k in of_file]
        )
        pieces = [(Region(0, len(header)), zlib.crc32(header))]
        for entry in entries:
            begin = entry.begin
            for length in chunk_lengths(entry.end - entry.begin):
                pieces.append((Region(begin, length), random.randrange(2**32)))
                begin += length
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(entries[-1].end)
        records[name] = pack_record(FileRecord.of(entries[-1].end, pieces))
        keys |= dict.fromkeys(of_file, name)
    index = json.dumps({"metadata": {}, "weight_map": keys}, indent=2).encode()
    (folder / "model.safetensors.index.json").write_bytes(index)
    whole = [
        (Region(at, len(part)), zlib.crc32(part))
        for at in range(0, len(index), CHUNK_BYTES)
        for part in [index[at : at + CHUNK_BYTES]]
    ]
    records["model.safetensors.index.json"] = pack_record(FileRecord.of(len(index), whole))
    for name, blob in encode_manifest(records, lambda: {"model": keys}).items():
        (folder / name).write_bytes(blob)
        print(f"{name}: {len(blob)} bytes", file=sys.stderr)
    return sum(path.stat().st_size for path in folder.iterdir())


def open_once(folder: Path, seed: int, num_files: int) -> tuple[float, float, float]:
    """Return seconds until the checkpoint is open, until all is found, and MiB."""
    rng = random.Random(seed)
    wanted = [
        f"model.layers.{rng.randrange(num_files):04d}.experts.{i:03d}.weight" for i in range(108)
    ]
    before = peak_resident_bytes()
    begin = time.perf_counter()
    with Checkpoint(folder) as checkpoint:
        opened = time.perf_counter() - begin
        found = PartIndex(checkpoint, "model").resolve(wanted)
        files = {stored.file for stored in checkpoint.tensors("model", wanted).values()}
        covered = sum(checkpoint.record(name).covered_bytes for name in sorted(files))
        seconds = time.perf_counter() - begin
    if len(found) != len(wanted) or covered < len(files) * CHUNK_BYTES:
        raise RuntimeError(f"{len(found)} of {len(wanted)} tensors were found")
    return opened, seconds, (peak_resident_bytes() - before) / (1 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the checkpoint, open it in new processes, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    rounds = []
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-manifest-") as folder:
        num_bytes = make(Path(folder), arguments.files)
        print(f"{num_bytes} bytes", file=sys.stderr)
        for _ in range(arguments.rounds):
            with context.Pool(1) as pool:
                seed = random.randrange(2**32)
                rounds.append(pool.apply(open_once, (Path(folder), seed, arguments.files)))
    print(rounds, file=sys.stderr)
    for number, (name, unit) in enumerate((("open", "s"), ("find", "s"), ("memory", "MiB"))):
        values = [each[number] for each in rounds]
        line = {"figure": f"unified_ckpt_manifest_{name}", "unit": unit, "n": len(values)}
        line |= {"value": round(statistics.median(values), 4)}
        print(json.dumps({**line, "low": round(min(values), 4), "high": round(max(values), 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
