import math
import time

from moe_train.training.pace import Pace


def test_a_step_is_the_last_when_another_one_and_a_save_would_end_too_late() -> None:
    pace = Pace(limit_s=100.0, longest_s=10.0)
    assert not pace.is_last(age_s=74.0, save_s=5.0)
    assert pace.is_last(age_s=75.0, save_s=5.0)
    assert not Pace(limit_s=math.inf, longest_s=10.0).is_last(age_s=1e9, save_s=5.0)


def test_the_longest_step_counts() -> None:
    pace = Pace(limit_s=100.0)
    for sleep_s in (0.05, 0.0):
        with pace.step():
            time.sleep(sleep_s)
    assert 0.05 <= pace.longest_s < 50


def test_room_is_left_for_a_validation_behind_the_last_step() -> None:
    pace = Pace(limit_s=100.0, longest_s=10.0)
    with pace.validation():
        time.sleep(0.05)
    assert 0.05 <= pace.validation_s < 50
    pace.validation_s = 20.0
    assert not pace.is_last(age_s=54.0, save_s=5.0)
    assert pace.is_last(age_s=55.0, save_s=5.0)
