"""A list scheduler under a memory cap: each rank always does the best thing that it can do now.

What is best, and how many microbatches a stage may have in flight, is a `Policy`; the planner
searches among policies. Stages lie in a V (`folded_rank`), two on each rank. No policy can lock
itself up by memory (`_fits`).

    assert run_policy(task, policy).makespan_s > 0
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from moe_pipeline.schedules.generators.building_block import PERIOD
from moe_pipeline.schedules.generators.rows import folded_rank
from moe_pipeline.schedules.table import Action, Kind, StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be planned.

    Attributes:
        num_ranks: p; there are 2 p stages.
        num_microbatches: m.
        costs: of each stage.
        memory_cap_bytes: for the activations of each rank.
    """

    num_ranks: int
    num_microbatches: int
    costs: Sequence[StageCosts]
    memory_cap_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a rank prefers. Times are slots, of which a microbatch takes six on each rank.

    Attributes:
        forward_at: of each stage, the slot of the first microbatch's F: the earlier, the better.
        gradient_at: of each stage, that of its I.
        in_flight: of each stage, the most microbatches between F and I.
        weight_delay: slots that W gives way to F and I after its own I.
        nudges: single computations that are wanted that many slots later.
    """

    forward_at: tuple[int, ...]
    gradient_at: tuple[int, ...]
    in_flight: tuple[int, ...]
    weight_delay: int
    nudges: Mapping[Action, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """A plan: its makespan and the computations of each rank."""

    makespan_s: float
    rows: list[list[Action]]


def run_policy(task: Task, policy: Policy) -> Found | None:
    """The plan that `policy` leads to, None if it blocks itself."""
    return _PolicyRun(task, policy).run()


_NEVER = 1 << 40


@final
class _PolicyRun:
    def __init__(self, task: Task, policy: Policy) -> None:
        p, m = task.num_ranks, task.num_microbatches
        self._task, self._policy, self._costs = task, policy, task.costs
        self._last = 2 * p - 1
        self._rank_of = [folded_rank(stage, p) for stage in range(2 * p)]
        self._arrived_f, self._arrived_i = [0] * (2 * p), [0] * (2 * p)
        self._arrived_f[0] = m
        self._done_f, self._done_i = [0] * (2 * p), [0] * (2 * p)
        self._weights: list[deque[tuple[int, int, int]]] = [deque() for _ in range(p)]
        self._held = [0] * p
        # (time, number, rank that gets free or -1, action that ended or arrives)
        self._events: list[tuple[float, int, int, Action]] = []
        self._rows: list[list[Action]] = [[] for _ in range(p)]

    def run(self) -> Found | None:
        now, idle = 0.0, set(range(self._task.num_ranks))
        while True:
            for rank in sorted(idle):
                action = self._choose(rank)
                if action is not None:
                    idle.discard(rank)
                    self._start(rank, action, now)
            if not self._events:
                break
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                _, _, rank, action = heapq.heappop(self._events)
                if rank >= 0:
                    idle.add(rank)
                    self._end(rank, action, now)
                else:
                    self._arrive(action)
        if sum(map(len, self._rows)) < 6 * self._task.num_ranks * self._task.num_microbatches:
            return None
        return Found(now, self._rows)

    def _choose(self, rank: int) -> Action | None:
        """The allowed computation with the earliest slot."""
        best: tuple[int, int, Kind, int] | None = None
        policy, blocked = self._policy, _NEVER
        for stage in (self._last - rank, rank):
            m = self._done_i[stage]
            if m < self._arrived_i[stage]:
                slot = policy.gradient_at[stage] + PERIOD * m
                slot += self._nudge(stage, Kind.INPUT_GRADIENT, m)
                if best is None or slot < best[0]:
                    best = (slot, stage, Kind.INPUT_GRADIENT, m)
            m = self._done_f[stage]
            if m < self._arrived_f[stage] and m - self._done_i[stage] < policy.in_flight[stage]:
                slot = policy.forward_at[stage] + PERIOD * m
                slot += self._nudge(stage, Kind.FORWARD, m)
                if not self._fits(rank, stage):
                    blocked = min(blocked, slot)
                elif best is None or slot < best[0]:
                    best = (slot, stage, Kind.FORWARD, m)
        weights = self._weights[rank]
        # W makes room: it is as urgent as the F that waits for room.
        if weights and (
            best is None or min(weights[0][0] + policy.weight_delay, blocked) < best[0]
        ):
            _, stage, m = weights.popleft()
            return Action(stage, Kind.WEIGHT_GRADIENT, m)
        return None if best is None else Action(*best[1:])

    def _nudge(self, stage: int, kind: Kind, microbatch: int) -> int:
        nudges = self._policy.nudges
        return nudges.get(Action(stage, kind, microbatch), 0) if nudges else 0

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether an F of `stage` may start: now, and without blocking others for ever.

        Microbatches that have passed both stages end without further memory. When they have, there
        must be room for the later stage beside those that have passed only the earlier one: then
        the oldest microbatch can always go on.
        """
        cap, need = self._task.memory_cap_bytes, self._costs[stage].activation_bytes
        if self._held[rank] + need > cap:
            return False
        if stage != rank:
            return True
        later = self._last - rank
        between = self._done_f[stage] + 1 - self._done_f[later]
        return between * need + self._costs[later].activation_bytes <= cap

    def _start(self, rank: int, action: Action, now: float) -> None:
        costs = self._costs[action.stage]
        duration = costs.weight_gradient_s
        if action.kind is Kind.FORWARD:
            duration = costs.forward_s
            self._done_f[action.stage] += 1
            self._held[rank] += costs.activation_bytes
        elif action.kind is Kind.INPUT_GRADIENT:
            duration = costs.input_gradient_s
            self._done_i[action.stage] += 1
        self._rows[rank].append(action)
        self._push(now + duration, rank, action)

    def _end(self, rank: int, action: Action, now: float) -> None:
        costs, stage = self._costs[action.stage], action.stage
        if action.kind is Kind.WEIGHT_GRADIENT:
            self._held[rank] -= costs.left_for_weights
            return
        if action.kind is Kind.FORWARD:
            travel = costs.forward_transfer_s
            target = stage + 1
            if stage == self._last:
                self._arrived_i[stage] += 1
        else:
            self._held[rank] -= costs.activation_bytes - costs.left_for_weights
            slot = self._policy.gradient_at[stage] + PERIOD * action.microbatch
            self._weights[rank].append((slot, stage, action.microbatch))
            travel = costs.backward_transfer_s
            target = stage - 1
        if not 0 <= target <= self._last:
            return
        if travel and self._rank_of[target] != rank:
            self._push(now + travel, -1, action)
        else:
            self._arrive(action)

    def _arrive(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._arrived_f[action.stage + 1] += 1
        else:
            self._arrived_i[action.stage - 1] += 1

    def _push(self, time: float, rank: int, action: Action) -> None:
        # Everything that happens at one moment happens before anything is chosen at it.
        heapq.heappush(self._events, (time, len(self._events), rank, action))
