"""Pipeline schedules as data: what each rank does, in order.

A schedule is a table, so it can be printed, compared, checked and then executed by something that
knows nothing about the policy. The text of an action follows torch's grammar
(`torch.distributed.pipelining`): stage, kind, microbatch.

    2F0        stage 2 runs forward on microbatch 0
    1B3        stage 1 runs backward on microbatch 3
    0SEND_F1   stage 0 sends the outputs of microbatch 1 to stage 1
    1RECV_F1   stage 1 receives them
    1SEND_B1   stage 1 sends their gradients to stage 0
    0RECV_B1   stage 0 receives them

    assert str(Action.parse("2F0")) == "2F0"
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from moe_pipeline.errors import ScheduleError


class Kind(StrEnum):
    """What an action does; the values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
_KINDS = {kind.value: kind for kind in Kind}
_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing that one stage does with one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Action":
        """Read the text of an action.

        Raises:
            ScheduleError: not an action in the grammar, or of a kind that is not known here.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in _KINDS:
            kinds = ", ".join(_KINDS)
            raise ScheduleError(
                f"{text!r} is not an action; expected <stage><kind><microbatch> such as 2F0, "
                f"with a kind of {kinds}"
            )
        return Action(int(match[1]), _KINDS[match[2]], int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every rank, in the order in which the rank performs them.

    Attributes:
        name: for messages and pictures.
        num_stages: stages of the model, numbered from 0.
        num_microbatches: microbatches of a step, numbered from 0.
        ranks: for each rank its actions.
        has_backward: whether each forward is to be followed by a backward.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    has_backward: bool = True

    def stage_ranks(self) -> dict[int, int]:
        """Which rank each stage lies on: the first rank that computes it."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind in COMPUTE:
                    found.setdefault(action.stage, rank)
        return found


def add_transfers(schedule: Schedule) -> Schedule:
    """Insert the sends and receives that a compute-only schedule implies.

    A send follows the computation that makes the tensors at once; a receive stands directly before
    the computation that needs them. Neighbouring stages on one rank exchange nothing.

    Raises:
        ScheduleError: the schedule has transfers already.
    """
    if any(action.kind not in COMPUTE for actions in schedule.ranks for action in actions):
        raise ScheduleError(f"schedule {schedule.name} has sends or receives already")
    places = schedule.stage_ranks()
    ranks = tuple(
        tuple(part for action in actions for part in _surround(action, places))
        for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


def _surround(action: Action, places: dict[int, int]) -> Iterable[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        source, target = stage - 1, stage + 1
        recv, send = Kind.RECV_FORWARD, Kind.SEND_FORWARD
    else:
        source, target = stage + 1, stage - 1
        recv, send = Kind.RECV_BACKWARD, Kind.SEND_BACKWARD
    here = places[stage]
    if places.get(source, here) != here:
        yield Action(stage, recv, microbatch)
    yield action
    if places.get(target, here) != here:
        yield Action(stage, send, microbatch)
