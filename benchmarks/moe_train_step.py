"""One training step in one process: ours against transformers'.

Same weights, same batch, same AdamW (torch's fused one), same clipping, alternating in one process;
transformers runs with each of its experts implementations, and the fastest of them is the peer. On
the CPU it is the example's decoder in float32. On a GPU it is two layers of Qwen3-30B-A3B (1.9e9
parameters) in bfloat16 on four samples of 4,096 tokens, against grouped_mm; what a step adds to the
memory of weights, gradients and moments is compared too, with and without recomputation.

    uv run python benchmarks/moe_train_step.py [--rounds 9] [--threads 1]
    python benchmarks/moe_train_step.py --device cuda
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from moe_train.config import Config, load_config
from moe_train.data import Batch
from moe_train.model import decays
from moe_train.parallel import start
from moe_train.training import build_runner, read_model_config

ROOT = Path(__file__).resolve().parent.parent
# batched_mm copies an expert's weights for every routed row: minutes and gigabytes a step here.
PEERS = ("grouped_mm", "eager")
LARGE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": False,
}
LARGE_JOB = [
    "train.global_batch_size=4",
    "data.reset_at_documents=false",
    "train.dtype=bfloat16",
    "train.device=cuda",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    # One thread: with more, a busy machine measures how OpenMP waits.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shrink", type=int, default=1, help="of the decoder on a GPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        if options.device == "cpu":
            config = example(Path(folder), [])
            report(measure(make_steps(config, PEERS), options.rounds), "step_ratio")
        else:
            on_a_gpu(Path(folder), options.rounds, options.shrink)
        dist.destroy_process_group()


def on_a_gpu(folder: Path, rounds: int, shrink: int) -> None:
    """Time and memory of a step of the large decoder, ours with recomputation too."""
    (folder / "large.json").write_text(json.dumps(shrunk(shrink)))
    job = [*LARGE_JOB, f"model.config_file={folder / 'large.json'}"]
    job.append(f"data.sequence_length={max(8, 4096 // shrink)}")
    config, peer = example(folder, job), PEERS[0]
    recomputed = replace(config, train=replace(config.train, recompute="selective"))
    steps = make_steps(config, [peer]) | {
        "ours recomputed": our_step(recomputed, microbatches(recomputed))
    }
    times = measure(steps, rounds)
    added = {side: added_bytes(step) for side, step in steps.items()}
    for ours, name in (("ours", ""), ("ours recomputed", "_recomputed")):
        report({"ours": times[ours], peer: times[peer]}, f"gpu_step_ratio{name}")
        ratio = round(added[ours] / added[peer], 3)
        sizes = {"ours_bytes": added[ours], f"{peer}_bytes": added[peer]}
        figure = {"figure": f"gpu_step_memory{name}", "value": ratio, "unit": "x"}
        print(json.dumps(figure | sizes))


def shrunk(factor: int) -> dict[str, object]:
    """The large decoder, with widths and counts divided."""
    parts = {"vocab_size", "hidden_size", "moe_intermediate_size", "num_experts", "head_dim"}
    return {k: v // factor if k in parts else v for k, v in LARGE.items()}


def added_bytes(step: Callable[[], float]) -> int:
    """How far a step's peak lies above what is allocated before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def make_steps(config: Config, peers: Sequence[str]) -> dict[str, Callable[[], float]]:
    """Ours and the peers', by name."""
    batches = microbatches(config)
    theirs = {name: their_step(config, batches, name) for name in peers}
    return {"ours": our_step(config, batches), **theirs}


def example(folder: Path, overrides: Sequence[str]) -> Config:
    """The example's job, in one process."""
    alone = ["parallel.pp=1", "parallel.dp=1", "parallel.ep=1", "train.device=cpu", *overrides]
    config = load_config(ROOT / "examples" / "python_stdlib.toml", alone)
    return replace(config, train=replace(config.train, output_dir=str(folder)))


def microbatches(config: Config) -> list[Batch]:
    count = config.train.gradient_accumulation_steps
    rows, length = config.train.global_batch_size // count, config.data.sequence_length
    vocab_size = read_model_config(config).vocab_size
    generator = torch.Generator().manual_seed(0)
    result = []
    for _ in range(count):
        tokens = torch.randint(0, vocab_size, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, length)
        result.append(Batch(input_ids=tokens[:, :-1], labels=tokens[:, 1:], position_ids=positions))
    return result


def our_step(config: Config, batches: list[Batch]) -> Callable[[], float]:
    runner, _ = build_runner(config, read_model_config(config), start(config), {})
    return lambda: runner.train(batches, lr=config.optimizer.lr).loss


def their_step(config: Config, batches: list[Batch], experts: str) -> Callable[[], float]:
    settings = config.optimizer
    torch.manual_seed(0)
    shape = Qwen3MoeConfig.from_json_file(config.model.config_file)
    shape._experts_implementation = experts
    device = torch.device(config.train.device)
    with device:
        model = Qwen3MoeForCausalLM(shape).train().to(getattr(torch, config.train.dtype))
    model.set_experts_implementation(experts)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if decays(n, p.shape)]},
            {"params": [p for n, p in named.items() if not decays(n, p.shape)], "weight_decay": 0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    count = sum(batch.labels.numel() for batch in batches)
    given = [(batch.input_ids.to(device), batch.labels.to(device)) for batch in batches]

    def step() -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for input_ids, labels in given:
            # Positions are left to the model: they are 0, 1, 2, ... and its fast path.
            logits = model(input_ids=input_ids, use_cache=False).logits
            # In float32, as its own loss is.
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss / count).backward()
            total += loss.detach() / count
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        return total.item()

    return step


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            began = time.perf_counter()
            loss = step()  # ends with a number that the host reads
            if number:
                times[name].append(time.perf_counter() - began)
            if not loss < 20:
                raise RuntimeError(f"{name}: loss {loss} after {number} steps")
    return times


def report(times: dict[str, list[float]], figure_name: str) -> None:
    peers = [name for name in times if name != "ours"]
    for name in peers:
        ratios = sorted(a / b for a, b in zip(times["ours"], times[name], strict=True))
        print(f"ours / transformers {name}: {statistics.median(ratios):.3f}")
    best = min(peers, key=lambda name: statistics.median(times[name]))
    ratios = sorted(a / b for a, b in zip(times["ours"], times[best], strict=True))
    figure = {
        "figure": figure_name,
        "value": round(statistics.median(ratios), 3),
        "unit": "x",
        "low": round(ratios[0], 3),
        "high": round(ratios[-1], 3),
        "n": len(ratios),
        "peer": best,
    }
    print(json.dumps(figure))


if __name__ == "__main__":
    main()
