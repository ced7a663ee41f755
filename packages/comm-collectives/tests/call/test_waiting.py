"""Waiting in slices: looks around, keeps the limit, and ends with what really failed."""

from datetime import timedelta

import pytest

from comm_collectives.base.transport.clock import Clock
from comm_collectives.call.waiting import wait_in_slices


class _Virtual(Clock):
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s

    def aside(self, work, limit_s: float) -> bool:
        work()
        return True


class _Work:
    """Ends at a moment, well or not; `says_so` is whether it tells that it is completed."""

    def __init__(self, clock: _Virtual, end_s: float, error: str = "", says_so: bool = True):
        self.clock, self.end_s, self.error, self.says_so = clock, end_s, error, says_so

    def wait(self, timeout: timedelta) -> bool:
        limit_s = timeout.total_seconds()
        left_s = self.end_s - self.clock.now
        self.clock.sleep(max(0.0, min(limit_s, left_s)))
        if left_s > limit_s:
            raise RuntimeError("timed out")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.says_so and self.clock.now >= self.end_s


def test_looks_around_twice_a_second_until_the_end() -> None:
    clock, looks = _Virtual(), []
    wait_in_slices(_Work(clock, 1.7), None, lambda: looks.append(clock.now), clock)
    assert looks == [0.5, 1.0, 1.5]
    assert clock.now == 1.7


def test_limit_is_kept() -> None:
    clock = _Virtual()
    with pytest.raises(RuntimeError, match="timed out"):
        wait_in_slices(_Work(clock, 100.0), 1.2, lambda: None, clock)
    assert clock.now == pytest.approx(1.2)


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("limit_s", [None, 30.0])
def test_failure_ends_the_wait_at_once(says_so: bool, limit_s: float | None) -> None:
    clock = _Virtual()
    work = _Work(clock, 0.7, "connection closed", says_so)
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_in_slices(work, limit_s, lambda: None, clock)
    assert clock.now == 0.7


@pytest.mark.parametrize("limit_s", [None, 0.5, 30.0])
def test_end_just_after_a_wait_gave_up_is_an_end(limit_s: float | None) -> None:
    class JustLate(_Work):
        def wait(self, timeout: timedelta) -> bool:
            self.clock.now += 0.0 if self.is_completed() else timeout.total_seconds()
            if self.waits == 0:
                self.waits += 1
                raise RuntimeError("timed out")
            return super().wait(timeout)

        waits = 0

    clock, looks = _Virtual(), []
    wait_in_slices(JustLate(clock, 0.5), limit_s, lambda: looks.append(clock.now), clock)
    assert looks == []
    assert clock.now == 0.5


def test_what_looking_around_finds_ends_the_wait() -> None:
    clock = _Virtual()

    def look() -> None:
        raise ValueError("rank 1 is dead")

    with pytest.raises(ValueError, match="rank 1 is dead"):
        wait_in_slices(_Work(clock, 9.0), None, look, clock)
    assert clock.now == 0.5
