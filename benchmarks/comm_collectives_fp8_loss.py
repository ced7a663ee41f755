"""Training loss with block-scaled rows in dispatch, against the same training with bfloat16 rows.

Two gloo ranks train a model that predicts a byte of Python's own documentation from the 8 before
it: 3 MoE layers of 8 experts, top 2, hidden size 256 (two blocks a row), which hold all of the
model that is not linear. 300 steps of 1,024 bytes, with a rate that falls to 0. Every run has the
same initial weights and batches; only the payload of dispatch differs. The loss is the mean over
the last 60 steps. The control is the bfloat16 run once more with initial weights that differ by one
part in a million: how far two equally good runs lie apart.

    python benchmarks/comm_collectives_fp8_loss.py
"""

import json
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import comm_collectives as cc
from comm_collectives.moe import MoeOptions
from comm_collectives.moe.rows import Payload
from ranktest import run_ranks

RANKS, HIDDEN, LAYERS, EXPERTS, CHOICES, WIDTH = 2, 256, 3, 8, 2, 256
CONTEXT, SAMPLES, STEPS, WARMUP, LAST = 8, 512, 300, 30, 60  # samples: on each rank
LEARNING_RATE, BALANCE = 2e-3, 0.01


class Experts(nn.Module):
    """The MoE layer: this rank's experts, between dispatch and combine."""

    def __init__(self, payload: Payload) -> None:
        super().__init__()
        self.payload = payload
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        every = torch.randn(2, EXPERTS, HIDDEN, WIDTH) * 0.04  # all, so that ranks agree
        mine = slice(dist.get_rank() * EXPERTS // RANKS, (dist.get_rank() + 1) * EXPERTS // RANKS)
        self.rise = nn.Parameter(every[0, mine].clone())
        self.fall = nn.Parameter(every[1, mine].transpose(1, 2).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output and its load-balancing loss."""
        probability = self.router(x).softmax(-1)
        weights, idx = probability.topk(CHOICES, dim=-1)
        share = torch.bincount(idx.flatten(), minlength=EXPERTS) / idx.numel()
        balance = EXPERTS * (share * probability.mean(0)).sum()
        sent = cc.dispatch(
            x.bfloat16(),
            idx,
            weights / weights.sum(-1, keepdim=True),
            num_experts=EXPERTS,
            group=dist.group.WORLD,
            options=MoeOptions(payload=self.payload),
        )
        rows = sent.x.float().split(list(sent.num_tokens_per_expert))
        y = torch.cat([F.silu(r @ self.rise[e]) @ self.fall[e] for e, r in enumerate(rows)])
        out = cc.combine((y * sent.topk_weights[:, None]).bfloat16(), sent.handle)
        return out.float(), balance


class Model(nn.Module):
    """The last bytes in, logits of the next byte out; all that is not linear is in the experts."""

    def __init__(self, payload: Payload) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, HIDDEN // CONTEXT)
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(LAYERS + 1)])
        self.layers = nn.ModuleList([Experts(payload) for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, 128, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the sum of the balance losses."""
        x, total = self.embed(tokens).flatten(1), torch.zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=False):
            y, balance = layer(norm(x))
            x, total = x + y, total + balance
        return self.head(self.norms[-1](x)), total


def train(payload: Payload, text: Tensor, disturbance: float = 0.0) -> float:
    """Train once and return the mean loss of the last steps over both ranks."""
    torch.manual_seed(0)
    model = Model(payload)
    batches = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + disturbance)
    names = dict(model.named_parameters())
    shared = [p for n, p in names.items() if not n.endswith(("rise", "fall"))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        warm = min(1.0, (step + 1) / WARMUP)
        decay = 1.0 - max(0, step - STEPS // 2) / (STEPS // 2)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm * decay
        starts = torch.randint(len(text) - CONTEXT, (RANKS, SAMPLES, 1), generator=batches)
        piece = text[starts[dist.get_rank()] + torch.arange(CONTEXT + 1)]
        logits, balance = model(piece[:, :-1])
        loss = F.cross_entropy(logits, piece[:, -1])
        optimizer.zero_grad()
        ((loss + BALANCE * balance) / RANKS).backward()
        for gradient in [p.grad for p in shared if p.grad is not None]:
            dist.all_reduce(gradient)
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(last)
    return float(last) / RANKS


def rank_main(rank: int, world_size: int) -> dict[str, float]:
    """Train with every payload on one rank."""
    torch.set_num_threads(1)
    raw = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    text = torch.tensor(list(raw))
    return {
        "bf16": train("full", text),
        "fp8": train("float8_e4m3", text),
        "control": train("full", text, disturbance=1e-6),
    }


def main() -> None:
    losses: Any = run_ranks(rank_main, RANKS, timeout_s=900)[0]
    print(" ".join(f"{name} {loss:.4f}" for name, loss in losses.items()), "nats a byte")
    for name, figure in (("fp8", "fp8_loss_vs_bf16"), ("control", "fp8_loss_control")):
        off = round(abs(losses[name] / losses["bf16"] - 1), 5)
        line = {"figure": figure, "value": off, "low": off, "high": off, "unit": "of 1", "n": 1}
        print(json.dumps(line))


if __name__ == "__main__":
    main()
