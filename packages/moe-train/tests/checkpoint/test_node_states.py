"""A run whose states lie on its nodes between checkpoints: a node dies, and its memory with it."""

import logging
import os
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_train.checkpoint.node_states import NodeStates
from moe_train.config import Config
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from ranktest import collect_ranks, run_ranks
from unified_ckpt.errors import DamagedCheckpointWarning
from unified_ckpt.tiers import held_copies

Configure = Callable[..., Config]
StepHook = Callable[[Callable[[int], None]], RankContext]
STEPS = 9
KEYS = (
    "parallel.ep=2",
    f"train.max_steps={STEPS}",
    "checkpoint.interval_minutes=inf",
    "checkpoint.node_interval_steps=2",
)


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moe-train-nodes-", dir="/dev/shm") as folder:
        yield Path(folder)


def on_node(config: Config, memory: Path, node: str) -> Config:
    """The job as a rank of that node sees it: every node has memory of its own."""
    os.environ["UNIFIED_CKPT_NODE"] = node
    places = replace(config.checkpoint, node_folder=str(memory / node))
    return replace(config, checkpoint=places)


def losses_in(folder: Path) -> dict[int, float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def copies_in(memory: Path) -> dict[str, set[int]]:
    return {
        node.name: {copy.step for folder in node.iterdir() for copy in held_copies(folder)}
        for node in memory.iterdir()
    }


def resumed(config: Config, memory: Path, nodes: list[str]) -> list[list[str]]:
    """Go on from the newest state; return what each rank's log says."""

    def run(rank: int, _: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("moe_train").addHandler(handler)
        logging.getLogger("moe_train").setLevel(logging.INFO)
        train(on_node(config, memory, nodes[rank]), "latest", RankContext())
        return said

    return run_ranks(run, 2, timeout_s=240)  # type: ignore[return-value]


def die(config: Config, memory: Path, *, after: int, step_hook: StepHook) -> None:
    """Train on nodes a and b until b dies with its memory."""
    check(config, "")

    def run(rank: int, _: int) -> None:
        def hook(step: int) -> None:
            if rank == 1 and step == after:
                os.kill(os.getpid(), signal.SIGKILL)

        train(on_node(config, memory, "ab"[rank]), "", step_hook(hook))

    outcomes = collect_ranks(run, 2, timeout_s=240)
    assert outcomes[1].error_type == "Died" and not outcomes[0].ok, outcomes
    assert copies_in(memory) == {"a": {6}, "b": {6}}
    shutil.rmtree(memory / "b")


def test_a_run_goes_on_from_the_state_on_its_nodes_as_if_no_node_had_died(
    configure: Configure, tmp_path: Path, memory: Path, step_hook: StepHook
) -> None:
    whole = configure(*KEYS, f"train.output_dir={tmp_path / 'whole'}")
    check(whole, "")
    run_ranks(lambda *_: train(whole, "", RankContext()), 2, timeout_s=240)
    config = configure(*KEYS)
    die(config, memory, after=7, step_hook=step_hook)
    run = tmp_path / "run"
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"], "the first one"

    check(config, "latest")
    said, _ = resumed(config, memory, ["a", "fresh"])
    assert any(line.startswith(f"step 6 is loaded from {memory / 'a'}") for line in said), said
    assert "any 1 node lost: at most 2 steps lost; the copies come from other nodes" in said
    assert losses_in(run) == losses_in(tmp_path / "whole")
    assert (run / f"checkpoint-{STEPS}").is_dir()
    assert set().union(*copies_in(memory).values()) == set(), "nothing stays in memory"


def test_under_another_layout_a_run_goes_on_from_storage_and_says_so(
    configure: Configure, tmp_path: Path, memory: Path, step_hook: StepHook
) -> None:
    die(configure(*KEYS), memory, after=7, step_hook=step_hook)
    other = configure("parallel.ep=1", "parallel.dp=2", *KEYS[1:])
    check(other, "latest")
    with pytest.warns(DamagedCheckpointWarning, match="saved under another layout"):
        resumed_here(other, memory)
    assert losses_in(tmp_path / "run").keys() == set(range(1, STEPS + 1))


def resumed_here(config: Config, memory: Path) -> None:
    """As `resumed`; what the first rank warns of is warned of here."""

    def run(rank: int, _: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(on_node(config, memory, ["a", "c"][rank]), "latest", RankContext())
        return [str(each.message) for each in caught if each.category is DamagedCheckpointWarning]

    first, _ = run_ranks(run, 2, timeout_s=240)
    for text in first:  # type: ignore[attr-defined]
        warnings.warn(text, DamagedCheckpointWarning, stacklevel=2)


def test_a_state_that_cannot_be_saved_on_a_node_is_one_line(
    configure: Configure, tmp_path: Path, memory: Path, step_hook: StepHook
) -> None:
    config = configure(*KEYS)
    check(config, "")

    def run(rank: int, _: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("moe_train").addHandler(handler)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

        def hook(step: int) -> None:
            if rank == 1 and step in (4, 5):  # the largest file that may be written
                limit = 20_000 if step == 4 else hard
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

        train(on_node(config, memory, "ab"[rank]), "", step_hook(hook))
        return [line for line in said if "on the nodes" in line]

    (line,), other = run_ranks(run, 2, timeout_s=240)  # type: ignore[misc]
    assert line.startswith("warning: the state of step 4 was not saved on the nodes: ")
    assert "File too large" in line and line.endswith("training goes on") and not other
    assert losses_in(tmp_path / "run").keys() == set(range(1, STEPS + 1))


def test_each_run_has_a_folder_of_its_own_on_a_node(configure: Configure) -> None:
    assert NodeStates.of(configure()) is None
    folders = set()
    for run in ("a/run", "b/run"):
        states = NodeStates.of(
            configure("checkpoint.node_folder=/dev/shm/x", f"train.output_dir=/data/{run}")
        )
        assert states is not None and states.tier_steps == 10 and states.options.copies == 1
        assert states.options.path.parent == Path("/dev/shm/x")
        assert states.options.path.name.startswith("run-")
        folders.add(states.options.path)
    assert len(folders) == 2
