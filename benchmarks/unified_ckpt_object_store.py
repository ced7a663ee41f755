"""Saves to and loads from an object store against plain parallel put and get of the same bytes.

Real ranks and a server that speaks S3 (`s3_server.py`) on this machine. The floor puts each rank's
bytes as one object with obstore, with its own defaults, and gets it whole; all sides alternate in
one run, and a side takes as long as its slowest rank. Checksums, the manifest and the size of every
object, which is asked for after its upload, are in our time. The memory of a save or load is what
the peak of a rank grows by. With `--clients`, s3fs (to be installed) stands
beside obstore, both with parts of the same size, two at a time; that is how the client was chosen.

    python benchmarks/unified_ckpt_object_store.py --mib 1024 --runs 9 --ranks 4
    python benchmarks/unified_ckpt_object_store.py --mib 256 --clients
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from unified_ckpt_save import alternate, make_large, num_bytes, report, shards

from ranktest import run_ranks
from ranktest.memory import forget_peak, peak_resident_bytes, resident_bytes
from ranktest.s3 import S3Server, start_s3
from unified_ckpt import load, save
from unified_ckpt.files.storage.protocol import PART_BYTES

BUCKET = "benchmark"


def start_server(*, moto: bool = False) -> S3Server:
    """Start a server with one bucket; the environment says how clients reach it."""
    server = start_s3() if moto else start_s3([str(Path(__file__).with_name("s3_server.py"))])
    os.environ |= server.environment
    server.make_bucket(BUCKET)
    return server


def peak_growth_mib(work: Callable[[], object]) -> float:
    """How much memory a process takes at most while it does some work."""
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before hides what is taken
    forget_peak()
    before = resident_bytes()
    work()
    return (peak_resident_bytes() - before) / (1 << 20)


def measure(mib: int, runs: int) -> None:
    """Compare saves and loads with puts and gets, on the ranks of a group."""
    import obstore
    from obstore.store import from_url

    rank, store = dist.get_rank(), from_url(f"s3://{BUCKET}")
    tensors = make_large(mib // dist.get_world_size(), rank)
    parts = {"model": shards(tensors)}
    buffer = os.urandom(1 << 20) * (num_bytes(tensors) >> 20)
    wanted = {"model": shards({key: t.clone() for key, t in tensors.items()})}
    place = f"s3://{BUCKET}/run/checkpoint-1"
    sides = {
        "save": lambda: save(parts, checkpoint_id=place),
        "put": lambda: obstore.put(store, f"plain/{rank}", buffer),
        "load": lambda: load(wanted, checkpoint_id=place),
        "get": lambda: obstore.get(store, f"plain/{rank}").bytes(),
    }
    save({"model": shards({f"warm-{rank}": torch.zeros(8)})}, checkpoint_id=f"s3://{BUCKET}/warm")
    memory = torch.tensor([peak_growth_mib(sides["save"]), peak_growth_mib(sides["load"])])
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    taken: dict[str, list[float]] = {}
    for pair in (("save", "put"), ("load", "get")):
        taken |= alternate({name: sides[name] for name in pair}, runs, lambda name: None)
    for a, b in zip(parts["model"], wanted["model"], strict=True):
        if not torch.equal(a.tensor.view(torch.uint8), b.tensor.view(torch.uint8)):
            raise SystemExit(f"{a.key} came back different")
    report("unified_ckpt_store_save_vs_put", taken["save"], taken["put"])
    report("unified_ckpt_store_load_vs_get", taken["load"], taken["get"])
    if rank == 0:
        of_save, of_load = (round(float(mib), 2) for mib in memory)
        line = {"figure": "unified_ckpt_store_memory", "unit": "MiB", "n": 2}
        low, high = sorted((of_save, of_load))
        print(json.dumps({**line, "value": high, "low": low, "high": high}), flush=True)
        print(f"memory of a save {of_save}, of a load {of_load} MiB", file=sys.stderr)


def measure_clients(mib: int, runs: int, endpoint: str) -> None:
    """Compare clients by time and by processor time for the same bytes."""
    import obstore
    import s3fs
    from obstore.store import from_url

    rank, store = dist.get_rank(), from_url(f"s3://{BUCKET}")
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    fs = s3fs.S3FileSystem(client_kwargs=client)
    data = os.urandom(1 << 20) * (mib // dist.get_world_size())
    spent = {"obstore": 0.0, "s3fs": 0.0}

    def obstore_side() -> None:
        started = time.process_time()
        obstore.put(store, f"a/{rank}", data, chunk_size=PART_BYTES, max_concurrency=2)
        for start in range(0, len(data), PART_BYTES):
            obstore.get_range(store, f"a/{rank}", start=start, length=PART_BYTES)
        spent["obstore"] += time.process_time() - started

    def s3fs_side() -> None:
        started, key = time.process_time(), f"{BUCKET}/b/{rank}"
        fs.pipe_file(key, data, chunksize=PART_BYTES, max_concurrency=2)
        for start in range(0, len(data), PART_BYTES):
            fs.cat_file(key, start=start, end=start + PART_BYTES)
        spent["s3fs"] += time.process_time() - started

    taken = alternate({"obstore": obstore_side, "s3fs": s3fs_side}, runs, lambda name: None)
    report("unified_ckpt_client_time_obstore_vs_s3fs", taken["obstore"], taken["s3fs"])
    report("unified_ckpt_client_cpu_obstore_vs_s3fs", [spent["obstore"]], [spent["s3fs"]])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--clients", action="store_true", help="obstore against s3fs")
    arguments = parser.parse_args(argv)

    def fn(rank: int, world_size: int) -> None:
        if arguments.clients:
            measure_clients(arguments.mib, arguments.runs, server.endpoint)
        else:
            measure(arguments.mib, arguments.runs)

    with start_server() as server:
        run_ranks(fn, arguments.ranks, timeout_s=3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
