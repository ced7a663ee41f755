"""What stops the host until a device is done: a committed table, by call, layer, stage and step.

Two ranks on devices of devicetest, with `nccl` alone and beside gloo; each program is run once to
warm up and once to be counted. A wait that is not in the table fails with file and line; one that
has gone asks to write the table anew:
`python integration_tests/seams/test_host_waits.py`.
How often a call's ranks meet over the host is counted as well, and stands in the same table; what
of both concerns the calls of comm-collectives stands in its README.
"""

import importlib
import json
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.frames import Frames
from comm_collectives.moe import OverlappedMoe
from devicetest import Machine, fake_cuda
from moe_pipeline import MoEConfig, MoELayer
from moe_pipeline.executor import StageOutput
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.groups import MoEGroups
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_train.data import Batch
from ranktest import run_ranks
from unified_ckpt.geometry import shard

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "testing" / "devicetest" / "host_waits.toml"
README = ROOT / "packages" / "comm-collectives" / "README.md"
MARKS = "<!-- costs-on-nccl:begin -->\n", "<!-- costs-on-nccl:end -->"
OF_CALLS = 11  # programs of the table, the first ones, that are calls of comm-collectives
sys.path.append(str(ROOT / "benchmarks"))
DEVICES = importlib.import_module("moe_train_devices")  # its layouts have every key
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
Waits = dict[str, list[str]]  # the lines that wait, by program
Costs = tuple[Waits, dict[str, int]]  # and how often the ranks meet over the host
Program = Callable[[], Any]


def calls(rank: int) -> Iterator[tuple[str, Program]]:
    """A program for each call, and its backward."""
    x = torch.ones(8, 4, device="cuda", requires_grad=True)
    yield "all_reduce", lambda: cc.all_reduce(x.detach())
    yield "all_reduce, async_op", lambda: cc.all_reduce(x.detach(), async_op=True).wait()
    yield "all_reduce and backward", lambda: cc.all_reduce(x).sum().backward()
    yield "all_reduce, max", lambda: cc.all_reduce(x.detach(), op="max")
    yield "all_gather and backward", lambda: cc.all_gather(x).sum().backward()
    yield "reduce_scatter and backward", lambda: cc.reduce_scatter(x).sum().backward()
    yield "all_to_all and backward", lambda: cc.all_to_all(x).sum().backward()
    splits = [3, 5] if rank == 0 else [4, 4]
    yield "all_to_all, splits", lambda: cc.all_to_all(x.detach(), input_splits=splits)
    yield "broadcast", lambda: cc.broadcast(x.detach() if rank == 0 else None, src=0)

    def lists() -> None:
        if rank == 0:
            cc.isend_tensors([x.detach()], dst=1).wait()
        else:
            cc.recv_tensors(src=0)

    yield "isend_tensors, recv_tensors", lists

    def single() -> None:
        if rank == 0:
            cc.send(x, dst=1).sum().backward()
        else:
            cc.recv(src=0).sum().backward()

    yield "send, recv and backward", single
    idx = torch.tensor([[0, 3], [1, 2]] * 4, device="cuda")
    weights = torch.full((8, 2), 0.5, device="cuda")

    def moe() -> None:
        sent = cc.dispatch(x, idx, weights, num_experts=4)
        cc.combine(sent.x * sent.topk_weights[:, None], sent.handle).sum().backward()

    yield "dispatch, combine and backward", moe
    overlapped = OverlappedMoe(num_experts=4)

    def chunks() -> None:
        overlapped(x, idx, weights, lambda sent: sent.x * 2).sum().backward()

    yield "OverlappedMoe and backward", chunks


def layers() -> Iterator[tuple[str, Program]]:
    """A layer with all experts, and one with half of them on each rank."""
    config = MoEConfig(hidden_size=8, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2)
    for name, groups in (
        ("alone", MoEGroups()),
        ("ep=2", MoEGroups(ep=dist.group.WORLD, tokens=dist.group.WORLD)),
    ):
        layer = MoELayer(config, groups=groups, device="cuda")
        x = torch.ones(6, 8, device="cuda", requires_grad=True)

        def run(layer: MoELayer = layer, x: torch.Tensor = x) -> None:
            out = layer(x)
            (out.hidden.sum() + out.aux_loss).backward()

        yield f"MoELayer, {name}, and backward", run


def stages(rank: int) -> Iterator[tuple[str, Program]]:
    """Steps of a pipeline: shapes unknown, the same again, and others than before."""
    weight = torch.ones(8, device="cuda", requires_grad=True)

    def stage(x: torch.Tensor, *, target: object) -> StageOutput:
        y = x * weight
        return StageOutput(loss=y.sum()) if rank else StageOutput(tensors=(y,))

    groups = [dist.group.WORLD, dist.new_group()]
    executor = PipelineExecutor(
        {rank: stage},
        SCHEDULES["1f1b"](2, 4),
        rank=rank,
        forward_group=groups[0],
        backward_group=groups[1],
        options=ExecutorOptions(device="cuda", timeout_s=60),
    )

    def step(rows: Iterator[int]) -> object:
        return executor.step([(torch.ones(next(rows), 8, device="cuda"),)] * 4)

    name = "PipelineExecutor.step, 1f1b, 4 microbatches"
    for what, rows in (("", (2, 3)), (", posted ahead", (3, 3)), (", of other shapes", (3, 4))):
        yield f"{name}{what}", partial(step, iter(rows))


def steps(folder: Path, keys: list[tuple[str, ...]]) -> Iterator[tuple[str, Program]]:
    """A step of training with each of the keys; two layers on each rank."""
    for layout in keys:
        job = folder / ("four" if "parallel.pp=2" in layout else "two")
        runner, parallel = DEVICES.STEPS.build(job, "cuda", layout)
        each = 4 // parallel.num_sample_ranks
        places = torch.arange(16, device="cuda").expand(each, 16)  # as BatchLoader brings them
        tokens = torch.arange(each * 17, device="cuda").view(each, 17) % 96
        batch = Batch(input_ids=tokens[:, :-1], labels=tokens[:, 1:], position_ids=places)
        name = f"moe-train, a step, {' '.join(layout)}"
        yield name, lambda r=runner, b=batch: r.train([b, b], lr=1e-3)


def programs(rank: int, folder: Path, backend: str) -> Iterator[tuple[str, Program]]:
    """All of them with the first backend; with the other one steps without further keys."""
    yield from calls(rank)
    yield from layers()
    yield from stages(rank)
    two = [layout for layout in DEVICES.LAYOUTS if DEVICES.STEPS.world_size_of(layout) == 2]
    yield from steps(folder, [x for x in two if len(x) == 1 or backend == BACKENDS[0]])


def count(cuda: Machine, program: Program) -> tuple[list[str], int]:
    """Run a program twice; return where the second run waited, and how often the ranks met."""
    program()
    torch.cuda.synchronize()
    cuda.syncs.clear()
    counted = mock.patch.object(Frames, "offer", autospec=True, side_effect=Frames.offer)
    with counted as offers:
        program()
    return [f"{sync.where}: {sync.kind}" for sync in cuda.syncs], offers.call_count


def measure() -> Costs:
    """The waits of each program on the rank that has more of them, alike on both backends."""

    def fn(rank: int, world_size: int) -> Costs:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        found: Waits = {}
        met: dict[str, int] = {}
        for backend in BACKENDS:
            with fake_cuda(devices=2, unchecked=[(shard, "_check_tensor")]) as cuda:
                torch.cuda.set_device(rank)
                store = dist.FileStore(f"{folder}/{BACKENDS.index(backend)}", 2)
                dist.init_process_group(backend, store=store, rank=rank, world_size=2)
                for program, run in programs(rank, Path(folder), backend):
                    waits, met[program] = count(cuda, run)
                    assert without_lines(found.setdefault(program, waits)) == without_lines(waits)
                cuda.check()
                dist.destroy_process_group()
        return found, met

    with tempfile.TemporaryDirectory() as folder:
        for number, name in ((2, "two"), (4, "four")):
            (Path(folder) / name).mkdir()
            DEVICES.STEPS.write_job(Path(folder) / name, num_hidden_layers=number)
        ranks: list[Any] = run_ranks(fn, 2, init=False, timeout_s=900)
    names = list(ranks[0][0])
    waits = {name: max((waits[name] for waits, _ in ranks), key=len) for name in names}
    return waits, {name: max(met[name] for _, met in ranks) for name in names[:OF_CALLS]}


def cost_lines(table: dict[str, Any]) -> str:
    """The table of the README."""
    rows = ["| call | waits of the host for the device | meetings over the host |", "|---|---|---|"]
    for name, met in table["meetings"].items():
        waits = sum(int(wait.split(" x ")[0]) for wait in table["waits"][name])
        rows.append(f"| {name} | {waits} | {met} |")
    return "\n".join(rows) + "\n"


def shown() -> str:
    """The same as it stands there."""
    return README.read_text().split(MARKS[0])[1].split(MARKS[1])[0]


def without_lines(waits: list[str]) -> list[str]:
    """The waits by file and function, which edits elsewhere leave as they are, and how many."""
    counts = Counter(re.sub(r":\d+ ", " ", wait) for wait in waits)
    return [f"{number} x {wait}" for wait, number in sorted(counts.items())]


def test_what_stops_the_host_is_what_the_table_says() -> None:
    whole, problems = tomllib.loads(TABLE.read_text()), []
    table = whole["waits"]
    measured, met = measure()
    for name in sorted({*table, *measured}):
        waits = measured.get(name, [])
        if without_lines(waits) != table.get(name):
            new = "\n    ".join(sorted(set(waits))) or "nothing"
            was = "\n    ".join(table.get(name, ["not in the table"])) or "nothing"
            problems.append(f"{name}: waits at\n    {new}\n  the table has\n    {was}")
    if met != whole["meetings"]:
        problems.append(f"meetings over the host: {met}; the table has {whole['meetings']}")
    how = f"if all of it is meant, write the table anew: python {Path(__file__).name}"
    assert not problems, "\n".join([*problems, how])


def test_no_message_of_an_executor_stops_the_host() -> None:
    table = tomllib.loads(TABLE.read_text())["waits"]
    assert table["PipelineExecutor.step, 1f1b, 4 microbatches"] == []
    assert table["PipelineExecutor.step, 1f1b, 4 microbatches, posted ahead"] == []


def test_the_readme_of_comm_collectives_has_what_the_table_says_of_its_calls() -> None:
    assert shown() == cost_lines(tomllib.loads(TABLE.read_text())), "python test_host_waits.py"


if __name__ == "__main__":
    rows = [f"# Written by integration_tests/seams/{Path(__file__).name}, which says of what."]
    rows += ["", "[waits]"]
    measured, met = measure()
    for program, waits in measured.items():
        told = "".join(f'    "{wait}",\n' for wait in without_lines(waits))
        rows.append(
            f"{json.dumps(program)} = [\n{told}]" if told else f"{json.dumps(program)} = []"
        )
    rows += ["", "[meetings]", *(f'"{name}" = {number}' for name, number in met.items())]
    TABLE.write_text("\n".join(rows) + "\n")
    head, tail = README.read_text().split(MARKS[0] + shown())
    README.write_text(head + MARKS[0] + cost_lines(tomllib.loads(TABLE.read_text())) + tail)
