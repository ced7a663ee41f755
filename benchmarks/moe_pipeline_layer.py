"""Forward and backward of our MoE layer against transformers' Qwen3-MoE block, on one CPU thread.

Same weights, input and output gradient; ours computes its auxiliary loss as well. transformers runs
in whichever of its implementations is fastest for the shape (measured first). Both alternate in one
process, and what is compared is the CPU time of the process, which on one thread is what a quiet
machine would show as time passed. The floor printed beside is that of the experts' matrix products
alone, without routing, activation or gradients of anything else.

    python benchmarks/moe_pipeline_layer.py
    python benchmarks/moe_pipeline_layer.py --runs 15 --case e8k2_fp32
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_pipeline import MoEConfig, MoELayer

# batched_mm copies an expert's weights for every routed row; beyond this it is left out.
BATCHED_MM_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape: tokens, experts, choices, widths, dtype."""

    name: str
    tokens: int
    experts: int
    choices: int
    hidden: int
    intermediate: int
    dtype: torch.dtype


def cases() -> list[Case]:
    """Few large experts and many small ones, in fp32 and bf16."""
    shapes = {
        "e8k2": (1024, 8, 2, 256, 256),
        "e8k2_wide": (2048, 8, 2, 512, 512),
        "e64k8": (1024, 64, 8, 256, 256),
        "e64k8_wide": (1024, 64, 8, 512, 256),
    }
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return [
        Case(
            name=f"{shape}_{precision}",
            tokens=sizes[0],
            experts=sizes[1],
            choices=sizes[2],
            hidden=sizes[3],
            intermediate=sizes[4],
            dtype=dtype,
        )
        for precision, dtype in dtypes.items()
        for shape, sizes in shapes.items()
    ]


class Pair:
    """Both layers with the same weights, and one step of each."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        names: dict[str, Any] = {
            "hidden_size": case.hidden,
            "moe_intermediate_size": case.intermediate,
            "num_experts": case.experts,
            "num_experts_per_tok": case.choices,
            "norm_topk_prob": True,
        }
        self.config = Qwen3MoeConfig(**names)
        self.theirs = Qwen3MoeSparseMoeBlock(self.config).to(case.dtype)
        for parameter in self.theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        self.ours = MoELayer(MoEConfig(**names), dtype=case.dtype)
        self.ours.load_state_dict(self.theirs.state_dict())
        shape = (1, case.tokens, case.hidden)
        self.x = torch.randn(shape, dtype=case.dtype, requires_grad=True)
        self.gradient = torch.randn(shape, dtype=case.dtype)
        self.floor_rows: list[tuple[torch.Tensor, ...]] = []
        self.floor_grads: list[torch.Tensor] = []
        self.floor_s = 0.0

    def run_ours(self) -> None:
        """One forward and backward of our layer."""
        out = self.ours(self.x)
        torch.autograd.backward([out.hidden, out.aux_loss], [self.gradient, None])
        self._forget(self.ours)

    def run_theirs(self, implementation: str) -> None:
        """One forward and backward of theirs."""
        self.config._experts_implementation = implementation
        self.theirs(self.x).backward(self.gradient)
        self._forget(self.theirs)

    def run_floor(self) -> None:
        """The six products of each expert, forward and backward, into memory that is there."""
        if not self.floor_rows:
            self._allocate_floor()
        gate_up, down = self.ours.experts.gate_up_proj, self.ours.experts.down_proj
        grad_gate_up, grad_down = self.floor_grads
        with torch.no_grad():
            start = time.process_time()
            for expert, (x, act, both, y) in enumerate(self.floor_rows):
                torch.mm(x, gate_up[expert].t(), out=both)
                torch.mm(act, down[expert].t(), out=y)
                torch.mm(y, down[expert], out=act)
                torch.mm(both, gate_up[expert], out=x)
                torch.mm(both.t(), x, out=grad_gate_up[expert])
                torch.mm(y.t(), act, out=grad_down[expert])
            self.floor_s = time.process_time() - start

    def _allocate_floor(self) -> None:
        case = self.case
        with torch.no_grad():
            counts = self.ours(self.x).load_E.tolist()
        widths = (case.hidden, case.intermediate, 2 * case.intermediate, case.hidden)
        full = [torch.zeros(sum(counts), width, dtype=case.dtype) for width in widths]
        self.floor_rows = list(zip(*(rows.split(counts) for rows in full), strict=True))
        experts = self.ours.experts.parameters()
        self.floor_grads = [torch.zeros_like(parameter) for parameter in experts]

    def _forget(self, layer: torch.nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        self.x.grad = None


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def fastest(pair: Pair) -> str:
    """The implementation of transformers that is fastest for this shape; best of three each."""
    case = pair.case
    names = ["eager", "grouped_mm"]
    copied = case.tokens * case.choices * 2 * case.intermediate * case.hidden * case.dtype.itemsize
    if copied <= BATCHED_MM_LIMIT_BYTES:
        names.append("batched_mm")
    best = {}
    for name in names:
        pair.run_theirs(name)
        best[name] = min(seconds(partial(pair.run_theirs, name)) for _ in range(3))
    return min(best, key=best.__getitem__)


def measure(case: Case, runs: int) -> dict[str, object]:
    pair = Pair(case)
    peer = fastest(pair)
    for _ in range(2):
        pair.run_ours()
    ratios, floors = [], []
    for _ in range(runs):
        ours_s = seconds(pair.run_ours)
        ratios.append(ours_s / seconds(partial(pair.run_theirs, peer)))
        pair.run_floor()
        floors.append(ours_s / pair.floor_s)
    ratios.sort()
    return {
        "figure": f"moe_layer_{case.name}",
        "value": round(statistics.median(ratios), 3),
        "unit": "x",
        "low": round(ratios[0], 3),
        "high": round(ratios[-1], 3),
        "n": runs,
        "peer": peer,
        "over_floor": round(statistics.median(floors), 3),
    }


def summary(precision: str, lines: list[dict[str, object]]) -> dict[str, object]:
    """The geometric mean over the shapes, with the best and the worst shape."""
    values = sorted(float(str(line["value"])) for line in lines)
    return {
        "figure": f"moe_layer_{precision}",
        "value": round(statistics.geometric_mean(values), 3),
        "unit": "x",
        "low": values[0],
        "high": values[-1],
        "n": len(values),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line for each case, then one for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=11, help="measured runs of each side")
    parser.add_argument("--case", choices=[case.name for case in cases()])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines: dict[str, list[dict[str, object]]] = {}
    for case in cases():
        if arguments.case in (None, case.name):
            line = measure(case, arguments.runs)
            lines.setdefault(case.name.rpartition("_")[2], []).append(line)
            print(json.dumps(line), flush=True)
    for precision, measured in lines.items() if arguments.case is None else ():
        print(json.dumps(summary(precision, measured)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
