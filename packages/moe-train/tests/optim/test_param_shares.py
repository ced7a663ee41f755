"""Parameters that ranks share out, in whole jobs."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_pipeline.schedules import Action, Kind
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.optim import ParameterShares, RowShares, StageBlocks
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


def test_rows_of_the_next_block_travel_while_one_is_computed() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        group = dist.group.WORLD
        assert group is not None
        torch.manual_seed(3)
        stage = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        plain = copy.deepcopy(stage)
        weights = list(stage.parameters())
        blocks = [(layer, list(layer.parameters())) for layer in stage]
        shares = ParameterShares(
            [RowShares(group, dict.fromkeys(weights, (1, 3)))],
            {0: StageBlocks(module=stage, parameters=weights, blocks=blocks)},
        )
        shares.let_go()
        log: list[str] = []
        started = RowShares.start_all_gather

        def begin(own: RowShares, parameters: Sequence[nn.Parameter], rows: Any) -> object:
            (number,) = [n for n, weight in enumerate(weights) if weight is parameters[0]]
            log.append(f"rows {number}")
            return started(own, parameters, rows)

        RowShares.start_all_gather = begin  # type: ignore[method-assign, assignment]
        for number, layer in enumerate(stage):
            layer.register_forward_pre_hook(lambda *_, n=number: log.append(f"forward {n}"))
        x = torch.ones(2, 4, requires_grad=True)
        with shares.around(Action(0, Kind.FORWARD, 0)):
            y = stage(x * 2)
        assert not any(weight.untyped_storage().nbytes() for weight in weights)
        with shares.around(Action(0, Kind.BACKWARD, 0)):
            y.square().sum().backward()
        assert not any(weight.untyped_storage().nbytes() for weight in weights)
        plain(torch.ones(2, 4) * 2).square().sum().backward()
        for weight, expected in zip(weights, plain.parameters(), strict=True):
            assert torch.equal(weight.grad, expected.grad)
        return log

    ahead = ["rows 0", "rows 1", "forward 0", "rows 2", "forward 1", "forward 2"]
    assert run_ranks(fn, 2) == [[*ahead, "rows 2", "rows 1", "rows 0"]] * 2
