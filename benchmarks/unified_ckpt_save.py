"""Saving and loading with unified-ckpt against the raw disk and against the safetensors library.

Saving: the floor writes the same bytes with pwrite into as many files and fsyncs them and their
folder. Loading: page cache dropped before each side; the floor preads the same bytes into memory
that is there already. Both sides alternate; before each write the disk is quiet. The checksums, the
manifest, the fsync of folders and the rename are in our time.

    python benchmarks/unified_ckpt_save.py --mib 512 --runs 7
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
import torch

from unified_ckpt import Shard, load, save

CHUNK_BYTES = 16 * 1024 * 1024


def shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    return [
        Shard(key=key, tensor=t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
        for key, t in tensors.items()
    ]


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Weights as in a small model: large matrices, expert slices and vectors, bf16 and fp32."""
    tensors: dict[str, torch.Tensor] = {}
    left, number = mib << 20, 0
    while left > 0:
        for shape, dtype in (
            ((1024, 4096), torch.float32),
            ((768, 2048), torch.bfloat16),
            ((2048,), torch.float32),
        ):
            raw = torch.randint(
                0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8
            )
            tensors[f"model.layers.{number}.weight"] = raw.view(dtype)
            left -= raw.numel()
            number += 1
    return tensors


def raw_write(buffer: memoryview, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for start in range(0, len(buffer), CHUNK_BYTES):
        os.pwrite(fd, buffer[start : start + CHUNK_BYTES], start)
    os.fsync(fd)
    os.close(fd)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def raw_read(path: Path, buffer: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    for start in range(0, len(buffer), CHUNK_BYTES):
        os.preadv(fd, [buffer[start : start + CHUNK_BYTES]], start)
    os.close(fd)


def library_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(figure: str, ours: list[float], floor: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, floor, strict=True))
    print(
        json.dumps(
            {
                "figure": figure,
                "value": round(statistics.median(ratios), 3),
                "unit": "x",
                "low": round(ratios[0], 3),
                "high": round(ratios[-1], 3),
                "n": len(ratios),
            }
        ),
        flush=True,
    )


def alternate(
    sides: dict[str, Callable[[], object]], runs: int, before: Callable[[str], None]
) -> dict[str, list[float]]:
    """Time every side once per run, in turning order; the first run warms up and is dropped."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for run in range(runs + 1):
        for name in names[run % len(names) :] + names[: run % len(names)]:
            before(name)
            elapsed = seconds(sides[name])
            if run:
                taken[name].append(elapsed)
    return taken


def measure_saves(prefix: str, tensors: dict[str, torch.Tensor], folder: Path, runs: int) -> None:
    parts = {"model": shards(tensors)}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    buffer = memoryview(bytearray(os.urandom(1 << 20) * (total // (1 << 20) + 1)))[:total]
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: save(parts, checkpoint_id=folder / "ours"),
        "raw": lambda: raw_write(buffer, folder / "raw" / "file"),
        "library": lambda: library_save(tensors, folder / "library" / "model.safetensors"),
    }

    def before(name: str) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        os.sync()

    taken = alternate(sides, runs, before)
    report(f"{prefix}_vs_raw", taken["ours"], taken["raw"])
    report(f"{prefix}_vs_safetensors", taken["ours"], taken["library"])
    report(f"{prefix}_safetensors_vs_raw", taken["library"], taken["raw"])


def measure_loads(prefix: str, tensors: dict[str, torch.Tensor], folder: Path, runs: int) -> None:
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    memory = memoryview(bytearray(total))
    wants = shards({key: torch.zeros_like(t) for key, t in tensors.items()})
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: load(wants, checkpoint_id=folder / "ours"),
        "raw": lambda: raw_read(folder / "raw" / "file", memory),
        "library": lambda: safetensors.torch.load_file(folder / "library" / "model.safetensors"),
    }
    taken = alternate(sides, runs, lambda name: drop_cache(folder / name))
    report(f"{prefix}_vs_raw", taken["ours"], taken["raw"])
    report(f"{prefix}_safetensors_vs_raw", taken["library"], taken["raw"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure large and small tensors, saves and loads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state of large tensors")
    parser.add_argument("--small", type=int, default=20_000, help="number of 4 KiB tensors")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", choices=["large", "small"], help="measure one of the two states")
    arguments = parser.parse_args(argv)
    for name in ("small", "large") if arguments.only is None else (arguments.only,):
        tensors = (
            make_state(arguments.mib)
            if name == "large"
            else {f"model.layers.{i}.norm": torch.rand(1024) for i in range(arguments.small)}
        )
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-bench-", dir=Path.cwd()) as temporary:
            prefix = f"unified_ckpt_{{}}_{name}"
            measure_saves(prefix.format("save"), tensors, Path(temporary), arguments.runs)
            measure_loads(prefix.format("load"), tensors, Path(temporary), arguments.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
