"""What each rank builds, against the whole decoder of one rank."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_pipeline import one_f_one_b
from moe_pipeline.schedules import forward_then_backward
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.layout import is_expert
from moe_train.parallel import start
from moe_train.training.build import (
    build_runner,
    build_stages,
    build_training,
    read_model_config,
)
from moe_train.training.pipelines import unmeasured_schedule
from moe_train.training.updates import parameter_groups
from ranktest import run_ranks

Configure = Callable[..., Config]
EMBEDDING = "model.embed_tokens.weight"


def initial_weights(config: Config) -> list[tuple[dict[str, Tensor], int]]:
    """Of each rank: what a new job begins with, and its place among the ep ranks."""

    def run(rank: int, _: int) -> object:
        parallel = start(config)
        runner, _checkpointer = build_runner(config, read_model_config(config), parallel, {})
        return dict(runner.stages.state_dict()), parallel.mesh.coordinate(rank)["ep"]

    return run_ranks(run, config.world_size)  # type: ignore[return-value]


@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_begins_with_the_weights_of_one_rank(configure: Configure, tied: bool) -> None:
    ((whole, _),) = initial_weights(configure(tie_word_embeddings=tied))
    config = configure("parallel.pp=2", "parallel.ep=3", tie_word_embeddings=tied)
    holders: dict[str, set[int]] = {}
    for rank, (held, ep) in enumerate(initial_weights(config)):
        for name, tensor in held.items():
            holders.setdefault(name, set()).add(rank)
            part = whole[name].chunk(3)[ep] if is_expert(name) else whole[name]
            assert torch.equal(tensor, part), (rank, name)
    first, last = {0, 1, 2}, {3, 4, 5}
    assert holders.keys() == whole.keys()
    assert holders.pop(EMBEDDING) == (first | last if tied else first)
    for name, ranks in holders.items():
        assert ranks == (first if ".layers.0." in name else last), name
    assert ("lm_head.weight" in holders) is not tied


def test_another_seed_draws_other_weights_and_the_dtype_rounds_the_same(
    configure: Configure,
) -> None:
    ((base, _),) = initial_weights(configure())
    ((other, _),) = initial_weights(configure("train.seed=1"))
    ((low, _),) = initial_weights(configure("train.dtype=bfloat16"))
    for name, tensor in base.items():
        drawn = not name.endswith("norm.weight")
        assert torch.equal(tensor, other[name]) is not drawn, name
        assert low[name].dtype == torch.bfloat16
        assert torch.equal(low[name], tensor.bfloat16()), name


@pytest.mark.parametrize("has_copy", [False, True])
def test_each_parameter_is_reduced_once_over_the_ranks_that_hold_it(
    configure: Configure, has_copy: bool
) -> None:
    """On 2 stages of 2 x 2 ranks: ranks 0 to 3, and 4 to 7."""
    sizes = ("parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "train.global_batch_size=8")
    config = configure(*sizes, tie_word_embeddings=has_copy)

    def run(*_: int) -> object:
        parallel = start(config)
        stage = build_stages(config, read_model_config(config), parallel)
        parameters = dict(stage.named_parameters())
        names = {parameter: name for name, parameter in parameters.items()}
        return [
            ([names[p] for p in group.parameters], dist.get_process_group_ranks(group.reduce_group))
            for group in parameter_groups(parameters, parallel, has_copy=has_copy)
        ], list(parameters)

    for rank, (groups, held) in enumerate(run_ranks(run, 8)):  # type: ignore[misc]
        assert sorted(name for names, _ in groups for name in names) == sorted(held)
        first = rank // 4 * 4
        dense = list(range(first, first + 4))
        replicas = [first + rank % 2, first + rank % 2 + 2]
        for names, ranks in groups:
            for name in names:
                if has_copy and name == EMBEDDING:
                    assert ranks == list(range(8))
                else:
                    assert ranks == (replicas if is_expert(name) else dense), name


@pytest.mark.parametrize(
    ("name", "make"), [("1f1b", one_f_one_b), ("forward_then_backward", forward_then_backward)]
)
def test_the_schedule_is_the_named_one_for_the_stages_and_microbatches(
    configure: Configure, name: str, make: Callable[[int, int], object]
) -> None:
    config = configure(
        "parallel.pp=2", "train.gradient_accumulation_steps=6", f"parallel.schedule={name}"
    )
    assert unmeasured_schedule(config) == make(2, 6)


def test_only_ends_of_the_pipeline_read_tokens_and_only_rank_0_writes_files(
    configure: Configure,
) -> None:
    config = configure("parallel.pp=3", num_hidden_layers=3)
    prepare(config)

    def run(*_: int) -> object:
        training = build_training(config, start(config))
        return training.corpus.train is not None, sorted(training.checkpointer.files)

    first, *others = run_ranks(run, 3)
    assert first == (
        True,
        [
            "config.json",
            "generation_config.json",
            "moe_train.toml",
            "tokenizer.json",
            "tokenizer_config.json",
        ],
    )
    assert others == [(False, []), (True, [])]


def test_the_model_is_read_from_a_file_or_from_a_checkpoint(
    configure: Configure, tmp_path: Path
) -> None:
    named = read_model_config(configure(num_experts=4))
    assert (named.num_experts, named.num_hidden_layers) == (4, 2)
    folder = tmp_path / "weights"
    folder.mkdir()
    values = json.loads((tmp_path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_experts": 12}))
    assert read_model_config(configure(f"model.init_from={folder}")).num_experts == 12
    with pytest.raises(ValueError, match=r"cannot read the model config .*nowhere/config\.json"):
        read_model_config(configure("model.config_file=nowhere/config.json"))


MTP = {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def test_prediction_layers_that_are_not_trained_are_left_out_of_a_new_model_only(
    configure: Configure, tmp_path: Path
) -> None:
    assert read_model_config(configure(**MTP)).num_nextn_predict_layers == 1
    idle = "train.mtp_loss_coef=0"
    assert read_model_config(configure(idle, **MTP)).num_nextn_predict_layers == 0
    kept = read_model_config(configure(idle, f"model.init_from={tmp_path}", **MTP))
    assert kept.num_nextn_predict_layers == 1
