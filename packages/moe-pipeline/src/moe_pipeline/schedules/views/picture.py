"""A schedule as the picture of the papers.

    print(format_schedule(one_f_one_b(4, 8)))

The picture places each computation in the earliest time slot that its rank and its inputs allow:
forward, I and W one slot, a whole backward two, transfers none (`simulate` with its default costs).
"""

from moe_pipeline.schedules.table import Kind, Schedule, Simulation, simulate


def format_schedule(schedule: Schedule) -> str:
    """One line per rank, time to the right; `F3` forward of microbatch 3, `B3` its backward.

    With several stages on a rank the stage stands before: `2F3`. A dot is an idle slot.

    Raises:
        ScheduleError: a computation whose inputs are never made, so that it has no place in time.
    """
    found = simulate(schedule)
    several = any(len({span.action.stage for span in row}) > 1 for row in found.spans)
    rows = [_cells(found, rank, several) for rank in range(len(schedule.ranks))]
    width = max((len(cell) for row in rows for cell in row), default=1) + 1
    lines = [
        f"rank {rank} |" + "".join(f"{cell:>{width}}" for cell in row).rstrip()
        for rank, row in enumerate(rows)
    ]
    return "\n".join([_head(schedule, found), *lines])


def _cells(found: Simulation, rank: int, several: bool) -> list[str]:
    cells = ["."] * int(found.makespan_s)
    for span in found.spans[rank]:
        action = span.action
        label = str(action) if several else f"{action.kind.value}{action.microbatch}"
        start, end = int(span.start_s), int(span.end_s)
        cells[start:end] = [label, *["-"] * (end - start - 1)]
    return cells


def _head(schedule: Schedule, found: Simulation) -> str:
    kinds = {span.action.kind for row in found.spans for span in row}
    sizes = {Kind.FORWARD: "F 1", Kind.BACKWARD: "B 2"}
    if Kind.INPUT_GRADIENT in kinds:
        sizes |= {Kind.INPUT_GRADIENT: "I 1", Kind.WEIGHT_GRADIENT: "W 1"}
    ranks = len(schedule.ranks)
    on = "" if ranks == schedule.num_stages else f" on {ranks} ranks"
    return (
        f"{schedule.name}: {schedule.num_stages} stages{on}, {schedule.num_microbatches} "
        f"microbatches, {int(found.makespan_s)} slots ({', '.join(sizes.values())}), "
        f"idle {100 * found.bubble:.1f} %"
    )
