"""Chunked cross entropy against the ways to get the same numbers, on one CPU thread.

Forward and backward of head and loss, with the same hidden states, head and labels:

- `torch`: `F.linear`, `.float()`, `F.cross_entropy`;
- `head_loss`: `moe_train.model.loss.head_loss`, which holds the logits once;
- `linear`: `F.linear_cross_entropy`, where this torch has it.

All run in turn in one process. Time is the CPU time of the process, as a median of ratios (ours /
theirs). Memory is the peak of what torch's allocator held for the step, from its own events, as a
ratio too; the gradients, which everyone must return, are part of it.

    python benchmarks/moe_pipeline_cross_entropy.py
    python benchmarks/moe_pipeline_cross_entropy.py --runs 15 --case v32k_fp32
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from moe_pipeline.ops import chunked_cross_entropy
from moe_train.model.loss import head_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes and dtype."""

    name: str
    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype


def cases() -> list[Case]:
    """Vocabularies of 32 and 128 thousand, in fp32 and bf16."""
    shapes = {"v32k": (1024, 512, 32_000), "v128k": (1024, 256, 128_000)}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return [
        Case(
            name=f"{shape}_{precision}",
            tokens=sizes[0],
            hidden=sizes[1],
            vocabulary=sizes[2],
            dtype=dtype,
        )
        for precision, dtype in dtypes.items()
        for shape, sizes in shapes.items()
    ]


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What most programs do."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def linear_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """torch's own function for both at once."""
    loss: torch.Tensor = F.linear_cross_entropy(hidden, weight, labels, reduction="sum")
    return loss


def peers() -> dict[str, Loss]:
    """By name."""
    found: dict[str, Loss] = {"torch": torch_loss, "head_loss": head_loss}
    if hasattr(F, "linear_cross_entropy"):
        found["linear"] = linear_loss
    return found


class Step:
    """One forward and backward of any of them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        shape = (case.tokens, case.hidden)
        self.hidden = torch.randn(shape, dtype=case.dtype, requires_grad=True)
        weight = torch.randn(case.vocabulary, case.hidden) * case.hidden**-0.5
        self.weight = weight.to(case.dtype).requires_grad_()
        self.labels = torch.randint(0, case.vocabulary, (case.tokens,))
        self.labels[:: case.tokens // 8] = -100

    def run(self, loss: Loss) -> None:
        """Forward, backward, and the gradients forgotten."""
        loss(self.hidden, self.weight, self.labels).backward()
        self.hidden.grad = self.weight.grad = None

    def seconds(self, loss: Loss) -> float:
        """CPU time."""
        start = time.process_time()
        self.run(loss)
        return time.process_time() - start

    def peak_bytes(self, loss: Loss) -> int:
        """The most that the allocator held at one time for the step."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.run(loss)
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        return max(itertools.accumulate(nbytes for _, nbytes in changes))


def measure(case: Case, runs: int) -> list[dict[str, object]]:
    """One line of time and one of memory for each peer."""
    step = Step(case)
    ratios: dict[str, list[float]] = {name: [] for name in peers()}
    for run in range(runs + 1):
        ours_s = step.seconds(chunked_cross_entropy)
        for name, loss in peers().items():
            ratio = ours_s / step.seconds(loss)
            if run:
                ratios[name].append(ratio)
    ours_bytes = step.peak_bytes(chunked_cross_entropy)
    lines = []
    for name, loss in peers().items():
        times = sorted(ratios[name])
        lines.append(line(f"cross_entropy_time_{case.name}_{name}", times))
        memory = line(
            f"cross_entropy_memory_{case.name}_{name}", [ours_bytes / step.peak_bytes(loss)]
        )
        lines.append({**memory, "ours_mib": round(ours_bytes / 2**20, 1)})
    return lines


def line(figure: str, values: Sequence[float]) -> dict[str, object]:
    """Median, least and greatest of ratios."""
    return {
        "figure": figure,
        "value": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
        "unit": "x",
        "n": len(values),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a JSON line for each figure, then the worst of each kind against each peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7, help="measured runs of each")
    parser.add_argument("--case", choices=[case.name for case in cases()])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    worst: dict[str, list[float]] = {}
    for case in cases():
        if arguments.case not in (None, case.name):
            continue
        for measured in measure(case, arguments.runs):
            print(json.dumps(measured), flush=True)
            figure = str(measured["figure"]).replace(f"_{case.name}_", "_")
            worst.setdefault(figure, []).append(float(str(measured["value"])))
    for figure, values in worst.items():
        print(json.dumps({**line(figure, values), "value": max(values)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
