"""A step on a CUDA device gives what a step on the CPU gives."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_train.config.toml_file import load_config
from moe_train.data.packing import Batch
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config

pytestmark = pytest.mark.gpu

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(folder: Path, device: str, *overrides: str) -> list[float]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "job.toml").write_text(
        'model.config_file = "config.json"\n'
        'train = { output_dir = "run", max_steps = 5, global_batch_size = 8 }\n'
        "optimizer.lr = 1e-3\ndata.sequence_length = 32\n"
    )
    config = load_config(folder / "job.toml", [f"train.device={device}", *overrides])
    runner, _ = build_runner(config, read_model_config(config), start(config), {})
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(5):
        tokens = torch.randint(0, 96, (8, 33), generator=generator)
        positions = torch.arange(32).expand(8, 32)
        batch = Batch(input_ids=tokens[:, :-1], labels=tokens[:, 1:], position_ids=positions)
        result.append(runner.train([batch], lr=1e-3).loss)
    return result


@pytest.mark.usefixtures("one_rank")
def test_five_steps_on_cuda_give_the_losses_of_the_cpu(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu = losses(tmp_path, "cpu")
    assert losses(tmp_path, "cuda") == pytest.approx(cpu, abs=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_bfloat16_with_master_weights_trains_on_cuda(tmp_path: Path) -> None:
    cpu = losses(tmp_path, "cpu")
    low = losses(tmp_path, "cuda", "train.dtype=bfloat16", "train.master_weights=true")
    assert low == pytest.approx(cpu, abs=0.05)


@pytest.mark.gpu(needs="storages that know their device")
@pytest.mark.usefixtures("one_rank")
def test_activations_on_the_host_change_no_loss_on_cuda(tmp_path: Path) -> None:
    here = losses(tmp_path, "cuda")
    for form in ("", "train.recompute=selective", "train.recompute=outputs"):
        overrides = ("train.offload_activations=true", *([form] if form else []))
        assert losses(tmp_path, "cuda", *overrides) == pytest.approx(here, rel=1e-5), form


@pytest.mark.gpu(needs="fp8 products of a device")
@pytest.mark.usefixtures("one_rank")
def test_experts_in_fp8_train_on_cuda(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("fp8 products need compute capability 9.0")
    low = losses(tmp_path, "cuda", "train.dtype=bfloat16", "model.experts_fp8=true")
    assert low == pytest.approx(losses(tmp_path, "cpu"), abs=0.1)
