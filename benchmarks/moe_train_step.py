"""One training step of the example's decoder in one process: ours against transformers'.

Same weights, same batch, same AdamW (torch's fused one), same clipping, alternating in one process;
transformers runs with each of its experts implementations, and the fastest of them is the peer.

    uv run python benchmarks/moe_train_step.py [--rounds 9] [--threads 1]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    # One thread: with more, a busy machine measures how OpenMP waits.
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = example(Path(folder))
        batches = microbatches(config)
        steps: dict[str, Callable[[], float]] = {"ours": our_step(config, batches)}
        for name in PEERS:
            steps[name] = their_step(config, batches, name)
        report(measure(steps, options.rounds))
        dist.destroy_process_group()


def example(folder: Path) -> Config:
    """The example's job, in one process."""
    overrides = ["parallel.pp=1", "parallel.dp=1", "parallel.ep=1", "train.device=cpu"]
    config = load_config(ROOT / "examples" / "python_stdlib.toml", overrides)
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
    model = Qwen3MoeForCausalLM(shape).train()
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

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            # Positions are left to the model: they are 0, 1, 2, ... and its fast path.
            logits = model(input_ids=batch.input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
            (loss / count).backward()
            total += loss.item() / count
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        return total

    return step


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            loss = step()
            if number:
                times[name].append(time.perf_counter() - began)
            if not loss < 20:
                raise RuntimeError(f"{name}: loss {loss} after {number} steps")
    return times


def report(times: dict[str, list[float]]) -> None:
    for name in PEERS:
        ratios = sorted(a / b for a, b in zip(times["ours"], times[name], strict=True))
        print(f"ours / transformers {name}: {statistics.median(ratios):.3f}")
    best = min(PEERS, key=lambda name: statistics.median(times[name]))
    ratios = sorted(a / b for a, b in zip(times["ours"], times[best], strict=True))
    figure = {
        "figure": "step_ratio",
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
