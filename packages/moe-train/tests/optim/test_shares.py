"""Moments and master weights that ranks share out, against whole ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_train.config import Config
from moe_train.data import prepare
from moe_train.jobs.layout_choice import choose_layouts
from moe_train.parallel import start
from moe_train.rank import RankContext
from moe_train.training import TrainingLoop, build_training, read_model_config
from ranktest import run_ranks

Configure = Callable[..., Config]
SAVES = ["checkpoint.interval_steps=2", "checkpoint.save_total_limit=9", "train.max_steps=4"]
LOW = ["train.dtype=bfloat16", "train.master_weights=true"]
ROUNDED = ["train.dtype=bfloat16", "train.stochastic_rounding=true"]


def end_of(
    config: Config, source: Path | None = None
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Run the job on every rank: the weights of each in the end, and what each keeps for updates.

    Args:
        source: a checkpoint to go on from.
    """
    prepare(config)
    Path(config.train.output_dir).mkdir(exist_ok=True)

    def on_rank(rank: int, _: int) -> object:
        training = build_training(config, start(config))
        state = None if source is None else training.checkpointer.load(source)
        context = RankContext()
        context.step = 0 if state is None else state.step
        loop = TrainingLoop.begin(config, training, None, state)
        loop.run(context)
        runner = loop.training.runner
        kept = {f"master {n}": t for n, t in runner.optimizer.master.items()}
        for moment, tensors in runner.optimizer.moments().items():
            kept |= {f"{moment} {name}": tensor for name, tensor in tensors.items()}
        loop.training.checkpointer.close()
        return dict(runner.stages.state_dict()), kept

    both = run_ranks(on_rank, config.world_size, timeout_s=240)
    return [weights for weights, _ in both], [kept for _, kept in both]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("axes", "numbers", "most"),
    [
        # Experts along dp, dense rows along dp x ep; six experts on two ranks.
        (["parallel.dp=2", "parallel.ep=2"], LOW, 0.42),
        (["parallel.dp=3"], ROUNDED, 0.40),  # 320 rows of vocabulary, 6 experts, 32 and 16 rows
        # The embedding that both stages hold is shared out on each of them.
        (["parallel.pp=2", "parallel.dp=2", "parallel.overlap_grad_reduce=true"], [], 0.51),
        (["parallel.dp=2"], ["optimizer.name=muon"], 0.80),  # dense matrices stay whole
    ],
)
def test_shared_out_states_give_the_bits_of_whole_ones_in_a_share_of_the_memory(
    configure: Configure,
    tmp_path: Path,
    axes: list[str],
    numbers: list[str],
    most: float,
) -> None:
    # Norms are summed in another order, so that a clipped gradient would not have the same bits.
    same = [*axes, *numbers, *SAVES, "optimizer.max_grad_norm=1e9"]
    model = {"tie_word_embeddings": True}

    def job(sharding: int) -> Config:
        folder = tmp_path / f"sharding-{sharding}"
        return configure(
            *same, f"parallel.sharding={sharding}", f"train.output_dir={folder}", **model
        )

    whole, kept_whole = end_of(job(0))
    shared, kept = end_of(job(1))
    for rank, (found, expected) in enumerate(zip(shared, whole, strict=True)):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), f"rank {rank}: {name}"
    for found, expected in zip(kept, kept_whole, strict=True):
        share = sum(t.nbytes for t in found.values()) / sum(t.nbytes for t in expected.values())
        assert share <= most
    # Together the ranks keep every row once.
    dp, holders = job(0).parallel.dp, job(0).parallel.dp * job(0).parallel.ep
    once = 0.0
    for name, tensor in (item for expected in kept_whole for item in expected.items()):
        by_muon = name.startswith("momentum_buffer")
        num_keeping = dp if ".experts." in name else 1 if by_muon else holders
        once += tensor.numel() / num_keeping
    assert sum(t.numel() for found in kept for t in found.values()) == round(once)
    # A checkpoint of either resumes in the other.
    for first, then in ((0, 1), (1, 0)) if numbers is LOW else ():
        resumed, _ = end_of(
            configure(
                *same,
                f"parallel.sharding={then}",
                f"train.output_dir={tmp_path / f'{first}-to-{then}'}",
                **model,
            ),
            tmp_path / f"sharding-{first}" / "checkpoint-2",
        )
        for found, expected in zip(resumed, whole, strict=True):
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), f"{first} to {then}: {name}"


def test_a_job_with_shared_out_gradients_resumes_in_its_own_bits(
    configure: Configure, tmp_path: Path
) -> None:
    def job(name: str) -> Config:
        axes = ["parallel.dp=2", "parallel.ep=2", "parallel.sharding=2"]
        return configure(*axes, *LOW, *SAVES, f"train.output_dir={tmp_path / name}")

    weights, kept = end_of(job("whole"))
    again, kept_again = end_of(job("resumed"), tmp_path / "whole" / "checkpoint-2")
    for found, expected in zip([*again, *kept_again], [*weights, *kept], strict=True):
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


def test_layouts_that_are_compared_have_shared_out_states(configure: Configure) -> None:
    config = configure()
    layouts = choose_layouts(config, read_model_config(config), max_ranks=4, count=12)
    assert {layout.values.get("parallel.sharding") for layout in layouts} >= {0, 1, 2}
