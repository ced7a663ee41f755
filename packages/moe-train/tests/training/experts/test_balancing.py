"""What the keys of `[moe]`, and those of `[train]` that concern the loss, do to a real training."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_train.checkpoint.training_state import TrainerState
from moe_train.config.tables import Config
from moe_train.config.toml_file import load_config
from moe_train.data.packing import Batch
from moe_train.model.stage import Target
from moe_train.parallel import start
from moe_train.training.build import build_runner, build_stages, read_model_config
from moe_train.training.experts.balancing import aux_loss_coef, check_balancing
from moe_train.training.pipelines import unmeasured_schedule
from moe_train.training.step import StepResult
from ranktest import run_ranks

torch.optim.AdamW([torch.zeros(1)])  # what its constructor imports, once and not in every rank

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "first_k_dense_replace": 0,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "initializer_range": 0.2,
    "router_aux_loss_coef": 0.02,
    "max_position_embeddings": 64,
}
TOML = """
model.config_file = "config.json"
train = { output_dir = "run", max_steps = 99, global_batch_size = 8, device = "cpu" }
data.sequence_length = 12
optimizer = { lr = 1e-2, decay = "constant" }
parallel.timeout_s = 60
"""
FTB = 'parallel.schedule="forward_then_backward"'


@dataclass(frozen=True)
class Trained:
    """What rank 0 saw: the steps, and the expert bias of its layers at the end."""

    steps: list[StepResult]
    bias_LE: Tensor | None


def job(folder: Path, model: dict[str, Any], *overrides: str) -> Config:
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "job.toml").write_text(TOML)
    # What is relative in an override starts at the current folder.
    absolute = [text.replace("output_dir=", f"output_dir={folder}/") for text in overrides]
    return load_config(folder / "job.toml", absolute)


def batches_of(config: Config, step: int, data_rank: int, num_data_ranks: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (config.train.global_batch_size, 13), generator=generator)
    positions = torch.arange(12).repeat(len(tokens), 1)
    positions[:, 7:] -= 7
    labels = tokens[:, 1:].clone()
    labels[:, 6] = -100
    rows = torch.arange(len(tokens)).view(config.train.gradient_accumulation_steps, -1)
    own = [part.chunk(num_data_ranks)[data_rank] for part in rows]
    return [
        Batch(input_ids=tokens[r, :-1], labels=labels[r], position_ids=positions[r]) for r in own
    ]


def train(config: Config, steps: int, *, first: int = 0, resume: Path | None = None) -> Trained:
    """Train on random tokens; with `resume` from that checkpoint. Leaves a checkpoint behind."""

    def run(rank: int, _: int) -> Trained:
        parallel = start(config)
        runner, checkpointer = build_runner(config, read_model_config(config), parallel, {})
        if resume is not None:
            checkpointer.load(resume)
        results = [
            runner.train(
                batches_of(config, step, parallel.data_rank, parallel.num_data_ranks), lr=1e-2
            )
            for step in range(first, first + steps)
        ]
        state = TrainerState(
            step=first + steps, consumed_samples=0, data_fingerprint="", sequence_length=12, seed=0
        )
        checkpointer.save(state)
        biases = [
            tensor.clone()
            for name, tensor in runner.stages.named_buffers()
            if name.endswith("e_score_correction_bias")
        ]
        return Trained(results, torch.stack(biases) if biases else None)

    return run_ranks(run, config.world_size, timeout_s=120)[0]


def check(config: Config) -> None:
    check_balancing(config, read_model_config(config), unmeasured_schedule(config))


def imbalance(steps: list[StepResult]) -> float:
    """Standard deviation of the experts' loads over their mean."""
    load = torch.tensor([step.load_LE for step in steps], dtype=torch.float64)
    return (load.std(-1) / load.mean(-1)).mean().item()


def assert_alike(a: Trained, b: Trained, *, rtol: float = 2e-6) -> None:
    for number, (one, other) in enumerate(zip(a.steps, b.steps, strict=True)):
        for name in ("loss", "aux_loss", "z_loss", "mtp_loss", "grad_norm"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert abs(mine - theirs) <= rtol * abs(mine) + 1e-12, (number, name, mine, theirs)
        assert one.load_LE == other.load_LE, number


def test_the_bias_moves_load_towards_balance_and_is_the_same_in_every_layout(
    tmp_path: Path,
) -> None:
    model = {**DEEPSEEK, "num_nextn_predict_layers": 0}
    enabled = (
        "moe.update_expert_bias=true",
        "moe.expert_bias_update_rate=0.02",
        "moe.aux_loss_coef=0",
        "train.gradient_accumulation_steps=2",
    )
    frozen = train(job(tmp_path, model, *enabled[2:], "train.output_dir=a"), 20)
    one = train(job(tmp_path, model, *enabled, "train.output_dir=b"), 20)
    two = train(job(tmp_path, model, *enabled, "train.output_dir=c", "parallel.ep=2"), 20)
    replicas = train(job(tmp_path, model, *enabled, "train.output_dir=d", "parallel.dp=2"), 20)
    assert frozen.bias_LE is not None and not frozen.bias_LE.any()
    assert imbalance(one.steps[-4:]) < 0.7 * imbalance(frozen.steps[-4:])
    assert one.bias_LE is not None
    for other in (two, replicas):
        assert_alike(one, other, rtol=2e-5)
        assert other.bias_LE is not None and torch.equal(one.bias_LE, other.bias_LE)
    # By hand: each step moves by the rate, down where the load is above its mean.
    expected = torch.zeros(2, 8)
    for step in one.steps:
        load = torch.tensor(step.load_LE)
        expected += 0.02 * torch.sign(load.sum(1, keepdim=True) - 8 * load)
    torch.testing.assert_close(one.bias_LE, expected)
    assert one.bias_LE.any()


def test_the_bias_is_saved_and_resumed(tmp_path: Path) -> None:
    enabled = ("moe.update_expert_bias=true", "moe.expert_bias_update_rate=0.02")
    model = {**DEEPSEEK, "num_nextn_predict_layers": 1}
    whole = train(job(tmp_path, model, *enabled, "train.output_dir=a"), 4)
    first = train(job(tmp_path, model, *enabled, "train.output_dir=b"), 2)
    second = train(
        job(tmp_path, model, *enabled, "train.output_dir=b"),
        2,
        first=2,
        resume=tmp_path / "b" / "checkpoint-2",
    )
    assert_alike(whole, Trained(first.steps + second.steps, None), rtol=0)
    assert whole.bias_LE is not None and second.bias_LE is not None
    assert torch.equal(whole.bias_LE, second.bias_LE)


def test_a_step_whose_update_is_left_out_moves_no_bias_then_or_later(tmp_path: Path) -> None:
    enabled = ("moe.update_expert_bias=true", "moe.expert_bias_update_rate=0.02")
    config = job(tmp_path, DEEPSEEK, *enabled)

    def run(*_: int) -> list[dict[str, torch.Tensor]]:
        held = []
        for steps in ((0, 1), (0, 7, 1)):  # 7 is left out
            runner, _ = build_runner(config, read_model_config(config), start(config), {})
            for step in steps:
                limit = 0.0 if step == 7 else math.inf
                told = runner.train(batches_of(config, step, 0, 1), lr=1e-2, max_loss=limit)
                assert told.applied == (step != 7)
            held.append({name: t.clone() for name, t in runner.stages.state_dict().items()})
        return held

    ((plain, skipped),) = run_ranks(run, 1)  # type: ignore[misc]
    assert plain.keys() == skipped.keys() and any("bias" in name for name in plain)
    for name, tensor in plain.items():
        assert torch.equal(tensor, skipped[name]), name


@pytest.mark.parametrize("layout", [("parallel.ep=2",), ("parallel.dp=2", "parallel.pp=2", FTB)])
def test_global_batch_balancing_equals_one_microbatch_of_one_process(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    scope = "moe.aux_loss_scope=global_batch"
    z_loss = "moe.z_loss_coef=0.01"
    one = train(job(tmp_path, QWEN, scope, z_loss, "train.output_dir=a"), 3)
    accumulated = (FTB, "train.gradient_accumulation_steps=4", "train.recompute=layers")
    many = train(job(tmp_path, QWEN, scope, z_loss, *accumulated, "train.output_dir=b"), 3)
    ranks = train(
        job(tmp_path, QWEN, scope, z_loss, *accumulated, *layout, "train.output_dir=c"), 3
    )
    assert one.steps[0].aux_loss > 0.02 and one.steps[0].z_loss > 0
    # Another number of microbatches rounds otherwise, and AdamW's first steps magnify it.
    assert_alike(one, many, rtol=1e-4)
    assert_alike(many, ranks, rtol=1e-4)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
def test_with_one_microbatch_global_and_microbatch_scope_are_the_same(
    tmp_path: Path, scope: str
) -> None:
    base = train(job(tmp_path, QWEN, "train.output_dir=a"), 2)
    other = train(job(tmp_path, QWEN, f"moe.aux_loss_scope={scope}", "train.output_dir=b"), 2)
    same = base.steps[0].aux_loss == pytest.approx(other.steps[0].aux_loss, rel=1e-6)
    assert same == (scope != "sequence")


def test_chunked_loss_is_head_loss(tmp_path: Path) -> None:
    base = train(job(tmp_path, DEEPSEEK | {"num_nextn_predict_layers": 1}), 3)
    chunked = train(
        job(
            tmp_path,
            DEEPSEEK | {"num_nextn_predict_layers": 1},
            "train.loss_chunk_tokens=7",
            "train.output_dir=b",
        ),
        3,
    )
    assert base.steps[0].mtp_loss > 0.3
    assert_alike(base, chunked, rtol=1e-6)


def test_chunked_loss_keeps_no_logits_for_the_backward(tmp_path: Path) -> None:
    logits = (96, 64)  # tokens, vocabulary

    def saved_shapes(config: Config) -> set[tuple[int, ...]]:
        parallel = start(config)
        stage = build_stages(config, read_model_config(config), parallel).by_number[0]
        (batch,) = batches_of(config, 0, 0, 1)
        shapes: set[tuple[int, ...]] = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: shapes.add(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        ):
            stage(batch.input_ids, batch.position_ids, target=Target(batch.labels, 1.0))
        return shapes

    plain, chunked = job(tmp_path, QWEN), job(tmp_path, QWEN, "train.loss_chunk_tokens=7")
    assert logits in run_ranks(lambda *_: saved_shapes(plain), 1)[0]
    assert logits not in run_ranks(lambda *_: saved_shapes(chunked), 1)[0]


def test_multi_token_prediction_is_the_same_over_pipeline_stages_and_left_out_at_0(
    tmp_path: Path,
) -> None:
    """Also where the last stage is on the first one's rank, or has fewer layers than others."""
    model = DEEPSEEK | {"num_nextn_predict_layers": 1, "num_hidden_layers": 4}
    one = train(job(tmp_path, model, "train.gradient_accumulation_steps=2"), 4)
    layouts = {
        "loop": ("parallel.pp=2",),
        "v": ("parallel.pp=2", "parallel.schedule=zbv"),
        "cost": ("parallel.pp=3", "parallel.layer_split=cost"),
    }
    for name, layout in layouts.items():
        parts = ("train.gradient_accumulation_steps=2", f"train.output_dir={name}", *layout)
        assert_alike(one, train(job(tmp_path, model, *parts), 4), rtol=2e-5)
    assert len(one.steps[0].load_LE) == 5 and sum(one.steps[0].load_LE[4]) > 0
    assert one.steps[-1].mtp_loss < one.steps[0].mtp_loss
    without = train(job(tmp_path, model, "train.mtp_loss_coef=0", "train.output_dir=c"), 1)
    assert without.steps[0].mtp_loss == 0 and len(without.steps[0].load_LE) == 4
    assert without.steps[0].loss == pytest.approx(one.steps[0].loss, rel=1e-6)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_changes_the_loss_alike_in_every_layout(tmp_path: Path, policy: str) -> None:
    limited = ("moe.capacity_factor=0.5", f"moe.token_drop_policy={policy}")
    dropless = train(job(tmp_path, QWEN, "train.output_dir=a"), 1)
    one = train(job(tmp_path, QWEN, *limited, "train.output_dir=b"), 2)
    two = train(job(tmp_path, QWEN, *limited, "parallel.ep=2", "train.output_dir=c"), 2)
    assert one.steps[0].loss != pytest.approx(dropless.steps[0].loss, rel=1e-4)
    assert_alike(one, two, rtol=2e-5)


def test_the_coefficient_is_the_models_unless_the_job_gives_one(tmp_path: Path) -> None:
    config = job(tmp_path, QWEN)
    assert aux_loss_coef(config, read_model_config(config)) == 0.02
    config = job(tmp_path, QWEN, "moe.aux_loss_coef=0.5")
    assert aux_loss_coef(config, read_model_config(config)) == 0.5
    config = job(tmp_path, QWEN, "moe.aux_loss_coef=0")
    assert train(config, 1).steps[0].aux_loss == 0


def test_what_a_schedule_or_a_family_cannot_do_is_refused_with_the_remedy(tmp_path: Path) -> None:
    scope = "moe.aux_loss_scope=global_batch"
    accumulated = "train.gradient_accumulation_steps=2"
    with pytest.raises(
        ValueError, match=r'aux_loss_scope .*schedule="1f1b".*choose forward_then_backward'
    ):
        check(job(tmp_path, QWEN, scope, accumulated))
    check(job(tmp_path, QWEN, scope))
    check(job(tmp_path, QWEN, scope, accumulated, FTB))
    bias = "moe.update_expert_bias=true"
    with pytest.raises(ValueError, match=r"'qwen3_moe' have no e_score_correction_bias.*deepseek"):
        check(job(tmp_path, QWEN, bias))
    check(job(tmp_path, DEEPSEEK, bias))
    with pytest.raises(ValueError, match="loss_chunk_tokens"):
        job(tmp_path, QWEN, "train.loss_chunk_tokens=-1")
