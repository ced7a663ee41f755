"""Schedules that torch.distributed.pipelining exports, read and checked by moe-pipeline.

torch's own classes make them, for stages on a process group that moves no data.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import COMPUTE, Schedule, add_transfers, check, simulate
from moe_pipeline.schedules.views import from_csv, read_csv

RANKS = 4
LOOPED, V = (0, RANKS), (0, 2 * RANKS - 1)
MULTI: dict[str, tuple[str, tuple[int, ...]]] = {
    "Interleaved1F1B": ("interleaved_1f1b", LOOPED),
    "LoopedBFS": ("looped_bfs", LOOPED),
    "InterleavedZeroBubble": ("interleaved_zero_bubble", LOOPED),
    "ZBVZeroBubble": ("zbv", V),
    "DualPipeV": ("dualpipe_v", V),
}


@pytest.fixture(autouse=True)
def ranks_without_data() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def torch_schedule(name: str, stages: tuple[int, ...], microbatches: int) -> Any:
    made = [
        PipelineStage(nn.Identity(), s, RANKS * len(stages), torch.device("cpu")) for s in stages
    ]
    cls = get_schedule_class(name)
    return cls(made if len(made) > 1 else made[0], microbatches, loss_fn=nn.MSELoss())


def exported(name: str, microbatches: int) -> Schedule:
    """The order that torch exports for a schedule with one stage on each rank."""
    order = torch_schedule(name, (0,), microbatches)._get_pipeline_order()
    rows = [",".join("" if a is None else str(a) for a in order[rank]) for rank in range(RANKS)]
    return from_csv("\n".join(rows), name=name)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("microbatches", [8, 12])
def test_exported_csvs_load_and_pass_the_checker(
    name: str, microbatches: int, tmp_path: Path
) -> None:
    schedule = torch_schedule(name, MULTI[name][1], microbatches)
    path = tmp_path / "exported.csv"
    schedule._dump_csv(path, format="compute_only")
    bare = read_csv(path)
    assert check(add_transfers(bare)) == []
    schedule._dump_csv(path, format="compute_comms")
    lowered = read_csv(path)
    # torch posts sends without waiting, so any number of them may be under way.
    assert check(lowered, send_buffers=microbatches) == []
    made = SCHEDULES[MULTI[name][0]](RANKS, microbatches)
    assert (made.num_stages, made.num_microbatches) == (bare.num_stages, bare.num_microbatches)
    rows = [tuple(a for a in row if a.kind in COMPUTE) for row in made.ranks]
    theirs, mine = (simulate(s, pair_saving_s=0.0) for s in (bare, made))
    assert mine.makespan_s == theirs.makespan_s
    assert mine.peak_bytes == theirs.peak_bytes
    assert [sorted(row) for row in rows] == [sorted(row) for row in bare.ranks]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_interleaved_schedules_are_nowhere_slower_or_larger_than_torchs(
    name: str, tmp_path: Path
) -> None:
    """At equal costs, with microbatches that the ranks divide and others; torch refuses some."""
    compared = []
    for microbatches in range(1, 3 * RANKS + 2):
        try:
            schedule = torch_schedule(name, LOOPED, microbatches)
        except ValueError:
            continue
        schedule._dump_csv(tmp_path / "exported.csv", format="compute_only")
        theirs = simulate(read_csv(tmp_path / "exported.csv"))
        mine = simulate(SCHEDULES[MULTI[name][0]](RANKS, microbatches))
        assert mine.makespan_s <= theirs.makespan_s, microbatches
        assert max(mine.peak_bytes) <= max(theirs.peak_bytes), microbatches
        compared.append(microbatches)
    assert {5, 6, 7, 10} <= set(compared)


@pytest.mark.parametrize("microbatches", [4, 8, 12])
def test_the_checker_names_the_fault_in_exported_1f1b(microbatches: int) -> None:
    """The last rank leaves out F0 and ends with a forward of a microbatch that does not exist."""
    wrong = replace(exported("1F1B", microbatches), num_microbatches=microbatches)
    last = RANKS - 1
    problems = check(add_transfers(wrong))
    assert [(p.kind, p.rank) for p in problems] == [("placement", last)]
    assert f"{last}F{microbatches}: microbatch is outside" in problems[0].message
    # Without that forward, what is left out is named too.
    rest = [tuple(a for a in row if a.microbatch < microbatches) for row in wrong.ranks]
    found = [str(p) for p in check(add_transfers(replace(wrong, ranks=tuple(rest))))]
    assert f"completeness: rank {last}: {last}F0 occurs 0 times, expected 1" in found


def test_the_other_ranks_of_exported_1f1b_are_those_of_ours() -> None:
    wrong = exported("1F1B", 8)
    made = SCHEDULES["1f1b"](RANKS, 8)
    for theirs, row in zip(wrong.ranks[:-1], made.ranks[:-1], strict=True):
        assert theirs == tuple(a for a in row if a.kind in COMPUTE)
