"""Training steps on devices of devicetest: every key, in layouts of 2 and 4 ranks, against the CPU.

Each layout trains for three steps on simulated devices under NCCL's rules, with `nccl` alone
and with `cpu:gloo,cuda:nccl`, and on the CPU. The first figure counts the layouts whose losses
differ, that race, mix devices or fail; the second says how many of them have no fault.

Not run: model.experts_fp8 and moe.dispatch_backend="deepep", which need a card.

    python benchmarks/moe_train_devices.py
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from loading import load_test

from devicetest import fake_cuda
from ranktest import run_ranks
from unified_ckpt.geometry import shard

STEPS = load_test("moe-train", "training/test_step_on_devices")  # the models and the job
LATENT = STEPS.LATENT
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
# What a loss may differ by: where few bits are kept, a sum in another order rounds to another
# number now and then.
SAME, ROUNDED = 1e-5, 2e-2
FOUR = STEPS.FOUR  # ranks, of two axes
OVERLAP = "parallel.overlap_grad_reduce=true"
FUSED = "train.gradient_accumulation_fusion=true"
BIAS = "moe.update_expert_bias=true"
LOW = ("train.dtype=bfloat16", "train.master_weights=true")
LAYOUTS = {
    ("parallel.dp=2",): SAME,
    ("parallel.dp=2", OVERLAP, "train.loss_chunk_tokens=24"): SAME,
    ("parallel.dp=2", "train.recompute=layers", "optimizer.name=muon"): ROUNDED,
    ("parallel.dp=2", "moe.aux_loss_coef=0.05", "moe.aux_loss_scope=sequence"): SAME,
    ("parallel.dp=2", OVERLAP, *LOW, "train.grad_reduce_dtype=bfloat16"): ROUNDED,
    ("parallel.dp=2", "train.recompute=outputs", "parallel.sharding=1"): SAME,
    ("parallel.dp=2", "train.dtype=bfloat16", "train.stochastic_rounding=true"): ROUNDED,
    ("parallel.dp=2", *LOW, OVERLAP, "parallel.sharding=1"): ROUNDED,
    ("parallel.dp=2", "parallel.sharding=2"): SAME,
    ("parallel.dp=2", "parallel.sharding=3"): SAME,
    ("parallel.dp=2", LATENT, *LOW, "parallel.sharding=3", "train.recompute=layers"): ROUNDED,
    ("parallel.dp=2", LATENT, BIAS, "train.recompute=outputs"): SAME,
    ("parallel.dp=2", "train.offload_activations=true"): SAME,
    ("parallel.dp=2", "train.offload_optimizer=true", "parallel.sharding=1"): SAME,
    ("parallel.ep=2", *LOW, "train.offload_optimizer=true", "optimizer.name=muon"): ROUNDED,
    ("parallel.dp=2", LATENT, "parallel.cp=2", "train.recompute=layers"): SAME,
    ("parallel.dp=2", "parallel.cp=2", "parallel.cp_attention=ring"): SAME,
    ("parallel.dp=2", LATENT, "parallel.tp=2", "train.recompute=layers"): SAME,
    ("parallel.dp=2", "parallel.tp=2", OVERLAP): SAME,
    ("parallel.ep=2",): SAME,
    ("parallel.ep=2", "parallel.cp=2", "parallel.sharding=3"): SAME,
    ("parallel.ep=2", "parallel.tp=2", "parallel.sharding=3"): SAME,
    ("parallel.ep=2", LATENT, BIAS, "moe.shared_expert_overlap=true"): SAME,
    ("parallel.ep=2", LATENT, OVERLAP, "train.recompute=selective"): SAME,
    ("parallel.ep=2", "moe.dispatch_payload=int8", "train.recompute=outputs"): ROUNDED,
    ("parallel.ep=2", *LOW, "train.recompute=outputs", FUSED): ROUNDED,
    ("parallel.ep=2", "moe.dispatch_route=dedup", "moe.dispatch_chunks=2"): SAME,
    ("parallel.ep=2", "moe.dispatch_route=hierarchical", "moe.dispatch_ranks_per_node=1"): SAME,
    ("parallel.ep=2", OVERLAP): SAME,
    ("parallel.ep=2", "moe.dispatch_payload=int8"): ROUNDED,
    ("parallel.ep=2", "moe.capacity_factor=1.0", "moe.z_loss_coef=0.01"): SAME,
    ("parallel.ep=2", FUSED, "train.recompute=selective"): SAME,
    ("parallel.ep=2", 'parallel.expert_parts=["1,3"]', "model.experts_implementation=loop"): SAME,
    ("parallel.dp=2", "parallel.etp=2", OVERLAP): SAME,
    ("parallel.dp=2", LATENT, "parallel.etp=2", "parallel.sharding=3"): SAME,
    ("parallel.dp=2", *LOW, "parallel.tp=2", "parallel.etp=2", "train.recompute=layers"): ROUNDED,
    (*FOUR, "parallel.etp=2", "moe.dispatch_route=dedup", "moe.dispatch_chunks=2"): SAME,
    (*FOUR, "parallel.tp=2", "parallel.cp=2", "parallel.etp=2"): SAME,
    (*FOUR, LATENT, "parallel.tp=2", "parallel.etp=2", "parallel.sharding=2"): SAME,
    (*FOUR, "parallel.tp=2", "parallel.sharding=3"): SAME,
    ("parallel.pp=2", "parallel.dp=2", "parallel.etp=2", "parallel.schedule=zb_1p"): SAME,
    ("parallel.pp=2",): SAME,
    ("parallel.pp=2", LATENT, BIAS, "parallel.schedule=zbv"): SAME,
    ("parallel.pp=2", "train.recompute=outputs", "parallel.schedule=zb_1p"): SAME,
    ("parallel.pp=2", "parallel.schedule=zb_1p", "train.recompute=layers"): SAME,
    ("parallel.pp=2", "parallel.schedule=zbv", FUSED): SAME,
    ("parallel.pp=2", "parallel.schedule=interleaved_1f1b", "train.recompute=selective"): SAME,
    ("parallel.pp=2", "parallel.schedule=forward_then_backward", *LOW): ROUNDED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="layouts that have this in a key")
    only = parser.parse_args().only
    chosen = [layout for layout in LAYOUTS if only in " ".join(layout)]
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moe-train-devices-") as name:
        folder = Path(name)
        STEPS.write_job(folder, num_hidden_layers=4)
        for num_ranks in sorted({STEPS.world_size_of(layout) for layout in chosen}):
            same = [each for each in chosen if STEPS.world_size_of(each) == num_ranks]
            faults += faults_of(folder, same, num_ranks)
    runs = len(chosen) * len(BACKENDS)
    for figure, value in (("device_faults", len(faults)), ("device_layouts", len(chosen))):
        line = {"figure": f"moe_train_{figure}", "value": value, "unit": figure.split("_")[1]}
        print(json.dumps({**line, "n": runs, "low": value, "high": value}))


def faults_of(folder: Path, chosen: list[tuple[str, ...]], num_ranks: int) -> list[str]:
    """What goes wrong in layouts of so many ranks, with each backend."""
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    faults = []
    expected = run_ranks(
        lambda *_: [STEPS.losses(folder, "cpu", x) for x in chosen], num_ranks, timeout_s=900
    )
    for backend in BACKENDS:
        told = on_devices(folder, backend, chosen, num_ranks)
        for rank, found in enumerate(told):
            for layout, got, want in zip(chosen, found, expected[rank], strict=True):
                fault = fault_of(got, want, LAYOUTS[layout])
                print(f"{backend} rank {rank} {' '.join(layout)}: {fault or 'as on the CPU'}")
                faults += [fault] if fault else []
    return faults


def on_devices(
    folder: Path, backend: str, chosen: list[tuple[str, ...]], num_ranks: int
) -> list[list[object]]:
    """Of each rank and layout the losses, or a text that says what went wrong."""

    def fn(rank: int, world_size: int) -> list[object]:
        os.environ["LOCAL_RANK"] = str(rank)
        found: list[object] = []
        with fake_cuda(devices=num_ranks, unchecked=[(shard, "_check_tensor")]) as cuda:
            torch.cuda.set_device(rank)
            place = folder / f"store-{num_ranks}-{BACKENDS.index(backend)}"
            store = dist.FileStore(str(place), num_ranks)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
            for layout in chosen:
                got = STEPS.losses(folder, "cuda", layout)
                bad = [*cuda.races, *cuda.problems]
                found.append(f"{len(bad)} races and mixed devices: {bad[:2]}" if bad else got)
                cuda.forget()
        return found

    return run_ranks(fn, num_ranks, init=False, timeout_s=1800)


def fault_of(got: object, want: list[float], apart: float) -> str:
    if isinstance(got, str) or not isinstance(got, list):
        return str(got)
    largest = max(abs(a - b) for a, b in zip(got, want, strict=True))
    return "" if largest <= apart else f"losses {got} instead of {want}"


if __name__ == "__main__":
    main()
