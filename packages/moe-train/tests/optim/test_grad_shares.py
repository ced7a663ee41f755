"""Gradients that ranks share out, against whole ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_pipeline.schedules import Action, Kind
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.errors import MoeTrainError
from moe_train.jobs.rank_alone import random_batches
from moe_train.optim import RowShares, StageBlocks
from moe_train.optim.grad_shares import GradientShares
from moe_train.parallel import start
from moe_train.training import build_training
from ranktest import run_ranks

Configure = Callable[..., Config]


def gradients_of(config: Config) -> list[dict[str, Any]]:
    """Of each rank after a step: its rows of all gradients, their bytes and the most at once."""
    prepare(config)

    def on_rank(rank: int, _: int) -> dict[str, Any]:
        training = build_training(config, start(config))
        runner, stages = training.runner, training.runner.stages
        named = {n: p for n, p in stages.named_parameters() if p.requires_grad}
        most = {"gradients": 0, "parameters": 0}
        started, gathered = RowShares.start_reduce_scatter, RowShares.all_gather

        def parameter_bytes() -> int:
            return sum(p.untyped_storage().nbytes() for p in named.values())

        def sums_start(*args: Any) -> object:
            gradients = sum(p.grad.nbytes for p in named.values() if p.grad is not None)
            most["gradients"] = max(most["gradients"], gradients)
            return started(*args)

        def rows_come(*args: Any) -> None:
            gathered(*args)
            most["parameters"] = max(most["parameters"], parameter_bytes())

        RowShares.start_reduce_scatter = sums_start  # type: ignore[method-assign, assignment]
        RowShares.all_gather = rows_come  # type: ignore[method-assign]
        batches = random_batches(config, stages.config.vocab_size, training.parallel)
        result = runner.train(batches, lr=1e-9)
        held = {id(t): t.nbytes for t in runner.gradients.held()}
        training.checkpointer.close()
        return {
            "gradients": {name: runner.gradients.of(p).clone() for name, p in named.items()},
            "norm": result.grad_norm,
            "held": sum(held.values()),
            "most": most,
            "parameters held": parameter_bytes(),
            "whole": sum(p.nbytes for p in named.values()),
        }

    return run_ranks(on_rank, config.world_size, timeout_s=240)  # type: ignore[return-value]


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "kv_lora_rank": 12,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 1,
}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 6, "sliding_window": 5}
TIED = {"tie_word_embeddings": True}
BALANCED = [
    "moe.aux_loss_coef=0.05",
    "moe.aux_loss_scope=global_batch",
    "moe.z_loss_coef=0.01",
    "parallel.schedule=forward_then_backward",
]
ZB_1P = ["parallel.schedule=zb_1p", "train.gradient_accumulation_fusion=true"]
LAYERS = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("keys", "model", "held", "most", "whole"),
    [
        # Experts along dp, dense rows along dp x ep; the embedding, a layer and the head are parts.
        (["parallel.dp=2", "parallel.ep=2"], {}, 0.36, 0.29, 0),
        (["parallel.dp=2", "train.recompute=layers", *BALANCED], {}, 0.51, 0.28, 0),
        (["parallel.dp=2", "train.recompute=outputs", "moe.dispatch_chunks=2"], {}, 0.51, 0.28, 0),
        (["parallel.dp=3", "train.recompute=selective"], GPT_OSS, 0.36, 0.35, 0),
        # Layers for multi-token prediction use embedding and head again.
        (["parallel.dp=2", "train.mtp_loss_coef=0.3"], DEEPSEEK, 0.52, 0.92, 0),
        # The embedding that both stages hold is summed whole; weights get gradients of their own.
        (["parallel.pp=2", "parallel.dp=2", *ZB_1P], TIED, 0.51, 1.0, 0.45),
        (["parallel.pp=2", "parallel.dp=2", "parallel.schedule=zbv"], LAYERS, 0.51, 0.75, 0),
        (
            ["parallel.dp=2", "optimizer.name=muon"],
            {},
            0.58,
            0.37,
            0.15,
        ),  # dense matrices stay whole
    ],
)
def test_shared_out_gradients_are_the_rows_of_whole_ones(
    configure: Configure,
    keys: list[str],
    model: dict[str, object],
    held: float,
    most: float,
    whole: float,
) -> None:
    rows = gradients_of(configure(*keys, "parallel.sharding=1", **model))
    shared = gradients_of(configure(*keys, "parallel.sharding=2", **model))
    for found, expected in zip(shared, rows, strict=True):
        for name, gradient in found["gradients"].items():
            wanted = expected["gradients"][name]
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-8, msg=name)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-6)
        assert found["held"] <= held * found["whole"]
        assert found["most"]["gradients"] <= most * found["whole"]
    # Parameters that are shared out, too, change no bit.
    third = gradients_of(configure(*keys, "parallel.sharding=3", **model))
    for found, expected in zip(third, shared, strict=True):
        for name, gradient in found["gradients"].items():
            assert torch.equal(gradient, expected["gradients"][name]), name
        assert found["parameters held"] <= whole * found["whole"]
        assert found["most"]["parameters"] <= most * found["whole"]


def test_a_gradient_that_comes_after_that_of_its_layers_input_is_an_error_and_not_lost() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        layer = nn.Linear(2, 2, bias=False)
        weights = list(layer.parameters())
        shares = GradientShares(
            [RowShares(group, {layer.weight: (1, 1)})],
            {0: StageBlocks(module=layer, parameters=weights, blocks=[(layer, weights)])},
            fp32=False,
            dtype=None,
        )
        x = torch.ones(3, 2, requires_grad=True)
        with shares.around(Action(0, Kind.FORWARD, 0)):
            early = layer.weight * 1.0  # used before the layer's input is made
            loss = layer(x * 2.0).sum() + early.sum()
        with (
            pytest.raises(MoeTrainError, match=r"shapes \[\(2, 2\)\] got gradients after"),
            shares.around(Action(0, Kind.BACKWARD, 0)),
        ):
            loss.backward()

    run_ranks(fn, 2)
