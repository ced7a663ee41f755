"""Parameters that ranks share out, in whole jobs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_train.config import Config
from moe_train.data import prepare
from moe_train.parallel import start
from moe_train.rank import RankContext
from moe_train.training import TrainingLoop, build_training
from ranktest import run_ranks

Configure = Callable[..., Config]
SAVES = ["checkpoint.interval_steps=2", "checkpoint.save_total_limit=9", "train.max_steps=4"]
LOW = ["train.dtype=bfloat16", "train.master_weights=true"]
ROUNDED = ["train.dtype=bfloat16", "train.stochastic_rounding=true"]


def run(config: Config, source: Path | None = None) -> dict[str, Tensor]:
    """Run the job, from a checkpoint where one is given; what its last checkpoint holds."""
    prepare(config)
    folder = Path(config.train.output_dir)
    folder.mkdir(exist_ok=True)

    def on_rank(rank: int, _: int) -> None:
        training = build_training(config, start(config))
        state = None if source is None else training.checkpointer.load(source)
        context = RankContext()
        context.step = 0 if state is None else state.step
        loop = TrainingLoop.begin(config, training, None, state)
        loop.run(context)
        loop.training.checkpointer.close()

    run_ranks(on_rank, config.world_size, timeout_s=240)
    last = folder / "checkpoint-4"
    files = sorted(last.rglob("*.safetensors"))
    assert files
    return {
        f"{file.parent.name} {name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("axes", "numbers"),
    [
        (["parallel.dp=2", "parallel.ep=2", "train.validation_interval_steps=1"], LOW),
        (["parallel.dp=3", "train.recompute=layers"], ROUNDED),  # 320 rows on three ranks
        (["parallel.pp=2", "parallel.dp=2", "parallel.schedule=zb_1p"], ["optimizer.name=muon"]),
    ],
)
def test_a_job_with_shared_out_parameters_has_the_bits_of_one_with_whole_ones(
    configure: Configure, tmp_path: Path, axes: list[str], numbers: list[str]
) -> None:
    def job(name: str, sharding: int) -> Config:
        folder = f"train.output_dir={tmp_path / name}"
        return configure(*axes, *numbers, *SAVES, f"parallel.sharding={sharding}", folder)

    expected = run(job("whole", 2))
    found = run(job("shared", 3))
    # A checkpoint of either goes on as the other.
    resumed = run(job("resumed", 3), tmp_path / "whole" / "checkpoint-2")
    back = run(job("back", 2), tmp_path / "shared" / "checkpoint-2")
    for tensors in (found, resumed, back):
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name
