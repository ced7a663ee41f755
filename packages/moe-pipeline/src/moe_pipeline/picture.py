"""A schedule as the picture of the papers.

    print(format_schedule(one_f_one_b(4, 8)))

The picture places each computation in the earliest time slot that its rank and its inputs allow,
forward one slot, backward two, transfers none.
"""

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedule import COMPUTE, Action, Kind, Schedule

_SLOTS = {Kind.FORWARD: 1, Kind.BACKWARD: 2}


def format_schedule(schedule: Schedule) -> str:
    """One line per rank, time to the right; `F3` forward of microbatch 3, `B3` backward.

    With several stages on a rank the stage stands before: `2F3`. A dot is an idle slot.

    Raises:
        ScheduleError: a computation whose inputs are never made, so that it has no place in time.
    """
    starts, length = _place_in_time(schedule)
    several = any(len({a.stage for a in actions}) > 1 for actions in schedule.ranks)
    labels = {a: str(a) if several else str(a)[len(str(a.stage)) :] for a in starts}
    width = max((len(label) for label in labels.values()), default=1) + 1
    busy = 0
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        cells = ["."] * length
        for action in actions:
            if action.kind in COMPUTE:
                busy += _SLOTS[action.kind]
                cells[starts[action]] = labels[action]
                for slot in range(starts[action] + 1, starts[action] + _SLOTS[action.kind]):
                    cells[slot] = "-"
        lines.append(f"rank {rank} |" + "".join(f"{cell:>{width}}" for cell in cells).rstrip())
    total = length * len(schedule.ranks)
    head = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, "
        f"{length} slots (F 1, B 2), idle {100 * (total - busy) / max(total, 1):.1f} %"
    )
    return "\n".join([head, *lines])


def _place_in_time(schedule: Schedule) -> tuple[dict[Action, int], int]:
    rows = [[a for a in actions if a.kind in COMPUTE] for actions in schedule.ranks]
    starts: dict[Action, int] = {}
    free_at = [0] * len(rows)
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                before = _inputs(action, schedule)
                if any(other not in starts for other in before):
                    break
                ready = [starts[other] + _SLOTS[other.kind] for other in before]
                starts[action] = max([free_at[rank], *ready])
                free_at[rank] = starts[action] + _SLOTS[action.kind]
                at[rank] += 1
                moved = True
    stuck = [row[i] for row, i in zip(rows, at, strict=True) if i < len(row)]
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name} cannot be drawn: {', '.join(map(str, stuck))} wait for ever"
        )
    return starts, max(free_at, default=0)


def _inputs(action: Action, schedule: Schedule) -> list[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return [Action(stage - 1, Kind.FORWARD, microbatch)] if stage > 0 else []
    before = [Action(stage, Kind.FORWARD, microbatch)]
    if stage < schedule.num_stages - 1:
        before.append(Action(stage + 1, Kind.BACKWARD, microbatch))
    return before
