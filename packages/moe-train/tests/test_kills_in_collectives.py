"""A rank that is killed inside a collective of tensor, expert tensor, context or sharded data
parallelism: the other ranks name it, and the job goes on from its checkpoint to the bits of one
that nobody killed.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comm_collectives.call.calls import Call
from comm_collectives.call.frames import Frames
from comm_collectives.call.groups import group_state
from moe_pipeline.layer import etp
from moe_train.config import OWN_TOML, Config
from moe_train.jobs.job import check, train
from moe_train.model.parallel import head_exchange, ring, tensor_parallel, vocabulary
from moe_train.optim import shares
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from ranktest import collect_ranks, run_ranks
from unified_ckpt import diff_checkpoints

VICTIM = 2
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4}
JOB = ("checkpoint.interval_steps=1", "train.global_batch_size=8")
CP = ("parallel.dp=2", "parallel.ep=2", "parallel.cp=2")
LAYOUTS: dict[str, tuple[tuple[str, ...], list[tuple[Any, str]]]] = {
    "tensor": (
        ("parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "parallel.sharding=3"),
        [
            (tensor_parallel, "all_gather"),
            (tensor_parallel, "reduce_scatter"),
            (vocabulary, "all_reduce"),
            (shares, "reduce_scatter"),
            (shares, "all_gather"),
        ],
    ),
    "experts": (
        ("parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "parallel.etp=2"),
        [(etp, "all_gather"), (etp, "reduce_scatter")],
    ),
    "ring": ((*CP, "parallel.cp_attention=ring"), [(ring, "all_to_all")]),
    "heads": ((*CP, "parallel.sharding=2"), [(head_exchange, "all_to_all")]),
}


def die_inside(module: Any, name: str, note: Path) -> None:
    """Kill this process in the next call of a collective by a module, when it meets the others."""
    called, offer = getattr(module, name), Frames.offer
    doomed: list[object] = []

    def call(*args: Any, **options: Any) -> Any:
        doomed.append(group_state(options["group"]))
        return called(*args, **options)

    def offered(frames: Frames, *args: Any, waiter: Call, **options: Any) -> Any:
        if waiter.name == name and waiter.state in doomed:
            note.write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)
        return offer(frames, *args, waiter=waiter, **options)

    setattr(module, name, call)
    Frames.offer = offered  # type: ignore[assignment,method-assign]


def figures(folder: Path) -> list[tuple[int, float, float]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_killed_inside_a_collective_is_named_and_the_job_goes_on_to_the_same_bits(
    configure: Callable[..., Config],
    step_hook: Callable[[Callable[[int], None]], RankContext],
    tmp_path: Path,
    layout: str,
) -> None:
    """One kill in each step but the first, and a resume after each."""
    keys, collectives = LAYOUTS[layout]
    last = len(collectives) + 1

    def made(folder: str) -> Config:
        steps = (f"train.max_steps={last}", f"train.output_dir={tmp_path / folder}")
        return configure(*JOB, *keys, *steps, **HEADS)

    def until(killed_in: int) -> Callable[[int, int], None]:
        """A job on its ranks, of which one dies in that step."""

        def job(rank: int, _: int) -> None:
            def after(step: int) -> None:
                if rank == VICTIM and step == killed_in - 1:
                    die_inside(*collectives[killed_in - 2], tmp_path / f"died in step {killed_in}")

            train(config, "" if killed_in == 2 else "latest", step_hook(after))

        return job

    whole, config = made("whole"), made("killed")
    check(whole, "")
    run_ranks(lambda *_: train(whole, "", RankContext()), 4, timeout_s=240)
    for step, (_, name) in enumerate(collectives, start=2):
        outcomes = collect_ranks(until(step), 4, timeout_s=240)
        assert outcomes[VICTIM].exitcode == -signal.SIGKILL, step
        told = [str(each.error) for each in outcomes if each.rank != VICTIM]
        assert all(f"rank {VICTIM}" in text for text in told), (name, told)
        assert (tmp_path / f"died in step {step}").read_text() == name
    run_ranks(lambda *_: train(config, "latest", RankContext()), 4, timeout_s=240)
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
    ended, other = (tmp_path / name / f"checkpoint-{last}" for name in ("killed", "whole"))
    apart = {each.name for each in diff_checkpoints(ended, other)}
    # Of torch's own generators, which nothing here draws from, each job has what it began with.
    assert {name for name in apart if "random_state" not in name} <= {OWN_TOML}
