"""A run whose states lie on its nodes between checkpoints: a node dies, and its memory with it."""

import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_train.checkpoint.node_states import NodeStates
from moe_train.config import Config
from moe_train.jobs.job import check, train
from moe_train.parallel import start
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training import TrainingLoop, build_training
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


def test_the_command_goes_on_from_the_newest_state_of_the_nodes(
    configure: Configure, tmp_path: Path, memory: Path
) -> None:
    configure()
    program = "import sys; from moe_train.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", str(tmp_path / "job.toml")]
    command += [key for key in KEYS[2:]] + ["checkpoint.node_copies=0"]
    command += [f"checkpoint.node_folder={memory}", "train.validation_interval_steps=1000"]
    metrics = tmp_path / "run" / "metrics.jsonl"

    with subprocess.Popen([*command, "train.max_steps=100000"]) as running:
        until_s = time.monotonic() + 120
        while not metrics.exists() or max([0, *losses_in(tmp_path / "run")]) < 8:
            assert time.monotonic() < until_s and running.poll() is None
            time.sleep(0.05)
        running.kill()
    last = max(losses_in(tmp_path / "run"))
    # A time limit of groups says nothing about who holds what.
    again = [*command, f"train.max_steps={last + 4}", "parallel.timeout_s=77", "--resume"]
    ended = subprocess.run(again, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(rf"step (\d+) is loaded from {memory}", ended.stderr)
    assert found is not None and int(found[1]) >= 6, ended.stderr
    assert (tmp_path / "run" / f"checkpoint-{last + 4}").is_dir()


def test_a_rank_whose_first_save_has_not_ended_saves_no_second_one(
    configure: Configure, tmp_path: Path, memory: Path
) -> None:
    """Ranks learn of the end of a save beside training each in its own time."""
    config = configure(*KEYS[1:], "checkpoint.save_mode=async")
    check(config, "")

    def run(rank: int, _: int) -> int:
        placed = on_node(config, memory, "a")
        training = build_training(placed, start(placed))
        loop = TrainingLoop.begin(placed, training, None)
        loop.saver.open()
        loop.saver.save_on_nodes(loop._state())
        loop.saver.saved = None
        begun = training.checkpointer.background
        assert begun is not None
        seen: list[int] = []
        begin = begun.begin
        begun.__class__.begin = lambda *a, **k: seen.append(1) or begin(*a[1:], **k)  # type: ignore
        loop.saver.save_on_nodes(loop._state())
        loop.saver.look(wait=True)
        training.checkpointer.close()
        return len(seen)

    assert run_ranks(run, 1, timeout_s=120) == [0]
