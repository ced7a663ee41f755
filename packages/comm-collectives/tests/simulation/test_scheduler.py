"""One task at a time, in a seeded order, in virtual time."""

import threading
import time

import pytest

from comm_collectives.simulation.scheduler import (
    Hung,
    Scheduler,
    Signal,
    SimulationStuckError,
    Threads,
    Unwound,
)


@pytest.fixture
def threads() -> Threads:
    return Threads()


def test_clock_jumps_to_the_earliest_alarm(threads: Threads) -> None:
    scheduler = Scheduler(seed=1, threads=threads)
    seen: list[tuple[str, float]] = []

    def sleeper(name: str, duration_s: float) -> None:
        scheduler.sleep(duration_s)
        seen.append((name, scheduler.now_s))

    for name, duration_s in (("late", 500.0), ("early", 2.0), ("at once", 0.0)):
        scheduler.spawn(lambda n=name, d=duration_s: sleeper(n, d))
    scheduler.run(limit_s=30.0)
    assert seen == [("at once", 0.0), ("early", 2.0), ("late", 500.0)]


def test_tasks_that_wait_for_one_moment_and_draw_the_same_chance_all_go_on(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(seed=1, threads=threads)
    monkeypatch.setattr(scheduler._random, "getrandbits", lambda bits: 7)
    seen: list[float] = []

    def sleeper() -> None:
        scheduler.sleep(2.0)
        seen.append(scheduler.now_s)

    for _ in range(5):
        scheduler.spawn(sleeper)
    scheduler.run(limit_s=5.0)
    assert seen == [2.0] * 5


def test_a_failure_of_the_simulation_ends_the_run_at_once_and_is_its_cause(
    threads: Threads,
) -> None:
    scheduler, wait = Scheduler(seed=1, threads=threads), Signal()

    def fail() -> None:
        scheduler.sleep(1.0)
        raise ZeroDivisionError("of the simulation")

    scheduler.spawn(lambda: scheduler.block(wait, 9.0), "the one that waits")
    scheduler.spawn(fail, "the one that fails")
    started = time.monotonic()
    with pytest.raises(SimulationStuckError, match=r"itself failed with ZeroDivision") as caught:
        scheduler.run(limit_s=60.0)
    assert time.monotonic() - started < 30
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "the one that waits" in str(caught.value) and "the one that fails" in str(caught.value)


def test_signal_ends_a_wait_before_its_deadline(threads: Threads) -> None:
    scheduler, signal = Scheduler(seed=1, threads=threads), Signal()
    found: list[tuple[bool, float]] = []

    def wait(deadline_s: float) -> None:
        found.append((scheduler.block(signal, deadline_s), scheduler.now_s))

    def fire() -> None:
        scheduler.sleep(3.0)
        scheduler.fire(signal)

    for run in (lambda: wait(5.0), lambda: wait(2.0), fire):
        scheduler.spawn(run)
    scheduler.run(limit_s=30.0)
    assert found == [(False, 2.0), (True, 3.0)]


def test_order_is_that_of_the_seed(threads: Threads) -> None:
    def order(seed: int) -> list[int]:
        scheduler = Scheduler(seed=seed, threads=threads)
        ran: list[int] = []

        def task(number: int) -> None:
            for _ in range(5):
                ran.append(number)
                scheduler.sleep(0.0)

        for number in range(8):
            scheduler.spawn(lambda n=number: task(n))
        scheduler.run(limit_s=30.0)
        return ran

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_tasks_that_all_wait_for_each_other_are_unwound_as_hung(threads: Threads) -> None:
    scheduler = Scheduler(seed=1, threads=threads)
    ended: list[str] = []

    def task() -> None:
        try:
            scheduler.block(Signal(), None)
        except Hung:
            ended.append("hung")
            raise

    for _ in range(3):
        scheduler.spawn(task)
    scheduler.run(limit_s=30.0)
    assert scheduler.hung
    assert ended == ["hung"] * 3


def test_task_can_be_ended_where_it_waits_but_ends_no_other(threads: Threads) -> None:
    scheduler = Scheduler(seed=1, threads=threads)
    ended: list[str] = []

    def victim() -> None:
        try:
            scheduler.sleep(100.0)
        except Unwound as doom:
            ended.append(str(doom))
            raise

    task = scheduler.spawn(victim)

    def killer() -> None:
        scheduler.sleep(1.0)
        scheduler.unwind(task, Unwound("enough"))
        scheduler.sleep(1.0)
        ended.append(f"over at {scheduler.now_s:g}")

    scheduler.spawn(killer)
    scheduler.run(limit_s=30.0)
    assert ended == ["enough", "over at 2"]


def test_use_outside_of_a_simulation_is_refused(threads: Threads) -> None:
    scheduler = Scheduler(seed=1, threads=threads)
    with pytest.raises(SimulationStuckError, match="outside of `simulate`"):
        scheduler.sleep(1.0)


def test_a_run_that_is_only_slow_is_not_stuck(threads: Threads) -> None:
    scheduler = Scheduler(seed=1, threads=threads)

    def slow() -> None:
        for _ in range(8):
            time.sleep(0.05)  # as on a machine that has other work
            scheduler.sleep(1.0)

    for _ in range(2):
        scheduler.spawn(slow)
    started_s = time.monotonic()
    scheduler.run(limit_s=0.2)
    assert time.monotonic() - started_s > 0.8


def test_a_task_that_keeps_the_baton_is_stuck(threads: Threads) -> None:
    scheduler, ended = Scheduler(seed=1, threads=threads), threading.Event()
    scheduler.spawn(lambda: print(ended.wait(60)), "the one that waits elsewhere")
    with pytest.raises(SimulationStuckError, match=r"elsewhere was busy .* without passing"):
        scheduler.run(limit_s=0.2)
    ended.set()


def test_tasks_that_pass_the_baton_for_ever_are_stuck(threads: Threads) -> None:
    scheduler, is_over = Scheduler(seed=1, threads=threads), threading.Event()

    def pass_on() -> None:
        while not is_over.is_set():
            scheduler.give_way()

    for _ in range(2):
        scheduler.spawn(pass_on)
    with pytest.raises(SimulationStuckError, match=r"0.3 s of CPU time, in which the ranks"):
        scheduler.run(limit_s=0.3)
    is_over.set()


def test_threads_are_used_again_and_end(threads: Threads) -> None:
    before, most = set(threading.enumerate()), 0
    for _ in range(3):
        scheduler = Scheduler(seed=1, threads=threads)
        for _ in range(4):
            scheduler.spawn(lambda s=scheduler: s.sleep(1.0))
        scheduler.run(limit_s=30.0)
        most = max(most, len(set(threading.enumerate()) - before))
    threads.close()
    assert 4 <= most < 12
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
