"""Ranks that share out the positions of samples, against one process: the same numbers.

Rows of unequal lengths, with two documents, one document and padding, at borders and beside them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from ranktest import run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]
OfFamily = Callable[[str], tuple[tuple[str, ...], dict[str, Any]]]
STEPS = 2
LAYOUTS = [
    ("parallel.dp=3", "parallel.cp=3", "parallel.sharding=2", "train.recompute=layers"),
    ("parallel.pp=2", "parallel.ep=2", "parallel.cp=2", "parallel.schedule=zb_1p"),
    ("parallel.dp=2", "parallel.ep=2", "parallel.cp=2", "parallel.sharding=3"),
]


def figures(config: Config, batches: Batches) -> list[list[float]]:
    """Of each step its losses, norm and tokens, and those of an evaluation."""

    def run(*_: int) -> list[list[float]]:
        runner = build_runner(config, read_model_config(config), start(config), {})[0]
        at, found = runner.parallel, []
        for step in range(STEPS):
            runner.stages.begin_step(step + 1)
            # A larger rate shows the rounding of gradients near zero, of which Adam takes the sign.
            result = runner.train(
                batches(config, step, at.sample_rank, at.num_sample_ranks), lr=0.002
            )
            losses = (result.loss, result.aux_loss, result.z_loss, result.mtp_loss)
            found.append([*losses, result.grad_norm, result.num_tokens])
        evaluated = runner.evaluate(batches(config, 9, at.sample_rank, at.num_sample_ranks))
        return [*found, list(evaluated)]

    first, *others = run_ranks(run, config.world_size, timeout_s=240)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_every_family_has_the_numbers_of_one_process(
    configure: Configure, ragged_batches: Batches, of_family: OfFamily, family: str
) -> None:
    balance, model = of_family(family)
    common = (
        "data.sequence_length=11",
        "train.global_batch_size=8",
        "moe.aux_loss_coef=0.1",
        *balance,
    )
    expected = figures(configure(*common, **model), ragged_batches)
    assert expected[0][1] > 0.05, "a balancing loss"
    for layout in LAYOUTS:
        for step, found in zip(
            expected, figures(configure(*common, *layout, **model), ragged_batches), strict=True
        ):
            assert found == pytest.approx(step, rel=1e-6), layout


RING = "parallel.cp_attention=ring"
RINGS = [
    ("parallel.dp=6", "parallel.cp=6", RING, "parallel.sharding=2", "train.recompute=selective"),
    ("parallel.pp=2", "parallel.ep=2", "parallel.cp=2", RING, "parallel.schedule=zb_1p"),
]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_keys_that_go_around_give_the_numbers_of_one_process(
    configure: Configure, ragged_batches: Batches, of_family: OfFamily, family: str
) -> None:
    """More ranks than heads among them."""
    common = ("data.sequence_length=11", "train.global_batch_size=4", "moe.aux_loss_coef=0.1")
    balance, model = of_family(family)
    common, model = (*common, *balance), {**model, "attention_dropout": 0.0}
    expected = figures(configure(*common, **model), ragged_batches)
    for layout in RINGS:
        found = figures(configure(*common, *layout, **model), ragged_batches)
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6), layout


def test_ranks_without_a_position_take_part(configure: Configure) -> None:
    """Two positions of four ranks."""
    common = ("data.sequence_length=2", "moe.aux_loss_coef=0.1", "moe.aux_loss_scope=sequence")
    tokens = torch.randint(1, 300, (6, 3), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        input_ids=tokens[:, :2],
        labels=tokens[:, 1:],
        position_ids=torch.arange(2).repeat(6, 1),
    )

    def result_of(*layout: str) -> list[float]:
        config = configure(*common, *layout, num_attention_heads=4, num_experts=4)

        def run(*_: int) -> list[float]:
            runner = build_runner(config, read_model_config(config), start(config), {})[0]
            result = runner.train([batch, batch], lr=0.02)
            return [result.loss, result.aux_loss, result.grad_norm, result.num_tokens]

        return run_ranks(run, config.world_size, timeout_s=240)[0]  # type: ignore[no-any-return]

    expected = pytest.approx(result_of(), rel=1e-6)
    assert result_of("parallel.ep=4", "parallel.cp=4") == expected
    assert result_of("parallel.pp=2", "parallel.dp=4", "parallel.cp=4") == expected
    assert result_of("parallel.ep=4", "parallel.cp=4", RING) == expected
