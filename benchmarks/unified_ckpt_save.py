"""Saving and loading with unified-ckpt against the raw disk, safetensors, DCP and its HF writer.

Real ranks on one disk. Saving: the floor writes each rank's bytes with pwrite into a file of its
own and fsyncs it and its folder; the disk is quiet before each side. Loading: the page cache is
dropped before each side; the floor preads each rank's bytes into memory that is there already. In
the same layout each rank loads what it saved; resharding, each rank loads half of the columns of
everything. All sides alternate in one run; a side takes as long as its slowest rank. Checksums,
the manifest, the fsync of folders and the rename are in our time. DCP fsyncs its files, not its
folder.

    python benchmarks/unified_ckpt_save.py --mib 512 --runs 7 --ranks 2
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from ranktest import run_ranks
from unified_ckpt import Shard, load, save

CHUNK_BYTES = 16 * 1024 * 1024
READS_PER_RUN = 3  # a read is over sooner than a write, and a stall of the disk weighs more
Tensors = dict[str, torch.Tensor]
Sides = dict[str, Callable[[], object]]


def make_large(mib: int, rank: int) -> Tensors:
    """Weights as in a small model: large matrices, expert slices and vectors, bf16 and fp32."""
    tensors: Tensors = {}
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
            tensors[f"rank{rank}.layers.{number}.weight"] = raw.view(dtype)
            left -= raw.numel()
            number += 1
    return tensors


def make_small(count: int, rank: int) -> Tensors:
    return {f"rank{rank}.layers.{i}.norm": torch.rand(1024) for i in range(count)}


def num_bytes(tensors: Tensors) -> int:
    return sum(t.nbytes for t in tensors.values())


def shards(tensors: Tensors) -> list[Shard]:
    return [
        Shard.of(key, t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
        for key, t in tensors.items()
    ]


def columns(shape: tuple[int, ...], rank: int, world_size: int) -> tuple[int, int]:
    """Begin and length of a rank's part of the last dim."""
    step = shape[-1] // world_size
    return rank * step, step


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


def library_save(tensors: Tensors, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def dcp_hf_save(tensors: Tensors, folder: Path) -> None:
    dcp.save(
        tensors,
        storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
    )


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def slowest(work: Callable[[], object]) -> float:
    """Run a side on all ranks at once; return the seconds of the slowest."""
    dist.barrier()
    start = time.perf_counter()
    work()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def report(figure: str, ours: list[float], floor: list[float]) -> None:
    if dist.get_rank():
        return
    ratios = sorted(a / b for a, b in zip(ours, floor, strict=True))
    quarter = len(ratios) // 4
    line = {
        "figure": figure,
        "value": round(statistics.median(ratios), 3),
        "low": round(ratios[quarter], 3),
        "high": round(ratios[-1 - quarter], 3),
        "unit": "x",
        "n": len(ratios),
    }
    print(json.dumps(line), flush=True)


def alternate(sides: Sides, runs: int, before: Callable[[str], None]) -> dict[str, list[float]]:
    """Time every side once per run, in turning order; the first run warms up and is dropped."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for run in range(runs + 1):
        for name in names[run % len(names) :] + names[: run % len(names)]:
            dist.barrier()
            if dist.get_rank() == 0:
                before(name)
            elapsed = slowest(sides[name])
            if run:
                taken[name].append(elapsed)
    return taken


def measure_saves(prefix: str, tensors: Tensors, folder: Path, runs: int, *, peers: bool) -> None:
    rank = dist.get_rank()
    parts = {"model": shards(tensors)}
    total = num_bytes(tensors)
    buffer = memoryview(bytearray(os.urandom(1 << 20) * (total // (1 << 20) + 1)))[:total]
    sides: Sides = {
        "ours": lambda: save(parts, checkpoint_id=folder / "ours"),
        "raw": lambda: raw_write(buffer, folder / "raw" / f"file-{rank}"),
        "library": lambda: library_save(tensors, folder / "library" / f"{rank}.safetensors"),
    }
    if peers:
        sides["dcp"] = lambda: dcp.save(tensors, checkpoint_id=folder / "dcp")
        sides["dcp_hf"] = lambda: dcp_hf_save(tensors, folder / "dcp_hf")

    def before(name: str) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        os.sync()

    taken = alternate(sides, runs, before)
    report(f"unified_ckpt_save_{prefix}_vs_raw", taken["ours"], taken["raw"])
    report(f"unified_ckpt_save_{prefix}_vs_safetensors", taken["ours"], taken["library"])
    for name in sides.keys() - {"ours", "raw"}:
        report(f"unified_ckpt_save_{prefix}_{name}_vs_raw", taken[name], taken["raw"])


def measure_loads(prefix: str, tensors: Tensors, folder: Path, runs: int, *, peers: bool) -> None:
    rank = dist.get_rank()
    memory = memoryview(bytearray(num_bytes(tensors)))
    wanted = {key: torch.zeros_like(t) for key, t in tensors.items()}
    wants = shards(wanted)
    sides: Sides = {
        "ours": lambda: load(wants, checkpoint_id=folder / "ours"),
        "raw": lambda: raw_read(folder / "raw" / f"file-{rank}", memory),
        "library": lambda: safetensors.torch.load_file(folder / "library" / f"{rank}.safetensors"),
    }
    if peers:
        sides["dcp"] = lambda: dcp.load(wanted, checkpoint_id=folder / "dcp")
    taken = alternate(sides, READS_PER_RUN * runs, lambda name: drop_cache(folder / name))
    report(f"unified_ckpt_load_{prefix}_vs_raw", taken["ours"], taken["raw"])
    report(f"unified_ckpt_load_{prefix}_vs_safetensors", taken["ours"], taken["library"])
    for name in sides.keys() - {"ours", "raw"}:
        report(f"unified_ckpt_load_{prefix}_{name}_vs_raw", taken[name], taken["raw"])


def measure_reshard(tensors: Tensors, folder: Path, runs: int, *, peers: bool) -> None:
    """Every rank loads its columns of all ranks' tensors; as many bytes as it saved."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    memory = memoryview(bytearray(num_bytes(tensors)))
    names = [key.replace(f"rank{rank}.", f"rank{r}.") for r in range(world_size) for key in tensors]
    wants, wanted = [], {}
    mesh = init_device_mesh("cpu", (world_size,))
    for key in names:
        full = tensors[f"rank{rank}.{key.partition('.')[2]}"]
        begin, length = columns(tuple(full.shape), rank, world_size)
        part = torch.zeros(*full.shape[:-1], length, dtype=full.dtype)
        offset = (*(0,) * (full.dim() - 1), begin)
        wants.append(Shard.of(key, part, global_shape=tuple(full.shape), offset=offset))
        wanted[key] = DTensor.from_local(part, mesh, [ShardPlacement(full.dim() - 1)])
    sides: Sides = {
        "ours": lambda: load(wants, checkpoint_id=folder / "ours"),
        "raw": lambda: raw_read(folder / "raw" / f"file-{rank}", memory),
    }
    if peers:
        sides["dcp"] = lambda: dcp.load(wanted, checkpoint_id=folder / "dcp")
    taken = alternate(sides, READS_PER_RUN * runs, lambda name: drop_cache(folder / name))
    report("unified_ckpt_reshard_large_vs_raw", taken["ours"], taken["raw"])
    if peers:
        report("unified_ckpt_reshard_large_dcp_vs_raw", taken["dcp"], taken["raw"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure large and small tensors, saves and loads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="large tensors of all ranks together")
    parser.add_argument("--small", type=int, default=20_000, help="4 KiB tensors of each rank")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=["large", "small"], help="measure one of the two states")
    parser.add_argument("--no-peers", action="store_true", help="leave DCP out")
    arguments = parser.parse_args(argv)
    peers = not arguments.no_peers

    def measure(name: str, folder: Path) -> Callable[[int, int], None]:
        def fn(rank: int, world_size: int) -> None:
            warnings.simplefilter("ignore")  # of DCP
            if name == "small":
                tensors = make_small(arguments.small, rank)
            else:
                tensors = make_large(arguments.mib // world_size, rank)
            measure_saves(name, tensors, folder, arguments.runs, peers=peers and name == "large")
            measure_loads(name, tensors, folder, arguments.runs, peers=peers and name == "large")
            if name == "large":
                measure_reshard(tensors, folder, arguments.runs, peers=peers)

        return fn

    for name in ("small", "large") if arguments.only is None else (arguments.only,):
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-bench-", dir=Path.cwd()) as temporary:
            run_ranks(measure(name, Path(temporary)), arguments.ranks, timeout_s=3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
