"""The edges of one rank of a schedule whose neighbours do not exist, to learn what it allocates.

Invariant: sends are held and messages come as long and as early as with `GroupEdges`; the content
of what comes is not set.

    edges = AloneEdges(plan, lambda: (torch.empty(2, 64, 512, requires_grad=True), positions))
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, final

import torch

from moe_pipeline.executor.edges import MAX_SENDS_UNDER_WAY
from moe_pipeline.executor.execution_plan import Edge, ExecutionPlan
from moe_pipeline.executor.stage_message import StageMessage, activations, gradients
from moe_pipeline.schedules.table import Action, Kind

Passed = Callable[[], tuple[Any, ...]]


@final
class AloneEdges:
    """See the module's docstring; `passed` makes what a stage gives the next one."""

    def __init__(self, plan: ExecutionPlan, passed: Passed) -> None:
        self._plan, self._passed = plan, passed
        self._under_way: dict[Edge, deque[StageMessage]] = {}
        self._sent: Counter[Edge] = Counter()
        self._arrived: dict[Action, StageMessage] = {}
        self._posted: dict[Edge, Action] = {}  # the last receive of each that is not read

    def begin(self) -> None:
        """Forget the step before."""
        self._under_way = {edge: deque() for edge in self._plan.targets}
        self._sent.clear()
        self._arrived.clear()
        self._posted.clear()

    def ready(self, action: Action) -> bool:
        """Nothing else is to be done meanwhile."""
        return True

    def send(self, action: Action, message: StageMessage) -> None:
        """Hold the message until its receiver must have it."""
        edge = self._plan.edges[action]
        self._under_way[edge].append(message)
        self._sent[edge] += 1
        self._settle(edge, MAX_SENDS_UNDER_WAY)

    def post(self, action: Action) -> None:
        """The message comes; the one before on this edge is read."""
        edge = self._plan.edges[action]
        before = self._posted.get(edge)
        if before is not None:
            self._read(before)
        self._posted[edge] = action

    def receive(self, action: Action) -> StageMessage:
        """Take it, and let go what the peer must have received before it sent this."""
        self._read(action)
        for ours, count in self._plan.delivered[action].items():
            self._settle(ours, self._sent[ours] - count)
        return self._arrived.pop(action)

    def _read(self, action: Action) -> None:
        edge = self._plan.edges[action]
        if self._posted.get(edge) == action:
            del self._posted[edge]
        if action in self._arrived:
            return
        message, wanting = activations(self._passed())
        if action.kind is Kind.RECV_BACKWARD:
            message = gradients([torch.empty_like(tensor) for tensor in wanting])
        self._arrived[action] = message

    def settle(self) -> None:
        """All sends have ended."""
        self._under_way.clear()

    def give_up(self, cause: str, *, observed: bool) -> str:
        """Nobody has to be told."""
        return cause

    def name(self, rank: int) -> str:
        """The rank of the schedule."""
        return f"rank {rank}"

    def _settle(self, edge: Edge, most: int) -> None:
        held = self._under_way[edge]
        while len(held) > most:
            held.popleft()
