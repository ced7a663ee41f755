"""Allocation traces shaped like the training of a Mixture-of-Experts model, from a seed.

    python benchmarks/gpu_alloc_moe_trace.py trace.jsonl --seed 7 --steps 3

The generator follows one rank through whole training steps: weights, forward with what autograd
keeps, backward in reverse order, gradients, AdamW with fp32 master weights. What makes such traces
hard is
modelled: the number of tokens differs from step to step, and the rows that reach this rank's
experts differ from layer to layer, so sizes hardly ever repeat. Nothing is measured from a real
run.

Letters: T tokens of the step, R rows routed to this rank's experts, d hidden size, h expert hidden
size, E local experts, k experts per token, V vocabulary.
"""

import argparse
import random
from dataclasses import dataclass, field

from gpu_alloc import TraceEvent, save_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """One model as one rank holds it; `recompute` keeps only each layer's input for backward."""

    num_layers: int
    num_local_experts: int
    hidden_size: int = 2048
    expert_hidden_size: int = 768
    num_experts_per_tok: int = 4
    vocab_size: int = 32_000
    min_tokens: int = 3_000
    max_tokens: int = 6_000
    recompute: bool = False


@dataclass(slots=True)
class _Tape:
    """Collects events and knows the live blocks."""

    rng: random.Random
    events: list[TraceEvent] = field(default_factory=list)
    next_id: int = 0

    def alloc(self, *sizes: int) -> list[int]:
        ids = []
        for size in sizes:
            self.events.append(
                TraceEvent(action="alloc", block_id=self.next_id, size_bytes=int(size))
            )
            ids.append(self.next_id)
            self.next_id += 1
        return ids

    def free(self, ids: list[int]) -> None:
        self.events.extend(TraceEvent(action="free", block_id=i, size_bytes=0) for i in ids)
        ids.clear()

    def scratch(self, *sizes: int) -> None:
        self.free(self.alloc(*sizes))


def _layer_weights(shape: MoeShape) -> list[int]:
    """Number of elements of each parameter of a layer."""
    d, h, num_local = shape.hidden_size, shape.expert_hidden_size, shape.num_local_experts
    return [
        *(d, d * d, d * d // 4, d * d // 4, d * d, 128, 128, d, num_local * d),
        *(num_local * 2 * h * d, num_local * h * d),
    ]


def _routed_rows(shape: MoeShape, tokens: int, rng: random.Random) -> int:
    """Rows that reach this rank: what an uneven router would send, never beyond a factor of two."""
    return int(tokens * shape.num_experts_per_tok * min(2.0, rng.lognormvariate(0.0, 0.35)))


def _layer_forward(tape: _Tape, shape: MoeShape, tokens: int, rows: int) -> list[int]:
    """Blocks that backward needs, allocated in the order of the forward; the rest is freed here."""
    d, h = shape.hidden_size, shape.expert_hidden_size
    width = 2 * tokens * d
    kept = tape.alloc(width, 4 * tokens)  # norm output, its reciprocal deviation
    tape.scratch(4 * tokens * d)  # fp32 copy inside the norm
    kept += tape.alloc(width, width // 4, width // 4)  # q, k, v
    kept += tape.alloc(width, 4 * tokens * 16)  # attention output, log-sum-exp
    kept += tape.alloc(width, width, 4 * tokens)  # residual, second norm
    logits = tape.alloc(4 * tokens * shape.num_local_experts * 4)
    kept += tape.alloc(8 * tokens * shape.num_experts_per_tok, 4 * tokens * 4)  # top-k
    counts = tape.alloc(8 * shape.num_local_experts * 4, 8 * 4, 8 * 4)
    kept += tape.alloc(8 * rows)  # sort order
    send = tape.alloc(2 * tokens * shape.num_experts_per_tok * d)
    kept += tape.alloc(2 * rows * d)  # received rows
    tape.free(send)
    kept += tape.alloc(2 * rows * 2 * h, 2 * rows * h)  # gate_up, activation
    down = tape.alloc(2 * rows * d)
    back = tape.alloc(2 * tokens * shape.num_experts_per_tok * d)
    tape.free(down)
    kept += tape.alloc(width)  # combined output
    tape.free(back + counts + logits)
    return kept


def _layer_backward(
    tape: _Tape, shape: MoeShape, tokens: int, rows: int, kept: list[int]
) -> list[int]:
    """Backward of one layer: returns its weight gradients and frees `kept`."""
    d, h = shape.hidden_size, shape.expert_hidden_size
    gradients: list[int] = []
    grad_out = tape.alloc(2 * tokens * shape.num_experts_per_tok * d)
    grad_rows = tape.alloc(2 * rows * d)
    tape.free(grad_out)
    grad_act = tape.alloc(2 * rows * h)
    weights = _layer_weights(shape)
    gradients += tape.alloc(2 * weights[-1])
    tape.free(grad_rows)
    grad_gate_up = tape.alloc(2 * rows * 2 * h)
    tape.free(grad_act)
    grad_in = tape.alloc(2 * rows * d)
    gradients += tape.alloc(2 * weights[-2])
    tape.free(grad_gate_up)
    half = len(kept) // 2
    late = kept[half:]
    tape.free(late)
    grad_hidden = tape.alloc(2 * tokens * d)
    tape.free(grad_in)
    tape.scratch(4 * tokens * d, 4 * tokens)
    gradients += tape.alloc(*(2 * weight for weight in weights[:-2]))
    tape.scratch(2 * tokens * d, tokens * d // 2, tokens * d // 2)
    tape.free(grad_hidden)
    early = kept[:half]
    tape.free(early)
    kept.clear()
    return gradients


def _optimizer_step(tape: _Tape, shape: MoeShape, gradients: list[int]) -> None:
    tape.scratch(*(4 for _ in gradients), 4, 4)  # norms of the clipping
    for weight in _layer_weights(shape) * shape.num_layers:
        tape.scratch(4 * weight)  # fp32 gradient, one parameter at a time
    tape.free(gradients)


def moe_trace(shape: MoeShape, *, seed: int, steps: int) -> list[TraceEvent]:
    """`steps` training steps of a model of `shape`; equal arguments give equal traces."""
    tape = _Tape(random.Random(seed))
    d = shape.hidden_size
    for weight in _layer_weights(shape) * shape.num_layers + [d * shape.vocab_size]:
        tape.alloc(2 * weight)
    for step in range(steps):
        tokens = tape.rng.randrange(shape.min_tokens, shape.max_tokens)
        batch = tape.alloc(8 * tokens, 8 * tokens, 2 * tokens * d)
        layers: list[tuple[int, list[int]]] = []
        for _ in range(shape.num_layers):
            rows = _routed_rows(shape, tokens, tape.rng)
            kept = _layer_forward(tape, shape, tokens, rows)
            if shape.recompute:
                saved = kept[-1:]
                inner = kept[:-1]
                tape.free(inner)
                kept = saved
            layers.append((rows, kept))
        logits = tape.alloc(2 * tokens * shape.vocab_size)
        loss = tape.alloc(4, 4 * tokens)
        tape.scratch(4 * tokens * shape.vocab_size)
        grad_logits = tape.alloc(2 * tokens * shape.vocab_size)
        tape.free(logits)
        gradients = tape.alloc(2 * d * shape.vocab_size)
        tape.free(grad_logits)
        for rows, kept in reversed(layers):
            if shape.recompute:
                kept += _layer_forward(tape, shape, tokens, rows)
            gradients += _layer_backward(tape, shape, tokens, rows, kept)
        tape.free(loss + batch)
        if step == 0:
            for weight in _layer_weights(shape) * shape.num_layers:
                tape.alloc(4 * weight, 4 * weight, 4 * weight)  # master, first and second moment
        _optimizer_step(tape, shape, gradients)
    return tape.events


SHAPES = {
    "6 layers, 8 local experts": MoeShape(num_layers=6, num_local_experts=8),
    "8 layers, 4 local experts, recompute": MoeShape(
        num_layers=8, num_local_experts=4, recompute=True
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a MoE-like allocation trace.")
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    shape = list(SHAPES.values())[arguments.recompute]
    trace = moe_trace(shape, seed=arguments.seed, steps=arguments.steps)
    print(f"{save_trace(trace, arguments.path)} events -> {arguments.path}")


if __name__ == "__main__":
    main()
