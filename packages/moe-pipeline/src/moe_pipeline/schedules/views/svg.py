"""A schedule as an SVG drawing: a lane for each rank, time to the right.

    Path("zbv.svg").write_text(to_svg(zbv(4, 8)), encoding="utf-8")

With the default costs it is the picture of the papers; with measured ones it is a timeline.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from moe_pipeline.errors import MoEValueError
from moe_pipeline.schedules.table import Kind, Schedule, Simulation, Span, StageCosts, simulate

_COLORS = {
    Kind.FORWARD: ("#9ecae9", "#4c78a8"),
    Kind.BACKWARD: ("#b6d7a8", "#54a24b"),
    Kind.INPUT_GRADIENT: ("#b6d7a8", "#54a24b"),
    Kind.WEIGHT_GRADIENT: ("#ffe0b2", "#f2b06b"),
}
_LANE, _BAR, _LEFT, _TOP = 26, 22, 60, 30
# Labels are left out of bars narrower than this.
_LEGIBLE = 14


def to_svg(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    *,
    width: int = 1200,
    found: Simulation | None = None,
    note: str = "",
) -> str:
    """The timeline of `simulate(schedule, costs)`, `width` pixels wide.

    Args:
        found: the times of a run instead, by `Simulation.measured`.
        note: ends the title.

    Colours tell kinds apart, shades the stages of a rank; the numbers are microbatches, and each
    bar has a tooltip with the action and its times.

    Raises:
        ScheduleError: a computation whose inputs are never made.
        ValueError: costs of another number of stages, or a width below 200.
    """
    if width < 200:
        raise MoEValueError(f"width must be at least 200, got {width}")
    found = simulate(schedule, costs) if found is None else found
    scale = (width - _LEFT - 10) / found.makespan_s if found.makespan_s else 0.0
    height = _TOP + _LANE * len(found.spans) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="18">{escape(_title(schedule, found) + note)}</text>',
    ]
    for rank, row in enumerate(found.spans):
        y = _TOP + _LANE * rank
        lines.append(f'<text x="8" y="{y + 15}">rank {rank}</text>')
        stages = sorted({span.action.stage for span in row})
        for span in row:
            lines += _bar(span, y, scale, stages.index(span.action.stage))
    return "\n".join([*lines, "</svg>", ""])


def _title(schedule: Schedule, found: Simulation) -> str:
    peak = f", peak {max(found.peak_bytes)} bytes" if found.peak_bytes else ""
    return (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, "
        f"makespan {found.makespan_s:g}, idle {100 * found.bubble:.1f} %{peak}"
    )


def _bar(span: Span, y: int, scale: float, shade: int) -> list[str]:
    action = span.action
    x, width = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    color = _COLORS[action.kind][min(shade, 1)]
    tip = f"<title>{action}: {span.start_s:g} to {span.end_s:g}</title>"
    lines = [
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{color}" '
        f'stroke="white" stroke-width="0.5">{tip}</rect>'
    ]
    if width >= _LEGIBLE:
        lines.append(
            f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">'
            f"{action.microbatch}</text>"
        )
    return lines
