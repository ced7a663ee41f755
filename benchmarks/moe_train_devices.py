"""Training steps on devices of devicetest: every key, in layouts of two ranks, against the CPU.

Each layout trains for three steps on two simulated devices under NCCL's rules, with `nccl` alone
and with `cpu:gloo,cuda:nccl`, and on the CPU. The first figure counts the layouts whose losses
differ, that race, mix devices or fail; the second says how many of them have no fault.

Not run: train.stochastic_rounding and train.recompute="outputs", which give tensors other memory
(`.data =`, a storage of no bytes), as the fixture's tensors do not; train.offload_activations,
model.experts_fp8 and moe.dispatch_backend="deepep", which need a card. Not tried yet: keys of
latent attention's families (moe.update_expert_bias, moe.shared_expert_overlap).

    python benchmarks/moe_train_devices.py
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from devicetest import fake_cuda
from moe_train.config import load_config
from moe_train.data import Batch
from moe_train.parallel import start
from moe_train.training import build_runner, read_model_config
from ranktest import run_ranks
from unified_ckpt.geometry import shard

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
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
# What a loss may differ by: where few bits are kept, a sum in another order rounds to another
# number now and then.
SAME, ROUNDED = 1e-5, 2e-2
OVERLAP = "parallel.overlap_grad_reduce=true"
FUSED = "train.gradient_accumulation_fusion=true"
LOW = ("train.dtype=bfloat16", "train.master_weights=true")
LAYOUTS = {
    ("parallel.dp=2",): SAME,
    ("parallel.dp=2", OVERLAP, "train.loss_chunk_tokens=24"): SAME,
    ("parallel.dp=2", "train.recompute=layers", "optimizer.name=muon"): ROUNDED,
    ("parallel.dp=2", "moe.aux_loss_coef=0.05", "moe.aux_loss_scope=sequence"): SAME,
    ("parallel.dp=2", OVERLAP, *LOW, "train.grad_reduce_dtype=bfloat16"): ROUNDED,
    ("parallel.ep=2",): SAME,
    ("parallel.ep=2", "moe.dispatch_route=dedup", "moe.dispatch_chunks=2"): SAME,
    ("parallel.ep=2", "moe.dispatch_route=hierarchical", "moe.dispatch_ranks_per_node=1"): SAME,
    ("parallel.ep=2", OVERLAP): SAME,
    ("parallel.ep=2", "moe.dispatch_payload=int8"): ROUNDED,
    ("parallel.ep=2", "moe.capacity_factor=1.0", "moe.z_loss_coef=0.01"): SAME,
    ("parallel.ep=2", FUSED, "train.recompute=selective"): SAME,
    ("parallel.ep=2", 'parallel.expert_parts=["1,3"]', "model.experts_implementation=loop"): SAME,
    ("parallel.pp=2",): SAME,
    ("parallel.pp=2", "parallel.schedule=zb_1p", "train.recompute=layers"): SAME,
    ("parallel.pp=2", "parallel.schedule=zbv", FUSED): SAME,
    ("parallel.pp=2", "parallel.schedule=interleaved_1f1b", "train.recompute=selective"): SAME,
    ("parallel.pp=2", "parallel.schedule=forward_then_backward", *LOW): ROUNDED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="so many of them")
    chosen = list(LAYOUTS)[: parser.parse_args().layouts]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moe-train-devices-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        (folder / "job.toml").write_text(JOB, encoding="utf-8")
        expected = run_ranks(
            lambda *_: [losses(folder, "cpu", x) for x in chosen], 2, timeout_s=900
        )
        for backend in BACKENDS:
            told = on_devices(folder, backend, chosen)
            for rank, found in enumerate(told):
                for layout, got, want in zip(chosen, found, expected[rank], strict=True):
                    fault = fault_of(got, want, LAYOUTS[layout])
                    print(f"{backend} rank {rank} {' '.join(layout)}: {fault or 'as on the CPU'}")
                    faults += [fault] if fault else []
    runs = len(chosen) * len(BACKENDS)
    for figure, value in (("device_faults", len(faults)), ("device_layouts", len(chosen))):
        line = {"figure": f"moe_train_{figure}", "value": value, "unit": figure.split("_")[1]}
        print(json.dumps({**line, "n": runs, "low": value, "high": value}))


def on_devices(folder: Path, backend: str, chosen: list[tuple[str, ...]]) -> list[list[object]]:
    """Of each rank and layout the losses, or a text that says what went wrong."""

    def fn(rank: int, world_size: int) -> list[object]:
        os.environ["LOCAL_RANK"] = str(rank)
        found: list[object] = []
        with fake_cuda(devices=2, unchecked=[(shard, "_check_tensor")]) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(str(folder / f"store-{BACKENDS.index(backend)}"), 2)
            dist.init_process_group(backend, store=store, rank=rank, world_size=2)
            for layout in chosen:
                got = losses(folder, "cuda", layout)
                bad = [*cuda.races, *cuda.problems]
                found.append(f"{len(bad)} races and mixed devices: {bad[:2]}" if bad else got)
                cuda.forget()
        return found

    return run_ranks(fn, 2, init=False, timeout_s=1800)


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


def fault_of(got: object, want: list[float], apart: float) -> str:
    if isinstance(got, str) or not isinstance(got, list):
        return str(got)
    largest = max(abs(a - b) for a, b in zip(got, want, strict=True))
    return "" if largest <= apart else f"losses {got} instead of {want}"


if __name__ == "__main__":
    main()
