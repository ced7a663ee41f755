"""Forward and backward of our experts and MoE layer against peers and the floor, on one CPU thread.

Three shapes of experts, in fp32 and bf16. All sides have the same weights, routing, input and
output gradient, and run in turn in one process, and then in others; compared is the CPU time of
the process, which on one thread is what a quiet machine would show as time passed. Every side
starts with no gradients, as after `zero_grad()`.

- floor: the six products of each expert alone, on sorted rows, into memory that is there.
- experts: from tokens and their routing to tokens. Ours with and without
  `gradient_accumulation_fusion`, transformers' Qwen3-MoE experts in the fastest of its
  implementations, and the plain way: sort, two `grouped_mm`, sum.
- layer: with the router; ours computes its auxiliary loss as well.

    python benchmarks/moe_pipeline_layer.py
    python benchmarks/moe_pipeline_layer.py --processes 9 --case e8k2_fp32
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_pipeline.config import ExpertsOptions, MoEConfig
from moe_pipeline.experts import token_experts_function
from moe_pipeline.layer import MoELayer

PEERS = ("eager", "grouped_mm", "sorted")
FIGURES = {
    "experts_over_floor": ("experts", "floor"),
    "experts_plain_over_floor": ("experts_plain", "floor"),
    "experts": ("experts", "peer"),
    "experts_plain": ("experts_plain", "peer"),
    "layer": ("layer", "peer_layer"),
    "layer_plain": ("layer_plain", "peer_layer"),
}


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
    """Mixtral and Qwen3-MoE in small, and the latter with few rows: 256, 128, 16 an expert."""
    shapes = {
        "e8k2": (1024, 8, 2, 512, 1024),
        "e64k8": (1024, 64, 8, 512, 192),
        "e128k8": (256, 128, 8, 512, 192),
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


class Floor:
    """The six products of each expert, in a forward and a backward pass over the experts."""

    def __init__(self, gate_up: Tensor, down: Tensor, counts: list[int]) -> None:
        d, h = down.shape[1:]
        like = down.detach()
        widths = {"x": d, "pre": 2 * h, "act": h, "y": d}
        rows = {n: torch.randn(sum(counts), w).to(like.dtype) for n, w in widths.items()}
        outs = {f"{n}_out": torch.zeros_like(t) for n, t in rows.items()}
        pieces = {n: t.split(counts) for n, t in {**rows, **outs}.items()}
        self.experts = [
            dict(zip(pieces, p, strict=True)) for p in zip(*pieces.values(), strict=True)
        ]
        self.gate_up, self.down = gate_up.detach().unbind(), like.unbind()
        self.grads = [torch.zeros_like(t).unbind() for t in (gate_up.detach(), like)]

    def __call__(self) -> None:
        for e, t in enumerate(self.experts):
            torch.mm(t["x"], self.gate_up[e].t(), out=t["pre_out"])
            torch.mm(t["act"], self.down[e].t(), out=t["y_out"])
        for e, t in enumerate(self.experts):
            torch.mm(t["y"], self.down[e], out=t["act_out"])
            torch.mm(t["y"].t(), t["act"], out=self.grads[1][e])
            torch.mm(t["pre"].t(), t["x"], out=self.grads[0][e])
            torch.mm(t["pre"], self.gate_up[e], out=t["x_out"])


def sorted_experts(
    x_TD: Tensor, idx_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Sort, two grouped products, sum: what one would write with torch alone."""
    order = torch.argsort(idx_TK.flatten())
    tokens = order // idx_TK.shape[1]
    counts = torch.bincount(idx_TK.flatten(), minlength=gate_up.shape[0])
    offsets = counts.cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x_TD[tokens], gate_up.mT, offs=offsets).chunk(2, dim=1)
    act = F.silu(gate) * up * weights_TK.flatten()[order].unsqueeze(1)
    y = F.grouped_mm(act, down.mT, offs=offsets)
    return torch.zeros_like(x_TD).index_add(0, tokens, y)


class Sides:
    """One step of each side, over weights that they all share."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        names: dict[str, Any] = {
            "hidden_size": case.hidden,
            "moe_intermediate_size": case.intermediate,
            "num_experts": case.experts,
            "num_experts_per_tok": case.choices,
        }
        self.config = Qwen3MoeConfig(**names, norm_topk_prob=True)
        self.theirs = Qwen3MoeSparseMoeBlock(self.config).to(case.dtype)
        for parameter in self.theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        self.layers = {fusion: self._layer(names, fusion=fusion) for fusion in (True, False)}
        self.x = torch.randn(case.tokens, case.hidden).to(case.dtype).requires_grad_()
        self.gradient = torch.randn(case.tokens, case.hidden).to(case.dtype)
        with torch.no_grad():
            _, weights, self.idx = self.theirs.gate(self.x)
        self.weights = weights.requires_grad_()
        held = self.theirs.experts
        counts = torch.bincount(self.idx.flatten(), minlength=case.experts).tolist()
        self.floor = Floor(held.gate_up_proj, held.down_proj, counts)

    def _layer(self, names: dict[str, Any], *, fusion: bool) -> MoELayer:
        options = ExpertsOptions(gradient_accumulation_fusion=fusion)
        layer = MoELayer(MoEConfig(**names, experts=options), dtype=self.case.dtype)
        layer.load_state_dict(self.theirs.state_dict(), strict=False)
        return layer

    def run_experts(self, *, fusion: bool) -> None:
        """Ours, from tokens and routing."""
        experts = self.layers[fusion].experts
        options = experts.config.experts
        out = token_experts_function(self.x, self.idx, self.weights, experts.weights, options)
        self._backward(out, experts)

    def run_peer(self, name: str) -> None:
        """A peer, from tokens and routing."""
        self.config._experts_implementation = name
        self._backward(self._peer(name, self.idx, self.weights), self.theirs)

    def run_layer(self, *, fusion: bool) -> None:
        """Our layer."""
        out = self.layers[fusion](self.x)
        torch.autograd.backward([out.hidden, out.aux_loss], [self.gradient, None])
        self._forget(self.layers[fusion])

    def run_peer_layer(self, name: str) -> None:
        """A peer's experts behind transformers' router."""
        self.config._experts_implementation = name
        _, weights, idx = self.theirs.gate(self.x)
        self._backward(self._peer(name, idx, weights), self.theirs)

    def _peer(self, name: str, idx: Tensor, weights: Tensor) -> Tensor:
        held = self.theirs.experts
        if name == "sorted":
            return sorted_experts(self.x, idx, weights, held.gate_up_proj, held.down_proj)
        out: Tensor = held(self.x, idx, weights)
        return out

    def _backward(self, out: Tensor, module: torch.nn.Module) -> None:
        out.backward(self.gradient)
        self._forget(module)

    def _forget(self, module: torch.nn.Module) -> None:
        module.zero_grad()
        self.x.grad = self.weights.grad = None


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def fastest(sides: Sides) -> str:
    """The peer that is fastest for this shape; one that is hopeless is not tried again."""
    best: dict[str, float] = {}
    for name in PEERS:
        best[name] = seconds(partial(sides.run_peer, name))
    for name in [n for n, s in best.items() if s < 3 * min(best.values())]:
        best[name] = min(seconds(partial(sides.run_peer, name)) for _ in range(5))
    return min(best, key=best.__getitem__)


def ratios(case: Case, runs: int) -> tuple[str, dict[str, list[float]]]:
    """The fastest peer, and for each figure the ratios of all runs."""
    torch.set_num_threads(1)
    sides = Sides(case)
    peer = fastest(sides)
    steps: dict[str, Callable[[], None]] = {
        "floor": sides.floor,
        "experts": partial(sides.run_experts, fusion=True),
        "experts_plain": partial(sides.run_experts, fusion=False),
        "peer": partial(sides.run_peer, peer),
        "layer": partial(sides.run_layer, fusion=True),
        "layer_plain": partial(sides.run_layer, fusion=False),
        "peer_layer": partial(sides.run_peer_layer, peer),
    }
    for step in steps.values():
        step()
    rounds = [{name: seconds(step) for name, step in steps.items()} for _ in range(runs)]
    return peer, {
        figure: [times[ours] / times[theirs] for times in rounds]
        for figure, (ours, theirs) in FIGURES.items()
    }


def measure(case: Case, runs: int, processes: int) -> list[dict[str, object]]:
    """The figures of a case, over the runs of several processes one after the other."""
    # Where its memory lies makes a process faster or slower by some percent as long as it lives.
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = [pool.submit(ratios, case, runs).result() for _ in range(processes)]
    peers = " or ".join(sorted({peer for peer, _ in found}))
    lines: list[dict[str, object]] = []
    for figure, (_, theirs) in FIGURES.items():
        pooled = sorted(ratio for _, by_figure in found for ratio in by_figure[figure])
        lines.append(
            {
                "figure": f"moe_{figure}_{case.name}",
                "value": round(statistics.median(pooled), 3),
                "unit": "x",
                "low": round(pooled[0], 3),
                "high": round(pooled[-1], 3),
                "n": len(pooled),
                "peer": theirs if theirs == "floor" else peers,
            }
        )
    return lines


def summary(precision: str, lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """Each figure's worst shape."""
    found = []
    for figure in FIGURES:
        named = {f"moe_{figure}_{case.name}" for case in cases()}
        values = sorted(float(str(line["value"])) for line in lines if line["figure"] in named)
        found.append(
            {
                "figure": f"moe_{figure}_{precision}",
                "value": values[-1],
                "unit": "x",
                "low": values[0],
                "high": values[-1],
                "n": len(values),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print JSON lines: the figures of each case, then the worst of each figure and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9, help="measured runs of each side")
    parser.add_argument("--processes", type=int, default=3, help="that measure so often")
    parser.add_argument("--case", choices=[case.name for case in cases()])
    arguments = parser.parse_args(argv)
    lines: dict[str, list[dict[str, object]]] = {}
    for case in cases():
        if arguments.case in (None, case.name):
            measured = measure(case, arguments.runs, arguments.processes)
            lines.setdefault(case.name.rpartition("_")[2], []).extend(measured)
            for line in measured:
                print(json.dumps(line), flush=True)
    for precision, found in lines.items() if arguments.case is None else ():
        for line in summary(precision, found):
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
