"""Forward and backward of our MoE layer in bf16 on a GPU, against a peer and a dense MLP.

Three shapes of published models, cut to fit a card of 24 GB. All sides have the same weights,
routing, input and output gradient, and run in turn in one process; time is that between two events
on the device. Every side starts with no gradients, as after `zero_grad()`.

- dense: the six products of one MLP over as many rows as are routed, so the same FLOPs in GEMMs of
  the best size: what no grouped product can beat.
- peer: transformers' Qwen3-MoE block with `grouped_mm`; where transformers is not installed, its
  recipe written with torch: sort, two `grouped_mm`, weighted sum.
- experts: from tokens and their routing to tokens; layer: with the router, ours with its auxiliary
  loss.

    python benchmarks/moe_pipeline_gpu.py
    python benchmarks/moe_pipeline_gpu.py --device cpu --shrink 32 --runs 3   # does it run at all?
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline.config import MoEConfig
from moe_pipeline.layer import MoELayer

DTYPE = torch.bfloat16
FIGURES = {
    "experts_over_dense": ("experts", "dense"),
    "experts": ("experts", "peer_experts"),
    "layer": ("layer", "peer_layer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape: tokens, experts, choices, widths."""

    name: str
    tokens: int
    experts: int
    choices: int
    hidden: int
    intermediate: int


def cases(shrink: int) -> list[Case]:
    """Mixtral, DeepSeek-V2-Lite and Qwen3-30B-A3B; tokens and widths divided by `shrink`."""
    shapes = {
        "e8k2": (8192, 8, 2, 2048, 7168),
        "e64k6": (8192, 64, 6, 2048, 1408),
        "e128k8": (8192, 128, 8, 2048, 768),
    }
    return [
        Case(
            name=name,
            tokens=tokens // shrink,
            experts=experts,
            choices=choices,
            hidden=hidden // shrink,
            intermediate=max(16, intermediate // shrink // 16 * 16),
        )
        for name, (tokens, experts, choices, hidden, intermediate) in shapes.items()
    ]


class Plain(nn.Module):
    """transformers' recipe in torch alone, with the names of its block."""

    told = "sort + grouped_mm"

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.choices = case.choices
        self.gate = nn.Linear(case.hidden, case.experts, bias=False)
        self.experts = nn.Module()
        shape = (case.experts, 2 * case.intermediate, case.hidden)
        self.experts.gate_up_proj = nn.Parameter(torch.empty(shape))
        shape = (case.experts, case.hidden, case.intermediate)
        self.experts.down_proj = nn.Parameter(torch.empty(shape))

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token."""
        probs_TE = F.linear(x_TD, self.gate.weight).float().softmax(dim=-1)
        weights_TK, idx_TK = probs_TE.topk(self.choices)
        return (weights_TK / weights_TK.sum(-1, keepdim=True)).to(x_TD.dtype), idx_TK

    def run(self, x_TD: Tensor, idx_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts."""
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        order = torch.argsort(idx_TK.flatten())
        tokens = order // idx_TK.shape[1]
        counts = torch.histc(idx_TK.float(), bins=len(down), min=0, max=len(down) - 1)
        offsets = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x_TD[tokens], gate_up.mT, offs=offsets).chunk(2, dim=1)
        y = F.grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
        y = y * weights_TK.flatten()[order].unsqueeze(1)
        inverse = torch.argsort(order)
        return y[inverse].view(*idx_TK.shape, -1).sum(dim=1)


class Theirs(nn.Module):
    """transformers' block, asked for `grouped_mm`."""

    told = "transformers"

    def __init__(self, case: Case) -> None:
        super().__init__()
        # Not at the top: the machine may lack transformers.
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe import modeling_qwen3_moe

        config = Qwen3MoeConfig(
            hidden_size=case.hidden,
            moe_intermediate_size=case.intermediate,
            num_experts=case.experts,
            num_experts_per_tok=case.choices,
            norm_topk_prob=True,
        )
        config._experts_implementation = "grouped_mm"
        block: Any = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
        self.gate, self.experts = block.gate, block.experts

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token."""
        _, weights_TK, idx_TK = self.gate(x_TD)
        return weights_TK, idx_TK

    def run(self, x_TD: Tensor, idx_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts."""
        out: Tensor = self.experts(x_TD, idx_TK, weights_TK)
        return out


class Sides:
    """One step of each side."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.peer = Theirs(case) if find_spec("transformers") else Plain(case)
        self.peer.to(device=device, dtype=DTYPE)
        for parameter in self.peer.parameters():
            nn.init.normal_(parameter, std=0.02)
        config = MoEConfig(
            hidden_size=case.hidden,
            moe_intermediate_size=case.intermediate,
            num_experts=case.experts,
            num_experts_per_tok=case.choices,
        )
        self.layer = MoELayer(config, device=device, dtype=DTYPE)
        self.layer.load_state_dict(self.peer.state_dict())
        self.x = torch.randn(case.tokens, case.hidden, device=device, dtype=DTYPE).requires_grad_()
        self.gradient = torch.randn_like(self.x)
        with torch.no_grad():
            weights, self.idx = self.peer.route(self.x)
        self.weights = weights.requires_grad_()
        rows = case.tokens * case.choices
        widths = {"x": case.hidden, "pre": 2 * case.intermediate, "act": case.intermediate}
        made = {n: torch.randn(rows, w, device=device, dtype=DTYPE) for n, w in widths.items()}
        self.rows = {**made, "y": torch.randn_like(made["x"])}
        self.gate_up, self.down = (w.detach()[0] for w in self.layer.experts.parameters())

    def dense(self) -> None:
        """The products of one MLP; the six results are dropped."""
        x, pre, act, y = (self.rows[name] for name in ("x", "pre", "act", "y"))
        for left, right in (
            (x, self.gate_up.t()),
            (act, self.down.t()),
            (y, self.down),
            (y.t(), act),
            (pre.t(), x),
            (pre, self.gate_up),
        ):
            torch.mm(left, right)

    def experts(self) -> None:
        """Ours, from tokens and routing."""
        out = self.layer.experts.forward_tokens(self.x, self.idx, self.weights)
        self._backward(out, self.layer)

    def peer_experts(self) -> None:
        """The peer's, from tokens and routing."""
        self._backward(self.peer.run(self.x, self.idx, self.weights), self.peer)

    def run_layer(self) -> None:
        """Ours with its router and auxiliary loss."""
        out = self.layer(self.x)
        torch.autograd.backward([out.hidden, out.aux_loss], [self.gradient, None])
        self._forget(self.layer)

    def peer_layer(self) -> None:
        """The peer's with its router."""
        weights, idx = self.peer.route(self.x)
        self._backward(self.peer.run(self.x, idx, weights), self.peer)

    def _backward(self, out: Tensor, module: nn.Module) -> None:
        out.backward(self.gradient)
        self._forget(module)

    def _forget(self, module: nn.Module) -> None:
        module.zero_grad()
        self.x.grad = self.weights.grad = None


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Of one step: between two events on a GPU, else passed."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize(device)
    events[0].record()
    step()
    events[1].record()
    torch.cuda.synchronize(device)
    return events[0].elapsed_time(events[1]) / 1000


def measure(case: Case, device: torch.device, runs: int) -> list[dict[str, object]]:
    """A line for each figure: the median ratio of all rounds, and the extremes."""
    sides = Sides(case, device)
    steps: dict[str, Callable[[], None]] = {
        "dense": sides.dense,
        "experts": sides.experts,
        "peer_experts": sides.peer_experts,
        "layer": sides.run_layer,
        "peer_layer": sides.peer_layer,
    }
    for _ in range(3):  # the allocator and the kernels' choice settle
        for step in steps.values():
            step()
    rounds = [{name: seconds(step, device) for name, step in steps.items()} for _ in range(runs)]
    lines: list[dict[str, object]] = []
    for figure, (ours, theirs) in FIGURES.items():
        ratios = sorted(times[ours] / times[theirs] for times in rounds)
        lines.append(
            {
                "figure": f"moe_gpu_{figure}_{case.name}",
                "value": round(statistics.median(ratios), 3),
                "unit": "x",
                "low": round(ratios[0], 3),
                "high": round(ratios[-1], 3),
                "n": runs,
                "peer": "dense" if theirs == "dense" else sides.peer.told,
            }
        )
    return lines


def worst(lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Each figure over all shapes; the value is the worst."""
    found: list[dict[str, object]] = []
    for figure in FIGURES:
        name = f"moe_gpu_{figure}"
        values = [
            float(str(line["value"]))
            for line in lines
            if str(line["figure"]).rpartition("_")[0] == name
        ]
        ends = {"low": min(values), "high": max(values)}
        found.append({"figure": name, "value": max(values), "unit": "x", **ends, "n": len(values)})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print JSON lines: the figures of each shape, then the worst of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=21, help="measured runs of each side")
    parser.add_argument("--shrink", type=int, default=1, help="divides tokens and widths")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --shrink 32 shows that it runs")
    lines = []
    for case in cases(arguments.shrink):
        for line in measure(case, device, arguments.runs):
            lines.append(line)
            print(json.dumps(line), flush=True)
    for line in worst(lines):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
