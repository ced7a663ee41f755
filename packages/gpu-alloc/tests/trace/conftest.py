"""Small traces with the habits of MoE training: layers that keep, scratch, variable lengths."""

import random
from collections.abc import Callable

import pytest

from gpu_alloc import TraceEvent

KIB = 1 << 10


class _Tape:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self.number = 0

    def alloc(self, size: int, stream: int = 0) -> int:
        self.number += 1
        self.events.append(
            TraceEvent(
                action="alloc",
                block_id=self.number,
                size_bytes=size,
                stream=stream,
                note=f"model.py:{size % 97}",
            )
        )
        return self.number

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self.events.append(TraceEvent(action="free", block_id=block))


def _moe_trace(seed: int, *, steps: int = 3, streams: tuple[int, ...] = (0,)) -> list[TraceEvent]:
    """Weights, then steps of forward and backward whose routed rows have random sizes."""
    rng, tape = random.Random(seed), _Tape()
    layers = 5
    for _ in range(layers):
        tape.alloc(rng.randrange(200, 4000) * KIB)
    for step in range(steps):
        tape.events.append(TraceEvent(action="mark", note=f"step {step}"))
        tokens = rng.randrange(200, 900)
        kept: list[list[int]] = []
        for _ in range(layers):
            rows = int(tokens * rng.uniform(0.5, 2.5))
            kept.append([tape.alloc(n) for n in (tokens * KIB, rows * 4 * KIB, rows * 8)])
            send = tape.alloc(rows * 2 * KIB, stream=rng.choice(streams))
            tape.free(tape.alloc(tokens * 16), send)
        gradients = []
        for blocks in reversed(kept):
            scratch = tape.alloc(rng.randrange(1, 6) * tokens * KIB)
            gradients.append(tape.alloc(rng.randrange(200, 4000) * KIB))
            tape.free(scratch, *blocks)
        tape.free(*gradients)
    return tape.events


@pytest.fixture
def moe_trace() -> Callable[..., list[TraceEvent]]:
    """Makes a trace from a seed."""
    return _moe_trace
