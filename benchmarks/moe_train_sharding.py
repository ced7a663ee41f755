"""A training step with shared out parameters against torch's `fully_shard` of the same decoder.

Two gloo processes train one decoder on the same tokens, in turn by moe-train with
`parallel.sharding=3` and by torch: `fully_shard` of each layer and of the whole, its clipping and
its fused AdamW. The second figure compares what a rank holds between two steps: parameters,
gradients and moments.

    python benchmarks/moe_train_sharding.py
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moe_train.config import Config, load_config
from moe_train.data import Batch, prepare
from moe_train.jobs.rank_alone import random_batches
from moe_train.model import DecoderConfig, DecoderStage, StageOptions, Target
from moe_train.parallel import start
from moe_train.training import build_training
from ranktest import run_ranks

RANKS, WARM = 2, 3
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "eos_token_id": 0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
JOB = """
model.config_file = "config.json"
data = { corpus = ["text"], extensions = [".txt"], sequence_length = 128 }
tokenizer.vocab_size = 300
optimizer.lr = 1e-3
parallel = { dp = 2, sharding = 3, timeout_s = 300 }
log = { tensorboard = false, plots = false, progress = "off" }
[train]
output_dir = "run"
max_steps = 20
global_batch_size = 8
gradient_accumulation_steps = 1
device = "cpu"
"""


class TorchRank:
    """The decoder of this rank in torch's way."""

    def __init__(self, model: DecoderConfig) -> None:
        layers = range(model.num_hidden_layers)
        self.stage = DecoderStage(model, StageOptions(layers=layers, first=True, last=True)).train()
        with torch.no_grad():
            for parameter in self.stage.parameters():
                parameter.normal_(std=model.initializer_range)
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in self.stage.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.stage, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-3, fused=True)

    def train(self, batches: list[Batch]) -> None:
        self.optimizer.zero_grad()
        for batch in batches:
            target = Target(batch.labels, 1.0 / batch.labels.numel(), batch.input_ids)
            self.stage(batch.input_ids, batch.position_ids, target=target).loss.backward()
        nn.utils.clip_grad_norm_(self.stage.parameters(), 1.0)
        self.optimizer.step()

    def held_bytes(self) -> int:
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        parameters = list(self.stage.parameters())
        return held_bytes([*parameters, *(p.grad for p in parameters), *states])


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured(config: Config, rounds: int) -> dict[str, list[float]]:
    training = build_training(config, start(config))
    runner = training.runner
    batches = random_batches(config, runner.stages.config.vocab_size, training.parallel)
    torch_rank = TorchRank(runner.stages.config)
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: runner.train(batches, lr=1e-3),
        "torch": lambda: torch_rank.train(batches),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM + rounds):
        for way, step in ways.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if number >= WARM:
                found[way].append(time.perf_counter() - began)
    moments = [t for tensors in runner.optimizer.moments().values() for t in tensors.values()]
    own = [*runner.stages.parameters(), *training.checkpointer.parameters.values()]
    ours = held_bytes([*own, *moments, *runner.gradients.held()])
    found["bytes"] = [ours, torch_rank.held_bytes()]
    training.checkpointer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="moe-train-sharding-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        (folder / "text").mkdir()
        for number in range(60):
            words = random.Random(number).choices(["one", "two", "three"], k=300)
            (folder / "text" / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
        (folder / "job.toml").write_text(JOB, encoding="utf-8")
        config = load_config(folder / "job.toml")
        prepare(config)
        ranks: list[Any] = run_ranks(lambda *_: measured(config, rounds), RANKS, timeout_s=1200)
    ratios = [a / b for a, b in zip(ranks[0]["ours"], ranks[0]["torch"], strict=True)]
    report("moe_train_sharding_step", ratios, rounds)
    report("moe_train_sharding_bytes", [a / b for a, b in (r["bytes"] for r in ranks)], RANKS)


def report(figure: str, ratios: list[float], count: int) -> None:
    low, *_, high = sorted([*ratios, *ratios])
    line = {"figure": figure, "value": round(statistics.median(ratios), 3), "unit": "x", "n": count}
    print(json.dumps({**line, "low": round(low, 3), "high": round(high, 3)}))


if __name__ == "__main__":
    main()
