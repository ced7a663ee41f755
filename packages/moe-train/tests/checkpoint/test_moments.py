"""Jobs whose checkpoints hold AdamW's moments in one byte an element, and their resumes."""

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from moe_train.config import Config
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from ranktest import run_ranks
from unified_ckpt import read_index

Configure = Callable[..., Config]
StepHook = Callable[[Callable[[int], None]], RankContext]
SEAM = 4
INT8 = "checkpoint.moments=int8"
BOUND = 5e-4
"""Of the losses of eight steps after a resume, relative to the job that was never stopped; it is
1e-4 here, and 0.05 where the moments are lost.
"""


def run(config: Config, resume: str = "") -> list[str]:
    """Train; return what the first rank's log says."""
    check(config, resume)

    def job(*_: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("moe_train").addHandler(handler)
        logging.getLogger("moe_train").setLevel(logging.INFO)
        train(config, resume, RankContext())
        return said

    return run_ranks(job, config.world_size, timeout_s=240)[0]  # type: ignore[return-value]


def losses_in(folder: Path) -> dict[int, float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_job_resumed_from_packed_moments_trains_on_beside_the_one_that_was_never_stopped(
    configure: Configure, tmp_path: Path
) -> None:
    keys = ("train.max_steps=12", f"checkpoint.interval_steps={SEAM}")
    run(configure(*keys, "checkpoint.save_total_limit=9", "parallel.ep=2", INT8))
    source = tmp_path / "run" / f"checkpoint-{SEAM}"
    index = read_index(source, "optimizer")
    kinds = {key.rpartition("/")[2]: entry.dtype for key, entry in index.items()}
    assert (kinds["exp_avg"], kinds["exp_avg_sq"]) == ("I8", "U8")
    other = tmp_path / "resumed"
    shutil.copytree(source, other / source.name)
    said = run(configure(*keys, "parallel.pp=2", f"train.output_dir={other}"), resume="latest")
    (line,) = [line for line in said if "one byte an element" in line]
    assert line.startswith(f"{other / source.name} holds AdamW's moments in one byte an element")
    whole, resumed = losses_in(tmp_path / "run"), losses_in(other)
    assert resumed.keys() == set(range(SEAM + 1, 13)) and resumed != whole
    worst = max(abs(loss - whole[step]) / whole[step] for step, loss in resumed.items())
    assert 0 < worst <= BOUND
    again = read_index(other / "checkpoint-12", "optimizer")
    assert {entry.dtype for key, entry in again.items() if "/exp_avg" in key} == {"F32"}


def test_states_on_nodes_hold_packed_moments_too(configure: Configure, step_hook: StepHook) -> None:
    with tempfile.TemporaryDirectory(prefix="moe-train-nodes-", dir="/dev/shm") as memory:
        config = configure(
            f"checkpoint.node_folder={memory}",
            "checkpoint.node_interval_steps=2",
            "checkpoint.node_copies=0",
            INT8,
        )
        check(config, "")

        def job(*_: int) -> set[torch.dtype]:
            kinds: set[torch.dtype] = set()

            def look(step: int) -> None:
                for file in Path(memory).rglob("step-2-*/optimizer*.safetensors"):
                    stored = load_file(file).items()
                    kinds.update(t.dtype for key, t in stored if key.endswith(("avg", "sq")))

            train(config, "", step_hook(look))
            return kinds

        assert run_ranks(job, 1) == [{torch.int8, torch.uint8}]
