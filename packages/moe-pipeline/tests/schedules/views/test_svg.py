import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from moe_pipeline.schedules.generators.basic import one_f_one_b
from moe_pipeline.schedules.generators.v_shaped import zbv
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.simulator import simulate
from moe_pipeline.schedules.views.svg import to_svg

SVG = "{http://www.w3.org/2000/svg}"


def bars(text):
    return [r for r in ET.fromstring(text).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]


def test_every_computation_is_a_bar_at_its_time():
    schedule = zbv(3, 5)
    costs = StageCosts(forward_s=2.0, weight_gradient_s=0.5)
    found = simulate(schedule, costs)
    drawn = bars(to_svg(schedule, costs, width=1000))
    assert len(drawn) == 3 * 5 * 6
    tips = {bar.find(f"{SVG}title").text: bar for bar in drawn}
    scale = 930 / found.makespan_s
    for span in (span for row in found.spans for span in row):
        bar = tips[f"{span.action}: {span.start_s:g} to {span.end_s:g}"]
        assert float(bar.get("x")) == pytest.approx(60 + span.start_s * scale, abs=0.01)


def test_names_are_escaped():
    drawing = ET.fromstring(to_svg(replace(one_f_one_b(1, 1), name="<&>")))
    assert any(text.text.startswith("<&>: 1 stages") for text in drawing.iter(f"{SVG}text"))


def test_a_width_without_room_is_refused():
    with pytest.raises(ValueError, match="width must be at least 200, got 100"):
        to_svg(one_f_one_b(2, 2), width=100)
