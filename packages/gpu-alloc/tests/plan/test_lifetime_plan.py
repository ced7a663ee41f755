from pathlib import Path
from typing import Any

import pytest

from gpu_alloc import AllocError, LifetimePlan, TraceEvent
from gpu_alloc.errors import AllocTypeError, AllocValueError, TraceError
from gpu_alloc.plan import is_step_mark


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = LifetimePlan(places=((1024, 7, 512), (512, -3, 0)), alignment_size=512, step="step 1")
    plan.save(tmp_path / "plan.json")
    assert LifetimePlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "gpu-alloc-plan", "version": 1}'])
def test_what_is_no_plan_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(TraceError, match="is no plan"):
        LifetimePlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((), "plans nothing"),
        (((512, 0),), "three whole numbers"),
        (((512, 0, 0.5),), "three whole numbers"),
        (((100, 0, 0),), "aligned"),
        (((512, 0, -512),), "aligned"),
        (((1024, 0, 0), (512, 1, 512)), "a part of its own"),
    ],
)
def test_places_that_cannot_be_followed_are_refused(places: Any, said: str) -> None:
    with pytest.raises(AllocValueError, match=said):
        LifetimePlan(places=places, alignment_size=512)


def test_wrong_kinds_are_refused() -> None:
    kinds: list[dict[str, Any]] = [{"places": [(512, 0, 0)]}, {"alignment_size": "512"}]
    for wrong in [*kinds, {"step": 1}]:
        with pytest.raises(AllocTypeError):
            LifetimePlan(**({"places": ((512, 0, 0),), "alignment_size": 512} | wrong))
    with pytest.raises(AllocError, match="below 1"):
        LifetimePlan(places=((512, 0, 0),), alignment_size=0)


def test_parts_of_streams_follow_each_other_without_a_gap() -> None:
    plan = LifetimePlan(places=((512, 4, 5120), (512, 9, 512), (512, 9, 1024)), alignment_size=512)
    assert plan.streams() == [(9, 0), (4, 5120)]
    assert plan.size_bytes == 5632


def test_marks_that_differ_by_numbers_begin_the_same_step() -> None:
    def mark(name: str) -> TraceEvent:
        return TraceEvent(action="mark", note=name)

    assert is_step_mark(mark("step 12"), "step 1")
    assert not is_step_mark(mark("end of step 1"), "step 1")
    assert not is_step_mark(mark(""), "")
