"""transformers' Qwen3-MoE is the oracle: same weights and batches, same logits and losses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.generation import load_model
from moe_train.model import decays
from moe_train.optim import LrSchedule
from moe_train.parallel import start
from moe_train.training import build_runner, read_model_config
from moe_train.training.step import StepResult
from ranktest import run_ranks

STEPS = 20
FEW_STEPS = 8
LAYOUTS = {
    "one process": (),
    "pp=2 x ep=2": ("parallel.pp=2", "parallel.ep=2"),
    "dp=2 x ep=2": ("parallel.dp=2", "parallel.ep=2"),
}


def save_reference(folder: Path, config_file: Path) -> Qwen3MoeForCausalLM:
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json_file(str(config_file)))
    model.save_pretrained(folder)
    return model


def global_batches(config: Config, steps: int, *, documents: bool) -> list[list[Batch]]:
    """Random microbatches, some labels ignored; with documents, positions restart inside."""
    generator = torch.Generator().manual_seed(11)
    size = config.train.global_batch_size // config.train.gradient_accumulation_steps
    length = config.data.sequence_length
    result = []
    for _ in range(steps * config.train.gradient_accumulation_steps):
        tokens = torch.randint(0, 512, (size, length + 1), generator=generator)
        labels = tokens[:, 1:].masked_fill(
            torch.rand(size, length, generator=generator) < 0.1, -100
        )
        positions = torch.arange(length).expand(size, length).clone()
        if documents:
            positions[::2, 13:] -= 13
        result.append(Batch(input_ids=tokens[:, :-1], labels=labels, position_ids=positions))
    count = config.train.gradient_accumulation_steps
    return [result[i : i + count] for i in range(0, len(result), count)]


def local_part(batch: Batch, data_rank: int, num_data_ranks: int) -> Batch:
    size = batch.input_ids.shape[0] // num_data_ranks
    rows = slice(data_rank * size, (data_rank + 1) * size)
    return Batch(
        input_ids=batch.input_ids[rows],
        labels=batch.labels[rows],
        position_ids=batch.position_ids[rows],
    )


def train_ours(
    config: Config, weights: Path, *, documents: bool, steps: int = FEW_STEPS
) -> list[StepResult]:
    """Run `steps` steps on every rank of the configured layout and return rank 0's results."""

    def fn(rank: int, world_size: int) -> list[StepResult]:
        parallel = start(config)
        runner, checkpointer = build_runner(config, read_model_config(config), parallel, {})
        checkpointer.load_weights(weights)
        results = []
        for number, step in enumerate(global_batches(config, steps, documents=documents), start=1):
            local: list[Batch] = []
            if parallel.is_first or parallel.is_last:
                local = [local_part(b, parallel.data_rank, parallel.num_data_ranks) for b in step]
            lr = LrSchedule.of(config.optimizer, steps).rate(number)
            results.append(runner.train(local, lr=lr))
        return results

    results = run_ranks(fn, config.world_size, timeout_s=120)
    losses = [[step.loss for step in rank] for rank in results]  # type: ignore[attr-defined]
    assert all(rank == losses[0] for rank in losses), "ranks report different losses"
    return results[0]  # type: ignore[return-value]


def train_reference(
    model: Qwen3MoeForCausalLM, config: Config, documents: bool
) -> tuple[list[float], list[float]]:
    """The same steps with transformers' model and torch's optimizer and clipping."""
    model.train()
    named = dict(model.named_parameters())
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in named.items() if decays(n, p.shape)],
                "weight_decay": settings.weight_decay,
            },
            {
                "params": [p for n, p in named.items() if not decays(n, p.shape)],
                "weight_decay": 0.0,
            },
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses, norms = [], []
    for number, step in enumerate(global_batches(config, STEPS, documents=documents), start=1):
        count = sum(int((b.labels != -100).sum()) for b in step)
        optimizer.zero_grad()
        total = 0.0
        for batch in step:
            loss = reference_loss(model, batch) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = LrSchedule.of(settings, STEPS).rate(number)
        optimizer.step()
        losses.append(total)
        norms.append(float(norm))
    return losses, norms


def reference_loss(model: Qwen3MoeForCausalLM, batch: Batch) -> Tensor:
    out = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    return F.cross_entropy(
        out.logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
def test_logits_equal_those_of_transformers(
    configure: Callable[..., Config], tmp_path: Path, documents: bool
) -> None:
    config = configure(model_changes={"mlp_only_layers": [1]})
    reference = save_reference(tmp_path / "hf", tmp_path / "config.json")
    ours = load_model(tmp_path / "hf")
    batch = global_batches(config, 1, documents=documents)[0][0]
    with torch.no_grad():
        hidden, _ = ours.hidden_states(batch.input_ids, batch.position_ids)
        expected = reference(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
        torch.testing.assert_close(ours.logits(hidden), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_adamw_steps_equal_those_of_transformers(
    configure: Callable[..., Config], tmp_path: Path, layout: str
) -> None:
    config = configure(*LAYOUTS[layout], model_changes={"router_aux_loss_coef": 0.0})
    reference = save_reference(tmp_path / "hf", tmp_path / "config.json")
    ours = train_ours(config, tmp_path / "hf", documents=True, steps=STEPS)
    losses, norms = train_reference(reference, config, documents=True)
    assert losses[0] - losses[-1] > 0.01, (
        "the reference did not learn; the test would prove nothing"
    )
    for number, (step, loss, norm) in enumerate(zip(ours, losses, norms, strict=True), start=1):
        assert abs(step.loss - loss) <= 1e-5, f"step {number}: {step.loss} and {loss}"
        assert abs(step.grad_norm - norm) <= 1e-4 * norm, f"step {number}"


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_layouts_agree_with_the_auxiliary_loss_on(
    configure: Callable[..., Config], tmp_path: Path, scope: str
) -> None:
    results = {}
    for name, overrides in LAYOUTS.items():
        config = configure(
            *overrides,
            f"moe.aux_loss_scope={scope}",
            model_changes={"router_aux_loss_coef": 0.1},
        )
        save_reference(tmp_path / "hf", tmp_path / "config.json")
        results[name] = train_ours(config, tmp_path / "hf", documents=True)
    one = results.pop("one process")
    assert all(step.aux_loss > 0.3 for step in one), "the auxiliary loss is not on"
    for name, steps in results.items():
        for number, (a, b) in enumerate(zip(one, steps, strict=True), start=1):
            where = f"{name}, step {number}"
            assert abs(a.loss - b.loss) <= 1e-6 * a.loss, f"{where}: {a.loss} {b.loss}"
            assert abs(a.aux_loss - b.aux_loss) <= 1e-6 * a.aux_loss, where
            assert abs(a.grad_norm - b.grad_norm) <= 1e-5 * a.grad_norm, where
            assert a.load_LE == b.load_LE, where


@pytest.mark.parametrize(
    "option", ["train.recompute=layers", "train.gradient_accumulation_fusion=true"]
)
def test_options_of_speed_and_memory_train_alike(
    configure: Callable[..., Config], tmp_path: Path, option: str
) -> None:
    def train(*overrides: str) -> list[StepResult]:
        config = configure(*overrides, model_changes={"router_aux_loss_coef": 0.1})
        save_reference(tmp_path / "hf", tmp_path / "config.json")
        return train_ours(config, tmp_path / "hf", documents=True)

    plain = train()
    for overrides in ((), LAYOUTS["pp=2 x ep=2"]):
        again = train(*overrides, option)
        for number, (a, b) in enumerate(zip(plain, again, strict=True), start=1):
            where = f"{overrides}, step {number}"
            assert abs(a.loss - b.loss) <= 1e-6 * a.loss, f"{where}: {a.loss} {b.loss}"
            assert abs(a.aux_loss - b.aux_loss) <= 1e-6 * a.aux_loss, where
            assert a.load_LE == b.load_LE, where
