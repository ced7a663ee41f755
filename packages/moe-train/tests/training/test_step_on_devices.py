"""Steps of several ranks on devices of devicetest, under NCCL's rules, give the CPU's losses."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from moe_train.config.toml_file import load_config
from moe_train.data.packing import Batch
from moe_train.parallel import Parallel, start
from moe_train.training.build import build_runner, read_model_config
from moe_train.training.step import StepRunner
from ranktest import run_ranks
from unified_ckpt.geometry import shard

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
}
MODELS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_nextn_predict_layers": 0,
    },
}
LATENT = "model.config_file=deepseek_v3.json"  # latent attention, shared experts, expert biases
JOB = """
model.config_file = "qwen3_moe.json"
train.output_dir = "run"
train.max_steps = 3
train.global_batch_size = 8
train.gradient_accumulation_steps = 2
optimizer.lr = 1e-3
data.sequence_length = 16
"""


def write_job(folder: Path, *, num_hidden_layers: int) -> None:
    """Write the job and the configs of its models."""
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    for family, own in MODELS.items():
        sizes = {**SIZES, "model_type": family, "num_hidden_layers": num_hidden_layers, **own}
        (folder / f"{family}.json").write_text(json.dumps(sizes), encoding="utf-8")


def build(folder: Path, device: str, overrides: tuple[str, ...]) -> tuple[StepRunner, Parallel]:
    """What trains the job in `folder` on this rank, and the rank's place."""
    placed = [each.replace("config_file=", f"config_file={folder}/") for each in overrides]
    config = load_config(folder / "job.toml", [f"train.device={device}", *placed])
    parallel = start(config)
    runner, _ = build_runner(config, read_model_config(config), parallel, {})
    return runner, parallel


def losses(folder: Path, device: str, overrides: tuple[str, ...]) -> list[float]:
    """Those of this rank in three steps of the job in `folder`."""
    runner, parallel = build(folder, device, overrides)
    generator = torch.Generator().manual_seed(1)
    each, result = 8 // parallel.num_sample_ranks, []
    first = parallel.sample_rank * each
    for _ in range(3):
        tokens = torch.randint(0, 96, (8, 17), generator=generator)[first : first + each]
        positions = torch.arange(16).expand(each // 2, 16)
        batches = [
            Batch(input_ids=two[:, :-1], labels=two[:, 1:], position_ids=positions)
            for two in tokens.split(each // 2)
        ]
        result.append(runner.train(batches, lr=1e-3).loss)
    return result


def world_size_of(layout: tuple[str, ...]) -> int:
    """How many ranks a layout needs."""
    return math.prod(int(key[12:]) for key in layout if key[9:12] in ("pp=", "dp=", "ep="))


FOUR = ("parallel.dp=2", "parallel.ep=2")
OVERLAP = "parallel.overlap_grad_reduce=true"
CHUNKS = ("moe.dispatch_route=dedup", "moe.dispatch_chunks=2")


# `benchmarks/moe_train_devices.py` has the other keys.
@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        (("parallel.dp=2", OVERLAP), "cpu:gloo,cuda:nccl"),
        (("parallel.ep=2", *CHUNKS), "nccl"),
        (("parallel.ep=2", LATENT, "train.recompute=outputs"), "cpu:gloo,cuda:nccl"),
        (("parallel.pp=2",), "nccl"),
        (("parallel.pp=2",), "cpu:gloo,cuda:nccl"),
        ((*FOUR, "parallel.tp=2", "parallel.cp=2", "parallel.etp=2"), "nccl"),
        ((*FOUR, "parallel.tp=2", "parallel.sharding=3"), "cpu:gloo,cuda:nccl"),
    ],
)
def test_ranks_on_devices_give_the_losses_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...], backend: str
) -> None:
    write_job(tmp_path, num_hidden_layers=2)
    num_ranks = world_size_of(layout)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))

    def fn(rank: int, world_size: int) -> list[float]:
        os.environ["LOCAL_RANK"] = str(rank)
        with fake_cuda(devices=num_ranks, unchecked=[(shard, "_check_tensor")]) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(tmp_path / "store"), num_ranks)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
            got = losses(tmp_path, "cuda", layout)
            assert (cuda.races, cuda.problems) == ([], [])
        return got

    def on_cpu(rank: int, world_size: int) -> list[float]:
        return losses(tmp_path, "cpu", layout)

    expected = run_ranks(on_cpu, num_ranks)
    found = run_ranks(fn, num_ranks, init=False, timeout_s=240)
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)
