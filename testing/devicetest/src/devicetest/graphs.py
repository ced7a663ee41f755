"""CUDA graphs of the fake devices: what a captured program did is done again, without the program.

A capture does the operations once, as torch's warm-up would, and keeps them; a replay does them
again on the same memory. What would end a capture raises: the host waits for a device, or is read.

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(3)
    graph.replay()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from devicetest.machine import Machine


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        """Do again what was captured; nothing of the host is in it."""
        for step in self.steps:
            step()

    def reset(self) -> None:
        """Forget what was captured."""
        self.steps.clear()


def graph_block(machine: Machine) -> Callable[..., Any]:
    """Return what stands for `torch.cuda.graph`."""

    @contextmanager
    def block(graph: Graph, *_: Any, stream: Any = None, **__: Any) -> Iterator[None]:
        side = stream or machine.stream()
        side.wait_stream(machine.current_stream())
        with side, machine.capture(graph.steps):
            yield
        machine.current_stream().wait_stream(side)

    return block
