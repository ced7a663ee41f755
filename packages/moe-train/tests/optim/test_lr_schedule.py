"""The curve of the learning rate, alone and where a run goes on."""

import dataclasses
import itertools
import json
import math

import pytest

from moe_train.config.optimizer_tables import OptimizerConfig
from moe_train.optim.lr_schedule import LrSchedule


def optimizer(**changes: object) -> OptimizerConfig:
    values = {"lr": 2.0, "warmup_steps": 4, "min_lr_ratio": 0.25, **changes}
    return OptimizerConfig(**values)  # type: ignore[arg-type]


def former(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """The rate as it was computed before a schedule had a form of its own."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    shape = 1.0 - progress
    if config.decay == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_rate_warms_up_then_decays_to_its_minimum(decay: str, warmup: int) -> None:
    config = optimizer(decay=decay, warmup_steps=warmup)
    schedule = LrSchedule.of(config, 20)
    rates = [schedule.rate(step) for step in range(1, 31)]
    assert rates == [former(step, 20, config) for step in range(1, 31)], "bit for bit"
    assert rates[:4] == ([0.5, 1.0, 1.5, 2.0] if warmup else rates[:4])
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert rates[19:] == [schedule.end] * 11
    assert schedule.end == (2.0 if decay == "constant" else 0.5)


@pytest.mark.parametrize(
    ("style", "left"),
    [
        ("linear", (0.75, 0.5, 0.25, 0.0)),
        ("minus_sqrt", (0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0)),
        ("cosine", (0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0)),
    ],
)
def test_wsd_stays_at_its_rate_and_falls_in_its_last_steps(
    style: str, left: tuple[float, ...]
) -> None:
    config = optimizer(decay="wsd", wsd_decay_steps=4, wsd_decay_style=style)
    schedule = LrSchedule.of(config, 20)
    rates = [schedule.rate(step) for step in range(1, 25)]
    assert rates[:16] == [0.5, 1.0, 1.5] + [2.0] * 13
    assert rates[16:20] == pytest.approx([2.0 * (0.25 + 0.75 * part) for part in left])
    assert rates[19:] == [schedule.end] * 5 == [0.5] * 5


def test_wsd_falls_by_a_constant_factor_where_that_is_asked() -> None:
    config = optimizer(decay="wsd", wsd_decay_steps=2, wsd_decay_style="exponential")
    schedule = LrSchedule.of(config, 10)
    assert [schedule.rate(s) for s in (8, 9, 10)] == pytest.approx([2.0, 1.0, 0.5])


def test_a_longer_wsd_run_from_before_the_fall_has_the_curve_of_one_that_was_planned_so() -> None:
    config = optimizer(decay="wsd", wsd_decay_steps=4, on_extend="restretch")
    longer = LrSchedule.of(config, 20).resumed(10, config, 40)
    planned = LrSchedule.of(config, 40)
    assert [longer.rate(s) for s in range(11, 41)] == [planned.rate(s) for s in range(11, 41)]
    assert longer.rate(36) == 2.0 > longer.rate(37)
    assert LrSchedule.from_json(json.loads(json.dumps(dataclasses.asdict(longer)))) == longer


def test_half_of_a_wsd_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay=\"wsd\", wsd_decay_steps=None"):
        optimizer(decay="wsd")
    with pytest.raises(ValueError, match=r"decay=\"cosine\", wsd_decay_steps=3"):
        optimizer(wsd_decay_steps=3)
    with pytest.raises(ValueError, match="exponential"):
        optimizer(decay="wsd", wsd_decay_steps=3, wsd_decay_style="exponential", min_lr_ratio=0.0)


def test_a_schedule_of_before_wsd_is_read() -> None:
    schedule = LrSchedule.of(optimizer(), 20)
    values = dataclasses.asdict(schedule)
    del values["wsd_decay_steps"], values["wsd_decay_style"]
    assert LrSchedule.from_json(values) == schedule


def test_the_decay_ends_at_decay_steps_where_they_are_given() -> None:
    short = LrSchedule.of(optimizer(decay_steps=10), 20)
    assert [short.rate(s) for s in range(1, 21)] == [
        former(s, 10, optimizer()) for s in range(1, 21)
    ]
    with pytest.raises(ValueError, match=r"decay_steps=4 .*warmup_steps=4"):
        optimizer(decay_steps=4)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_more_steps_hold_the_end_of_the_curve_by_default(decay: str) -> None:
    first = LrSchedule.of(optimizer(decay=decay), 20)
    for step in (7, 20):
        on = first.resumed(step, optimizer(decay=decay), 40)
        assert [on.rate(s) for s in range(step + 1, 41)] == [
            former(s, 20, optimizer(decay=decay)) for s in range(step + 1, 41)
        ]
        assert on.rate(step) == first.rate(step), "no jump at the seam"
        assert on.resumed(30, optimizer(decay=decay), 40) == on


def test_restretch_is_the_curve_of_a_run_that_was_so_long_from_its_start() -> None:
    first = LrSchedule.of(optimizer(), 20)
    on = first.resumed(20, optimizer(on_extend="restretch"), 40)
    assert [on.rate(s) for s in range(1, 41)] == [former(s, 40, optimizer()) for s in range(1, 41)]
    assert on.resumed(30, optimizer(on_extend="restretch"), 40) == on, "the same run goes on"


def test_rewarm_rises_from_the_rate_of_the_seam_and_decays_until_the_new_end() -> None:
    first = LrSchedule.of(optimizer(), 20)
    again = optimizer(on_extend="rewarm")
    on = first.resumed(20, again, 40)
    start = first.rate(20)
    assert on.rate(20) == start == 0.5, "no jump at the seam"
    rises = [start + (2.0 - start) * n / 4 for n in (1, 2, 3, 4)]
    assert [on.rate(s) for s in (21, 22, 23, 24)] == rises
    decays = [
        2.0 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * (s - 24) / 16))) for s in range(25, 41)
    ]
    assert [on.rate(s) for s in range(25, 41)] == pytest.approx(decays, rel=1e-15)
    assert on.rate(40) == 0.5
    assert on.resumed(33, again, 40) == on, "the same run goes on"


def test_rewarm_needs_steps_to_rise_in() -> None:
    first = LrSchedule.of(optimizer(), 20)
    for steps in (0, 20):
        config = optimizer(on_extend="rewarm", warmup_steps=steps)
        with pytest.raises(ValueError, match=rf"warmup_steps between 1 and 19, got {steps}"):
            first.resumed(20, config, 40)


def test_what_the_job_says_of_the_curve_holds_from_the_seam_on() -> None:
    first = LrSchedule.of(optimizer(), 20)
    on = first.resumed(10, optimizer(lr=1.0, decay="linear"), 20)
    assert on == LrSchedule.of(optimizer(lr=1.0, decay="linear"), 20)
    later = first.resumed(10, optimizer(decay_steps=30), 20)
    assert later.decay_steps == 30
    assert later.resumed(12, optimizer(), 20).decay_steps == 30, "it is part of the state"


def test_a_schedule_survives_json_bit_for_bit() -> None:
    schedule = LrSchedule.of(optimizer(lr=0.1 + 0.2), 20).resumed(
        13, optimizer(on_extend="rewarm"), 31
    )
    values = json.loads(json.dumps(dataclasses.asdict(schedule)))
    assert LrSchedule.from_json(values) == schedule
    for wrong in ({}, {**values, "wave": 1}, {**values, "lr": "x"}):
        with pytest.raises((KeyError, ValueError)):
            LrSchedule.from_json(wrong)
