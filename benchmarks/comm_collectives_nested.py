"""broadcast_nested against torch.distributed.broadcast_object_list, in one run, over gloo.

Speed: two ranks, every size class, both results checked first. Rounds alternate; a figure is the
median over rounds of the other's time / our time (more is better), with the quartiles. A time runs
from a barrier to a barrier. `nested_worst_speed_vs_object_list` is the lowest of the medians. The
floor is one bare broadcast of 128 MiB into memory that is already there.

Memory: two new processes for each payload; the growth of the peak resident memory during the call
above what was resident before it, divided by the payload, on the source and on the receiver. The
result counts, so a receiver cannot be below 1. `nested_extra_memory_vs_payload` is the largest.

    python benchmarks/comm_collectives_nested.py
"""

import gc
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from ranktest import run_ranks
from ranktest.memory import forget_peak, peak_resident_bytes, resident_bytes

RANKS = 2
KIB, MIB = 1 << 10, 1 << 20
Broadcast = Callable[[object], object]


@dataclass(frozen=True)
class Config:
    """What a training program sends along with its tensors."""

    hidden: int
    layers: int
    names: tuple[str, ...]


def small_tensors(count: int, num_bytes: int) -> list[torch.Tensor]:
    """Tensors of `num_bytes` each, all different."""
    return [torch.full((num_bytes // 4,), float(i)) for i in range(count)]


def state_dict(hidden: int, layers: int) -> dict[str, object]:
    """A model, tied weights, optimizer state, and what else a program keeps."""
    model: OrderedDict[str, torch.Tensor] = OrderedDict()
    for i in range(layers):
        for name in ("q", "k", "v", "o"):
            model[f"layers.{i}.{name}.weight"] = torch.randn(hidden, hidden)
            model[f"layers.{i}.{name}.bias"] = torch.randn(hidden)
        model[f"layers.{i}.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    model["embed.weight"] = torch.randn(4 * hidden, hidden)
    model["head.weight"] = model["embed.weight"].detach()
    moments = {name: {"step": 3, "exp_avg": torch.zeros(x.shape)} for name, x in model.items()}
    return {
        "config": Config(hidden=hidden, layers=layers, names=tuple(model)),
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(model)}]},
        "rng": torch.arange(5056).to(torch.uint8),
    }


def mixed_dtypes() -> list[torch.Tensor]:
    """100 MiB of tensors of 64 KiB to 5 MiB, some of them transposed or with gaps."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16)
    found: list[torch.Tensor] = []
    while sum(x.nbytes for x in found) < 100 * MIB:
        rows = int(torch.randint(64, 5 * KIB, (), generator=generator))
        x = torch.randn(rows, KIB).to(dtypes[len(found) % 4])
        found += [(x, x.t(), x[:, : KIB // 2])[len(found) % 3]]
    return found


SPEED: dict[str, tuple[Callable[[], object], int, int]] = {  # value, calls in a round, rounds
    "empty_dict": (dict, 20, 60),
    "few_scalars": (lambda: {"step": 3, "lr": 1e-3, "name": "warmup", "done": False}, 20, 60),
    "10_small": (lambda: small_tensors(10, 256), 10, 60),
    "1000_small": (lambda: small_tensors(1000, 256), 1, 40),
    "1000_shapes": (lambda: [torch.ones(64 + i) for i in range(1000)], 1, 30),
    "100_of_64kib": (lambda: small_tensors(100, 64 * KIB), 1, 40),
    "1mib": (lambda: torch.randn(MIB // 4), 5, 40),
    "128mib": (lambda: torch.randn(32 * MIB), 1, 12),
    "state_dict": (lambda: state_dict(256, 6), 1, 30),
    "2mb_of_bytes": (lambda: [bytes(20_000) for _ in range(100)], 1, 80),
}
MEMORY: dict[str, tuple[Callable[[], object], int]] = {  # value, its bytes
    "one_of_128mib": (lambda: torch.ones(32 * MIB), 128 * MIB),
    "2048_of_64kib": (lambda: small_tensors(2048, 64 * KIB), 128 * MIB),
    "8192_of_16kib": (lambda: small_tensors(8192, 16 * KIB), 128 * MIB),
    "512_of_300kib": (lambda: small_tensors(512, 300 * KIB), 150 * MIB),
    "transposed_128mib": (lambda: [(w := torch.ones(4 * KIB, 8 * KIB)).t(), w[5]], 128 * MIB),
    "gaps_64mib": (lambda: torch.ones(4 * KIB, 8 * KIB)[:, ::2], 64 * MIB),
    "mixed_dtypes": (mixed_dtypes, 0),
    "state_dict": (lambda: state_dict(1024, 6), 0),
    "bytes_100mib": (lambda: {"blob": bytes(100 * MIB)}, 100 * MIB),
}


def object_list(value: object) -> object:
    """The peer."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def nested(value: object) -> object:
    """Ours."""
    return cc.broadcast_nested(value, src=0)


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors inside."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [x for item in items for x in tensors_of(item)] if isinstance(value, dict | list) else []


def payload_bytes(value: object) -> int:
    """Bytes of the tensors, those that share memory counted once."""
    places = {(x.data_ptr(), x.nbytes) for x in tensors_of(value)}
    return sum(num_bytes for _, num_bytes in places)


def timed(broadcast: Broadcast, value: object, calls: int) -> float:
    """Seconds of some calls, from a barrier to a barrier."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        broadcast(value)
    dist.barrier()
    return time.perf_counter() - started


def speed_of(name: str, rank: int) -> tuple[list[float], list[float]]:
    """Ratios of each round: the peer's time to ours, and ours to the floor (128 MiB only)."""
    make, calls, rounds = SPEED[name]
    torch.manual_seed(0)  # so that every rank knows what has to come
    expected = make()
    for broadcast in (nested, object_list):
        got = broadcast(expected if rank == 0 else None)
        pairs = zip(tensors_of(got), tensors_of(expected), strict=True)
        same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        if not same or type(got) is not type(expected):
            raise ValueError(f"{broadcast.__name__} broke {name}")
    value = expected if rank == 0 else None
    buffer = torch.zeros(128 * MIB, dtype=torch.uint8) if name == "128mib" else None
    ratios: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        ours_s = timed(nested, value, calls)
        ratios.append(timed(object_list, value, calls) / ours_s)
        if buffer is not None:
            floors.append(ours_s / timed(lambda _: dist.broadcast(buffer, src=0), None, 1))
    return ratios, floors


def growth_of(name: str, rank: int, broadcast: Broadcast) -> float:
    """Peak of the resident memory during one call above that before it, over the payload."""
    make, payload = MEMORY[name]
    broadcast({"warm": torch.ones(4)} if rank == 0 else None)
    value = make() if rank == 0 else None
    sizes = [payload or payload_bytes(value)]
    dist.broadcast_object_list(sizes, src=0)
    gc.collect()
    dist.barrier()
    forget_peak()
    before = resident_bytes()
    result = broadcast(value)
    grown = peak_resident_bytes() - before
    del result
    return grown / sizes[0]


def report(figure: str, values: list[float]) -> float:
    """Print the median with the quartiles, and return it."""
    low, middle, high = statistics.quantiles(values, n=4)
    fields = {"value": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    print(json.dumps({"figure": figure, **fields, "unit": "x", "n": len(values)}), flush=True)
    return middle


def report_memory(broadcast: Broadcast, prefix: str, names: Iterable[str]) -> float:
    """Print the growth on both ranks for each payload, and return the largest."""
    worst = 0.0
    for name in names:

        def fn(rank: int, world_size: int, name: str = name) -> float:
            return growth_of(name, rank, broadcast)

        grown: Any = run_ranks(fn, RANKS, timeout_s=300)
        for side, value in zip(("source", "receiver"), grown, strict=True):
            figure = f"{prefix}_extra_memory_{side}_{name}"
            print(json.dumps({"figure": figure, "value": round(value, 3), "unit": "x"}), flush=True)
            worst = max(worst, value)
    return worst


def main() -> None:
    medians = []
    for name in SPEED:

        def fn(rank: int, world_size: int, name: str = name) -> tuple[list[float], list[float]]:
            return speed_of(name, rank)

        outcome: Any = run_ranks(fn, RANKS, timeout_s=600)[0]
        medians.append((report(f"nested_{name}_speed_vs_object_list", outcome[0]), outcome[0]))
        if outcome[1]:
            report("nested_128mib_vs_bare_broadcast", outcome[1])
    report("nested_worst_speed_vs_object_list", min(medians)[1])
    worst = report_memory(nested, "nested", MEMORY)
    # The peer cannot send every dtype.
    report_memory(object_list, "object_list", [name for name in MEMORY if name != "mixed_dtypes"])
    figure = "nested_extra_memory_vs_payload"
    print(json.dumps({"figure": figure, "value": round(worst, 3), "unit": "x"}))


if __name__ == "__main__":
    main()
