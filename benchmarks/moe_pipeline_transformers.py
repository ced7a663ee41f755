"""Training models of transformers with our experts registered, against its own, on one CPU thread.

Two copies of a small model with the same weights, one with `experts_implementation="moe_pipeline"`
and one with whichever of transformers' implementations is fastest for it (measured first), train on
the same batches, step by step in turn. What is compared is

- the largest relative difference of their losses;
- the CPU time of a whole step: forward, backward and optimizer;
- the bytes that the forward saves for the backward, of the whole model, parameters apart;
- the most bytes alive at once in a step of two microbatches, activations and gradients; once more
  with `gradient_accumulation_fusion`.

In bytes ours is compared to whichever implementation of transformers needs least, be it another one
than the fastest.

    python benchmarks/moe_pipeline_transformers.py
    python benchmarks/moe_pipeline_transformers.py --case qwen3_moe --steps 30
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

import moe_pipeline.families.transformers

OURS, FUSED = "moe_pipeline", "moe_pipeline_fused"
VOCABULARY, SEQUENCES, LENGTH = 512, 4, 256
# Its batched_mm copies an expert's weights for every routed row, 2 GiB a layer here: left out.
THEIRS = ("eager", "grouped_mm")


def configurations() -> dict[str, Callable[[], Any]]:
    """Few large experts, many small ones, with a shared expert, and GPT-OSS's layout."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    fine = {**common, "moe_intermediate_size": 128, "num_experts_per_tok": 8}
    return {
        "qwen3_moe": lambda: Qwen3MoeConfig(**fine, head_dim=64, num_experts=128),
        "mixtral": lambda: MixtralConfig(
            **common, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2
        ),
        "deepseek_v3": lambda: DeepseekV3Config(
            **fine,
            n_routed_experts=64,
            first_k_dense_replace=0,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=32,
        ),
        "gpt_oss": lambda: GptOssConfig(
            **common,
            head_dim=64,
            intermediate_size=256,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
    }


def model_of(config: AutoConfig, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    for parameter in model.parameters():  # initialised as zeros in some families' routers
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
    return model  # type: ignore[no-any-return]


class Trainer:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def step(self, ids: Tensor) -> float:
        loss = self.forward(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def batch(step: int) -> Tensor:
    """Sequences in which each token tells the next."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=generator)
    return (starts + 7 * torch.arange(LENGTH)) % VOCABULARY


def saved_bytes(trainer: Trainer) -> int:
    """Bytes of the storages that a forward saves for its backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    saved: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.forward(batch(0))
    return sum(saved.values())


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at once in storages that operations made inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: ref for key, ref in self._live.items() if not ref[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def peak_bytes(trainer: Trainer) -> int:
    """The most bytes alive in two microbatches, gradients of parameters included."""
    with LiveBytes() as live:
        for number in range(2):
            trainer.forward(batch(number)).backward()
    trainer.optimizer.zero_grad()
    return live.peak


def timed(trainer: Trainer, ids: Tensor) -> tuple[float, float]:
    start = time.process_time()
    loss = trainer.step(ids)
    return loss, time.process_time() - start


def measure(case: str, config: AutoConfig, steps: int) -> list[dict[str, object]]:
    peers = {name: Trainer(model_of(copy.deepcopy(config), name)) for name in THEIRS}
    seconds = {}
    for name, trainer in peers.items():
        seconds[name] = min(timed(trainer, batch(0))[1] for _ in range(3))
    saved = {name: saved_bytes(trainer) for name, trainer in peers.items()}
    peaks = {name: peak_bytes(trainer) for name, trainer in peers.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    del peers
    theirs = Trainer(model_of(copy.deepcopy(config), fastest))
    ours = Trainer(model_of(copy.deepcopy(config), OURS))
    our_saved, our_peak = saved_bytes(ours), peak_bytes(ours)
    fused_peak = peak_bytes(Trainer(model_of(copy.deepcopy(config), FUSED)))
    ratios, differences = [], []
    for step in range(steps):
        ids = batch(step)
        (wanted, their_s), (loss, our_s) = timed(theirs, ids), timed(ours, ids)
        ratios.append(our_s / their_s)
        differences.append(abs(loss - wanted) / abs(wanted))
    ratios = sorted(ratios[2:])
    least_saved, least_peak = (min(sizes, key=sizes.__getitem__) for sizes in (saved, peaks))
    return [
        line(
            f"{case}_step_time",
            statistics.median(ratios),
            (ratios[0], ratios[-1]),
            fastest,
            n=len(ratios),
        ),
        line(f"{case}_saved_bytes", our_saved / saved[least_saved], None, least_saved),
        line(f"{case}_peak_bytes", our_peak / peaks[least_peak], None, least_peak),
        line(f"{case}_fused_peak_bytes", fused_peak / peaks[least_peak], None, least_peak),
        line(f"{case}_loss_difference", max(differences), None, fastest, unit="relative", n=steps),
    ]


def line(
    figure: str,
    value: float,
    spread: tuple[float, float] | None,
    peer: str,
    unit: str = "x",
    n: int = 1,
) -> dict[str, object]:
    low, high = spread or (value, value)
    digits = 3 if unit == "x" else 9
    return {
        "figure": f"moe_transformers_{figure}",
        "value": round(value, digits),
        "unit": unit,
        "low": round(low, digits),
        "high": round(high, digits),
        "n": n,
        "peer": peer,
    }


def worst(kind: str, lines: list[dict[str, object]]) -> dict[str, object]:
    """The case in which ours does worst."""
    cases = [f"moe_transformers_{case}_{kind}" for case in configurations()]
    of_kind = [entry for entry in lines if entry["figure"] in cases]
    worst_line = max(of_kind, key=lambda entry: float(str(entry["value"])))
    values = [float(str(entry["value"])) for entry in of_kind]
    return {
        "figure": f"moe_transformers_worst_{kind}",
        "value": worst_line["value"],
        "unit": worst_line["unit"],
        "low": min(values),
        "high": max(values),
        "n": len(values),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print five JSON lines for each case, then the worst of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each side")
    parser.add_argument("--case", choices=list(configurations()))
    arguments = parser.parse_args(argv)
    if arguments.steps < 3:
        parser.error(f"--steps {arguments.steps}: the first two are not measured; give at least 3")
    torch.set_num_threads(1)
    moe_pipeline.families.transformers.register(OURS)
    moe_pipeline.families.transformers.register(FUSED, gradient_accumulation_fusion=True)
    lines: list[dict[str, object]] = []
    for case, make in configurations().items():
        if arguments.case in (None, case):
            lines += measure(case, make(), arguments.steps)
            for entry in lines[-5:]:
                print(json.dumps(entry), flush=True)
    if arguments.case is None:
        for kind in (
            *("step_time", "saved_bytes", "peak_bytes", "fused_peak_bytes"),
            "loss_difference",
        ):
            print(json.dumps(worst(kind, lines)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
