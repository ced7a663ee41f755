"""The time that ranks of a pipeline wait in the trainer, against what the simulator finds.

Four ranks train a decoder of eight alike layers, which sleep in forward and backward so that any
machine runs four of them at a time, under four schedules. The trainer times a step, as it does for
`schedule.svg`; the simulator is given the times that the stages took. The figure is the largest
relative difference of the two idle shares.

    python benchmarks/moe_train_bubble.py                          # about two minutes
    python benchmarks/moe_train_bubble.py --sleep-ms 5 --schedules zbv
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_train.config import load_config
from moe_train.data import Batch
from moe_train.model import DecoderStage
from moe_train.parallel import start
from moe_train.training import build_runner, read_model_config
from moe_train.training.timeline import Timeline
from ranktest import run_ranks

SCHEDULES = ("1f1b", "forward_then_backward", "interleaved_1f1b", "zbv")
RANKS, STEPS, MICROBATCHES = 4, 3, 8
MODEL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 16,
    "eos_token_id": 0,
}
TOML = """
model.config_file = "config.json"
data = { corpus = ["python-stdlib"], sequence_length = 8 }
tokenizer.vocab_size = 300
optimizer = { lr = 1e-3 }
parallel = { pp = 4, timeout_s = 300 }
log = { tensorboard = false, plots = false, progress = "off" }
[train]
output_dir = "run"
max_steps = 3
global_batch_size = 8
gradient_accumulation_steps = 8
device = "cpu"
"""


class _Sleep(torch.autograd.Function):
    """Passes a tensor through: slow forwards, twice as slow backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


def slow_down(stage: DecoderStage, seconds: float) -> None:
    """Let every layer of a stage sleep."""

    def after(_: nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return _Sleep.apply(output[0], seconds), output[1]

    for layer in stage.model.layers.values():
        layer.register_forward_hook(after)


def bubbles(schedule: str, seconds: float) -> dict[str, float]:
    """Measured and simulated idle share of a step of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        (Path(folder) / "job.toml").write_text(TOML, encoding="utf-8")
        config = load_config(Path(folder) / "job.toml", [f"parallel.schedule={schedule}"])

        def run(*_: int) -> dict[str, float]:
            torch.set_num_threads(1)
            parallel = start(config)
            runner = build_runner(config, read_model_config(config), parallel, {})[0]
            for stage in runner.stages.by_number.values():
                slow_down(stage, seconds)
            tokens = torch.arange(9).expand(1, 9)
            positions = torch.arange(8).expand(1, 8)
            batch = Batch(input_ids=tokens[:, :-1], labels=tokens[:, 1:], position_ids=positions)
            picture = Timeline(parallel)
            for _ in range(STEPS):
                picture = Timeline(parallel)
                runner.train([batch] * MICROBATCHES, lr=1e-3, times=picture.times)
            return picture.finish(runner.executor.schedule, Path(folder) / "schedule.svg")

        found: dict[str, float] = run_ranks(run, RANKS, timeout_s=300)[0]  # type: ignore[assignment]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--sleep-ms", type=float, default=100.0)
    arguments = parser.parse_args()
    apart = []
    for schedule in arguments.schedules:
        found = bubbles(schedule, arguments.sleep_ms / 1000)
        measured, simulated = found["pipeline_bubble"], found["simulated_bubble"]
        apart.append(abs(measured / simulated - 1))
        print(f"{schedule}: {measured:.4f} measured, {simulated:.4f} simulated", file=sys.stderr)
    figure = {"figure": "moe_train_bubble_apart", "value": max(apart), "unit": "x"}
    print(json.dumps(figure | {"n": len(apart), "low": min(apart), "high": max(apart)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
