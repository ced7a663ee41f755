"""Steps of several ranks on devices of devicetest, under NCCL's rules, give the CPU's losses."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from devicetest import fake_cuda
from devicetest.nccl import has_nccl_rules
from moe_train.config.toml_file import load_config
from moe_train.data.packing import Batch
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from ranktest import run_ranks
from unified_ckpt.geometry import shard

pytestmark = pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
}
JOB = """
model.config_file = "config.json"
train.output_dir = "run"
train.max_steps = 3
train.global_batch_size = 8
train.gradient_accumulation_steps = 2
optimizer.lr = 1e-3
data.sequence_length = 16
"""


def losses(folder: Path, device: str, overrides: tuple[str, ...]) -> list[float]:
    config = load_config(folder / "job.toml", [f"train.device={device}", *overrides])
    parallel = start(config)
    runner, _ = build_runner(config, read_model_config(config), parallel, {})
    generator = torch.Generator().manual_seed(1)
    each, result = 8 // parallel.num_data_ranks, []
    first = parallel.data_rank * each
    for _ in range(3):
        tokens = torch.randint(0, 96, (8, 17), generator=generator)[first : first + each]
        positions = torch.arange(16).expand(each // 2, 16)
        batches = [
            Batch(input_ids=two[:, :-1], labels=two[:, 1:], position_ids=positions)
            for two in tokens.split(each // 2)
        ]
        result.append(runner.train(batches, lr=1e-3).loss)
    return result


# Not among them: train.stochastic_rounding, whose exact weights are put in by `.data =`, which the
# fixture does not take; and train.offload_activations and model.experts_fp8, which need a card.
# Each with what it may differ from the same layout on the CPU: where few bits are kept, a sum in
# another order rounds to another number now and then.
SAME, ROUNDED = 1e-5, 2e-2
LAYOUTS = {
    ("parallel.dp=2",): SAME,
    ("parallel.dp=2", "parallel.overlap_grad_reduce=true", "train.loss_chunk_tokens=24"): SAME,
    ("parallel.dp=2", "train.recompute=layers", "optimizer.name=muon"): ROUNDED,
    ("parallel.dp=2", "moe.aux_loss_coef=0.05", "moe.aux_loss_scope=sequence"): SAME,
    (
        "parallel.dp=2",
        "parallel.overlap_grad_reduce=true",
        "train.dtype=bfloat16",
        "train.master_weights=true",
        "train.grad_reduce_dtype=bfloat16",
    ): ROUNDED,
    ("parallel.ep=2",): SAME,
    ("parallel.ep=2", "moe.dispatch_route=dedup", "moe.dispatch_chunks=2"): SAME,
    ("parallel.ep=2", "moe.dispatch_route=hierarchical", "moe.dispatch_ranks_per_node=1"): SAME,
    ("parallel.ep=2", "moe.dispatch_payload=int8", "train.recompute=outputs"): ROUNDED,
    ("parallel.ep=2", "moe.capacity_factor=1.0", "moe.z_loss_coef=0.01"): SAME,
    ("parallel.ep=2", "train.gradient_accumulation_fusion=true", "train.recompute=selective"): SAME,
    ('parallel.expert_parts=["1,3"]', "parallel.ep=2", "model.experts_implementation=loop"): SAME,
    ("parallel.pp=2",): SAME,
    ("parallel.pp=2", "parallel.schedule=zb_1p", "train.recompute=layers"): SAME,
    ("parallel.pp=2", "parallel.schedule=zbv", "train.gradient_accumulation_fusion=true"): SAME,
    ("parallel.pp=2", "parallel.schedule=interleaved_1f1b", "train.recompute=selective"): SAME,
    ("parallel.pp=2", "parallel.schedule=forward_then_backward", "parallel.layer_split=cost"): SAME,
}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_ranks_on_devices_give_the_losses_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def fn(rank: int, world_size: int) -> list[list[float]]:
        os.environ["LOCAL_RANK"] = str(rank)
        found = []
        with fake_cuda(devices=2, unchecked=[(shard, "_check_tensor")]) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(tmp_path / "store"), 2)
            dist.init_process_group(backend, store=store, rank=rank, world_size=2)
            for layout in LAYOUTS:
                found.append(losses(tmp_path, "cuda", layout))
                assert (cuda.races, cuda.problems) == ([], []), layout
        return found

    def on_cpu(rank: int, world_size: int) -> list[list[float]]:
        return [losses(tmp_path, "cpu", layout) for layout in LAYOUTS]

    expected = run_ranks(on_cpu, 2, timeout_s=300)
    for ours, theirs in zip(run_ranks(fn, 2, init=False, timeout_s=300), expected, strict=True):
        for got, want, (layout, apart) in zip(ours, theirs, LAYOUTS.items(), strict=True):
            assert got == pytest.approx(want, abs=apart), layout
