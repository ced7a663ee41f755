"""Ranks that share heads, widths and positions, against one process: the same numbers.

Rows of unequal lengths, with two documents, one document and padding, at borders and beside them.
All layouts of as many ranks share one start.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_train.checkpoint import Checkpointer, TrainerState
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.errors import TrainValueError
from moe_train.jobs.job import check_model
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from moe_train.training.step import StepRunner
from ranktest import can_leave_shared_memory, leave_shared_memory, run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]
OfFamily = Callable[[str], tuple[tuple[str, ...], dict[str, Any]]]
STEPS = 2
COMMON = (
    "data.sequence_length=11",
    "train.global_batch_size=8",
    "moe.aux_loss_coef=0.1",
)
LAYOUTS = {
    "mixtral": [
        ("parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "parallel.sharding=1"),
        ("parallel.ep=4", "parallel.tp=4", "parallel.overlap_grad_reduce=true"),
        ("parallel.dp=2", "parallel.ep=2", "parallel.etp=2"),
        ("parallel.dp=4", "parallel.etp=4", "parallel.sharding=1"),
        (
            "parallel.dp=4",
            "parallel.tp=2",
            "parallel.etp=2",
            "parallel.sharding=3",
            "train.recompute=layers",
        ),
    ],
    "qwen2_moe": [
        ("parallel.dp=4", "parallel.tp=4", "parallel.sharding=2", "train.recompute=layers"),
        (
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.tp=2",
            "parallel.sharding=3",
            "train.loss_chunk_tokens=5",
        ),
        ("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sharding=1"),
        ("parallel.pp=2", "parallel.ep=2", "parallel.tp=2", "parallel.schedule=zb_1p"),
        (
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.tp=2",
            "parallel.etp=2",
            "moe.dispatch_chunks=2",
        ),
        (
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.cp=2",
            "parallel.tp=2",
            "parallel.etp=2",
            "parallel.sharding=2",
        ),
        ("parallel.pp=2", "parallel.dp=2", "parallel.etp=2", "parallel.schedule=zb_1p"),
    ],
    "deepseek_v3": [
        (
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.cp=2",
            "parallel.tp=2",
            "train.recompute=selective",
        ),
        ("parallel.pp=2", "parallel.ep=2", "parallel.tp=2", "parallel.schedule=zb_1p"),
        ("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sharding=2"),
        (
            "parallel.dp=4",
            "parallel.cp=2",
            "parallel.etp=2",
            "parallel.sharding=3",
            "train.recompute=selective",
        ),
        (
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.etp=2",
            "parallel.overlap_grad_reduce=true",
            "moe.dispatch_route=dedup",
        ),
    ],
    "gpt_oss": [
        (
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.cp=2",
            "parallel.tp=2",
            "parallel.cp_attention=ring",
            "train.recompute=outputs",
        ),
        ("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.schedule=zbv"),
    ],
}


def step_of(runner: StepRunner, config: Config, step: int, batches: Batches) -> list[float]:
    """The losses, the norm and the tokens of a step."""
    at = runner.parallel
    runner.stages.begin_step(step + 1)
    # Adam's first step is the rate times the sign of each gradient, those of mere rounding too;
    # a rate of 0.02 makes of that more than 1e-6 of the next norm on some processors.
    result = runner.train(batches(config, step, at.sample_rank, at.num_sample_ranks), lr=0.002)
    losses = (result.loss, result.aux_loss, result.z_loss, result.mtp_loss)
    return [*losses, result.grad_norm, result.num_tokens]


def figures(config: Config, batches: Batches) -> list[list[float]]:
    """Those of each step, and of an evaluation, on this rank."""
    runner = build_runner(config, read_model_config(config), start(config), {})[0]
    at = runner.parallel
    found = [step_of(runner, config, step, batches) for step in range(STEPS)]
    evaluated = runner.evaluate(batches(config, 9, at.sample_rank, at.num_sample_ranks))
    return [*found, list(evaluated)]


def on_ranks(configs: Sequence[Config], batches: Batches) -> list[list[list[float]]]:
    """Of each job, all of as many ranks, the figures that all ranks have alike."""
    first, *others = run_ranks(
        lambda *_: [figures(config, batches) for config in configs],
        configs[0].world_size,
        timeout_s=300,
    )
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", LAYOUTS)
def test_every_family_has_the_numbers_of_one_process(
    configure: Configure, ragged_batches: Batches, of_family: OfFamily, family: str
) -> None:
    balance, model = of_family(family)
    keys = (*COMMON, *balance)
    (expected,) = on_ranks([configure(*keys, **model)], ragged_batches)
    assert expected[0][1] > 0.05, "a balancing loss"
    found = on_ranks(
        [configure(*keys, *layout, **model) for layout in LAYOUTS[family]], ragged_batches
    )
    for layout, steps in zip(LAYOUTS[family], found, strict=True):
        for step, wanted in zip(steps, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6), layout


ACROSS_HOSTS = (
    ("parallel.ep=4", "parallel.cp=2", "parallel.tp=2", "parallel.cp_attention=ring"),
    ("parallel.dp=4", "parallel.tp=2", "parallel.etp=2", "parallel.sharding=3"),
    ("parallel.pp=2", "parallel.ep=2", "parallel.cp=2", "parallel.overlap_grad_reduce=true"),
)


def test_ranks_on_hosts_of_their_own_have_the_numbers_of_one_process(
    configure: Configure, ragged_batches: Batches, of_family: OfFamily
) -> None:
    """Without memory that they share, and with the default policy of what calls compare."""
    if not can_leave_shared_memory():
        pytest.skip("this system lets a process have no /dev/shm of its own")
    balance, model = of_family("mixtral")
    jobs = [configure(*COMMON, *balance, *layout, **model) for layout in ((), *ACROSS_HOSTS)]
    (expected,) = on_ranks(jobs[:1], ragged_batches)

    def on_host(*_: int) -> list[list[list[float]]]:
        leave_shared_memory()
        return [figures(job, ragged_batches) for job in jobs[1:]]

    first, *others = run_ranks(on_host, 4, timeout_s=300)
    assert all(other == first for other in others)
    for layout, steps in zip(ACROSS_HOSTS, first, strict=True):
        for step, wanted in zip(steps, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6), layout


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_attention_heads": 3}, r"num_attention_heads=3 evenly; .*choose among 1$"),
        (
            {"mlp_only_layers": [0], "intermediate_size": 33},
            r"parallel\.tp=2 .* intermediate_size=33",
        ),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 7},
            r"parallel\.tp=2 .* shared_expert_intermediate_size=7 evenly; .*choose among 1$",
        ),
        ({"vocab_size": 1}, r"vocab_size=1, at least one row each; .* parallel\.tp=1$"),
        ({"model_type": "olmoe"}, r"norms queries and keys of all heads .* parallel\.cp=2"),
    ],
)
def test_what_ranks_cannot_share_out_is_refused_before_they_start(
    configure: Configure, model: dict[str, object], message: str
) -> None:
    config = configure("parallel.dp=2", "parallel.tp=2", **model)
    with pytest.raises(TrainValueError, match=message):
        check_model(config, read_model_config(config))
    alone = configure("parallel.dp=2", **model)
    check_model(alone, read_model_config(alone))


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        (
            {"moe_intermediate_size": 6},
            ("parallel.etp=4",),
            r"parallel\.etp=4 .* moe_intermediate_size=6 evenly; .*choose among 1, 2$",
        ),
        ({"moe_intermediate_size": 1}, (), r"moe_intermediate_size=1 evenly; .*choose among 1$"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 5},
            (),
            r"parallel\.etp=2 .* \(gpt_oss\) have biases, .* use parallel\.ep,",
        ),
        ({}, ("parallel.etp=3",), r"parallel\.etp=3 .* dp=4 .* choose among 1, 2, 4$"),
        (
            {},
            ('parallel.relayout=["1: dp=4 etp=3"]',),
            r"'1: dp=4 etp=3': etp=3 .* dp=4 .* choose among 1, 2, 4$",
        ),
        ({}, ("optimizer.name=muon",), r"parallel\.etp=2 cuts matrices .* parallel\.ep instead"),
        (
            {},
            ("train.stochastic_rounding=true", "train.dtype=bfloat16"),
            r"parallel\.etp=2 .* use train\.master_weights=true",
        ),
        (
            {},
            ("model.experts_fp8=true", "train.dtype=bfloat16"),
            r"parallel\.etp=2 .* model\.experts_fp8=true",
        ),
    ],
)
def test_experts_that_ranks_cannot_share_out_are_refused_before_they_start(
    configure: Configure, model: dict[str, object], keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TrainValueError, match=message):
        config = configure(*COMMON, "parallel.dp=4", "parallel.etp=2", *keys, **model)
        check_model(config, read_model_config(config))


def test_ranks_without_a_position_take_part(configure: Configure) -> None:
    """Two positions of three ranks; keys of two heads, of which ranks read one, both and one."""
    tokens = torch.randint(1, 300, (6, 3), generator=torch.Generator().manual_seed(0))
    places = torch.arange(2).repeat(6, 1)
    batch = Batch(input_ids=tokens[:, :2], labels=tokens[:, 1:], position_ids=places)

    def result_of(config: Config) -> list[float]:
        runner = build_runner(config, read_model_config(config), start(config), {})[0]
        result = runner.train([batch, batch], lr=0.02)
        return [result.loss, result.aux_loss, result.grad_norm, result.num_tokens]

    def made(*layout: str) -> Config:
        common = ("data.sequence_length=2", "moe.aux_loss_coef=0.1", "moe.aux_loss_scope=sequence")
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
        return configure(*common, *layout, num_experts=6, attention_bias=True, **heads)

    alone, *layouts = (
        made(),
        *(made(each, "parallel.tp=3") for each in ("parallel.ep=3", "parallel.dp=3")),
    )
    expected = run_ranks(lambda *_: result_of(alone), 1)[0]
    found = run_ranks(lambda *_: [result_of(each) for each in layouts], 3, timeout_s=240)
    assert all(each == pytest.approx(expected, rel=1e-6) for rank in found for each in rank)  # type: ignore[attr-defined]


CHAIN = [
    ("parallel.dp=4", "parallel.tp=4", "parallel.sharding=1"),
    ("parallel.ep=2", "parallel.dp=2", "parallel.cp=2", "parallel.sharding=3"),
    ("parallel.pp=2", "parallel.ep=2", "parallel.tp=2", "parallel.sharding=2"),
    ("parallel.dp=2", "parallel.ep=2", "parallel.cp=2", "parallel.tp=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sharding=3"),
]
CHAIN_OF_EXPERTS = [
    ("parallel.dp=2", "parallel.ep=2", "parallel.etp=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.etp=2", "parallel.sharding=2"),
    ("parallel.ep=2", "parallel.dp=2", "parallel.cp=2", "parallel.sharding=3"),
    ("parallel.dp=4", "parallel.tp=2", "parallel.etp=2", "parallel.sharding=3"),
    ("parallel.dp=2", "parallel.ep=2", "parallel.cp=2", "parallel.tp=2", "parallel.etp=2"),
    ("parallel.dp=4", "parallel.etp=4", "parallel.sharding=1"),
]


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: weights, master weights and moments."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        part = file.stem.partition("-0")[0]  # of one file or of several
        found |= {f"{part} {name}": tensor for name, tensor in load_file(file).items()}
    return found


@pytest.mark.parametrize(
    ("family", "chain"),
    [
        ("qwen2_moe", CHAIN[2:]),
        ("deepseek_v3", CHAIN),
        ("gpt_oss", CHAIN),
        ("mixtral", CHAIN_OF_EXPERTS),
        ("deepseek_v3", CHAIN_OF_EXPERTS),
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(
    configure: Configure,
    ragged_batches: Batches,
    of_family: OfFamily,
    tmp_path: Path,
    family: str,
    chain: list[tuple[str, ...]],
) -> None:
    """Each step is made by another layout, from the checkpoint of the one before.

    What is loaded and saved again has the bits of the checkpoint; of one family the vocabulary does
    not divide and the head is the embedding.
    """
    balance, model = of_family(family)
    keys = (*COMMON, *balance)

    def made(name: str, *layout: str) -> Config:
        return configure(*keys, *layout, f"train.output_dir={tmp_path / name}", **model)

    def trained(number: int, config: Config) -> tuple[StepRunner, Checkpointer, list[float]]:
        """After step `number`, from the checkpoint of the step before where there is one."""
        runner, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        if number:
            checkpointer.load(folder(jobs[number - 1], number))
            checkpointer.save(state_of(number))
        return runner, checkpointer, step_of(runner, config, number, ragged_batches)

    def on_rank(*_: int) -> list[list[float]]:
        found = []
        for number, config in enumerate(jobs):
            _, checkpointer, figures = trained(number, config)
            checkpointer.save(state_of(number + 1))
            checkpointer.close()
            found.append(figures)
        return found

    jobs = [made(f"run-{number}", *layout) for number, layout in enumerate(chain)]
    (found, *_) = run_ranks(on_rank, 4, timeout_s=300)
    for number, (before, after) in enumerate(pairwise(jobs), start=1):
        first, second = (stored(folder(job, number)) for job in (before, after))
        assert first.keys() == second.keys() and any("exp_avg_sq" in name for name in first)
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items()), number
    alone = made("alone")

    def whole(*_: int) -> list[list[float]]:
        runner = build_runner(alone, read_model_config(alone), start(alone), {})[0]
        return [step_of(runner, alone, number, ragged_batches) for number in range(len(jobs))]

    (expected,) = run_ranks(whole, 1)
    for number, (step, wanted) in enumerate(zip(found, expected, strict=True)):
        assert step == pytest.approx(wanted, rel=1e-6), chain[number]


def folder(config: Config, step: int) -> Path:
    return Path(config.train.output_dir) / f"checkpoint-{step}"


def state_of(step: int) -> TrainerState:
    return TrainerState(
        step=step, consumed_samples=8 * step, data_fingerprint="f", sequence_length=11, seed=0
    )
