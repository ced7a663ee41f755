"""Threads of which exactly one runs at a time, in an order drawn from a seed, in virtual time.

A task runs until it waits; then the next one is drawn from those that can run. When none can, the
clock jumps to the earliest limit for which one waits. So a run costs no real waiting, and the same
seed gives the same run. When nobody waits for the clock either, that is a hang, and every task is
unwound with `Hung`.

    scheduler = Scheduler(seed=1, threads=Threads())
    signal = Signal()
    scheduler.spawn(lambda: print(scheduler.block(signal, deadline_s=5.0), scheduler.now_s))
    scheduler.spawn(lambda: (scheduler.sleep(2.0), scheduler.fire(signal)))
    scheduler.run(limit_s=60.0)            # True 2.0

Invariant: only the task that holds the baton touches the scheduler, so nothing here is locked; the
baton is the gate (a lock) that each task waits at.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import final

from comm_collectives.base.transport import Clock
from comm_collectives.call.handles import Caught

_LONGEST_S = 86_400.0  # of virtual time: who waits for longer polls without end
_SHOWN_FRAMES = 6  # of tasks that only wait


class Unwound(BaseException):
    """Ends a task from outside; no `except Exception` of a program sees it."""


class Hung(Unwound):
    """Every task waited, and for nothing that could happen."""


class SimulationStuckError(RuntimeError):
    """A simulated rank waited or called where the simulation cannot see it."""


@final
class Threads:
    """Idle threads that are used again, since starting one costs more than a simulated call."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._is_closed = False

    def start(self, run: Callable[[], None]) -> None:
        """Run a function in a thread of its own."""
        thread = self._idle.pop() if self._idle else _Thread(self)
        thread.job = run
        thread.gate.release()

    def rest(self, thread: "_Thread") -> None:
        """Take back a thread whose job is done."""
        self._idle.append(thread)
        if self._is_closed:
            self._end()

    def close(self) -> None:
        """End the threads, those that still run when their job is done."""
        self._is_closed = True
        for thread in self._end():
            thread.join()  # or the interpreter might end in the middle of one

    def _end(self) -> list[threading.Thread]:
        idle, self._idle = self._idle, []
        for thread in idle:
            thread.gate.release()
        return [thread.thread for thread in idle]


@final
class _Thread:
    def __init__(self, owner: Threads) -> None:
        self._owner = owner
        self.job: Callable[[], None] | None = None
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread = threading.Thread(target=self._work, name="simulated", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            self.gate.acquire()
            job, self.job = self.job, None
            if job is None:
                return
            job()
            del job  # what it holds must not live until the next one comes
            self._owner.rest(self)


@final
class Task:
    """One cooperative thread. `doom`, once set, is raised wherever it waits."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self.run: Callable[[], None] | None = run
        self.name = name
        self.gate = threading.Lock()
        self.gate.acquire()
        self.doom: Unwound | None = None
        self.is_blocked = False
        self.thread = 0
        self.turn = 0  # how often it has waited; tells stale alarms apart
        self.woken = False


@final
class Signal:
    """Something that tasks wait for."""

    def __init__(self) -> None:
        self.waiters: list[tuple[Task, int]] = []


@final
class Scheduler:
    """Passes the baton between tasks. `now_s` is the virtual time, from 0."""

    def __init__(self, *, seed: int, threads: Threads) -> None:
        self._random = Random(seed)
        self._threads = threads
        self._ready: list[Task] = []
        self._alarms: list[tuple[float, int, int, int, Task]] = []
        self._numbers = count()
        self._failure: BaseException | None = None
        self._tasks: dict[Task, None] = {}
        self._current: Task | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self._passed = 0  # how often the baton was
        self.now_s = 0.0
        self.hung = False

    def spawn(self, run: Callable[[], None], name: str = "a task") -> Task:
        """Add a task, from outside before `run` or from another task; it starts when drawn."""
        task = Task(run, name)
        self._tasks[task] = None
        self._ready.append(task)
        return task

    def run(self, limit_s: float) -> None:
        """Run all tasks to their end. Called from outside, once.

        On a busy machine a run may take as long as it likes: a limit counts what is not progress.

        Raises:
            SimulationStuckError: the baton was not passed for `limit_s` of real time, or the run
                has used `limit_s` of this process's CPU time; names the task that has the baton
                and where it is, and where all others are. Or the simulation itself failed.
        """
        if not self._tasks:
            return
        started_s = time.process_time()
        self._hand_over()
        passed = -1
        while not self._done.acquire(timeout=limit_s):
            what = "of real time without passing the baton"
            if self._passed != passed and time.process_time() - started_s < limit_s:
                passed = self._passed
                continue
            if self._passed != passed:
                what = "of CPU time, in which the ranks did not end"
            culprit = "no task" if self._current is None else self._current.name
            raise SimulationStuckError(
                f"{culprit} was busy or blocked for {limit_s:g} s {what}, {self.now_s:g} s of "
                "virtual time, outside the calls that the simulator knows; wait only in calls of "
                f"this package\n{self._stacks()}"
            )
        if self._failure is not None:
            raise SimulationStuckError(
                f"the simulation itself failed with {self._failure!r}\n{self._stacks()}"
            ) from self._failure

    def _stacks(self) -> str:
        """Where each task is: the one that has the baton first and in full."""
        frames = sys._current_frames()
        texts = []
        for task in sorted(self._tasks, key=lambda task: task is not self._current):
            stack = traceback.format_stack(frames[task.thread]) if task.thread in frames else []
            shown = stack if task is self._current else stack[-_SHOWN_FRAMES:]
            texts.append(f"--- {task.name}:\n{''.join(shown) or 'not started'}")
        return "\n".join(texts)

    def block(self, signal: Signal | None, deadline_s: float | None) -> bool:
        """Let others run until the signal, or until the virtual time `deadline_s`.

        Returns:
            Whether the signal came; False at the deadline.
        """
        task = self._running()
        if task.doom is not None:
            raise task.doom
        task.turn += 1
        task.is_blocked = True
        if signal is not None:
            signal.waiters.append((task, task.turn))
        if deadline_s is not None:
            # The second item breaks ties by chance, and the third those that are left: two of the
            # ranks that wait for one deadline draw the same once in some 100,000 runs.
            chance, number = self._random.getrandbits(32), next(self._numbers)
            heappush(self._alarms, (deadline_s, chance, number, task.turn, task))
        self._switch(task)
        return task.woken

    def fire(self, signal: Signal) -> None:
        """Let the tasks that wait for a signal run again."""
        waiters, signal.waiters = signal.waiters, []
        for task, turn in waiters:
            self._wake(task, turn, by_signal=True)

    def sleep(self, duration_s: float) -> None:
        """Let virtual time pass."""
        self.block(None, self.now_s + max(duration_s, 0.0))

    def give_way(self) -> None:
        """Let other tasks go first."""
        task = self._running()
        if self._ready:
            self._ready.append(task)
            self._switch(task)

    def is_running(self, task: Task | None) -> bool:
        """Whether this is the task that has the baton."""
        return task is not None and self._current is task

    def draw(self) -> float:
        """Return a number in [0, 1) of the seeded sequence."""
        return self._random.random()

    def unwind(self, task: Task, doom: Unwound) -> None:
        """End another task where it waits; nothing happens to the caller itself."""
        if task is self._current:
            return
        task.doom = doom
        if task.is_blocked:
            self._wake(task, task.turn, by_signal=False)

    def _running(self) -> Task:
        task = self._current
        if task is None or task.thread != threading.get_ident():
            raise SimulationStuckError(
                "a simulated group was used outside of `simulate`, or by a thread that the program "
                "has started; make simulated calls in the functions of the program"
            )
        return task

    def _wake(self, task: Task, turn: int, *, by_signal: bool) -> None:
        if task.is_blocked and task.turn == turn:
            task.is_blocked = False
            task.woken = by_signal
            self._ready.append(task)

    def _switch(self, task: Task) -> None:
        chosen = self._hand_over(task)
        if chosen is not task:
            task.gate.acquire()
        if task.doom is not None:
            raise task.doom

    def _hand_over(self, giver: Task | None = None) -> Task:
        """Draw the next task and let it run; the caller must then stop, unless it was drawn."""
        if not self._ready:
            self._advance()
        ready = self._ready
        at = int(self._random.random() * len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        task = self._current = ready.pop()
        self._passed += 1
        if task.run is not None:
            run, task.run = task.run, None
            self._threads.start(lambda: self._begin(task, run))
        elif task is not giver:
            task.gate.release()
        return task

    def _begin(self, task: Task, run: Callable[[], None]) -> None:
        task.thread = threading.get_ident()
        with Caught() as caught:
            with suppress(Unwound):  # the end that was meant for it
                if task.doom is None:
                    run()
            del self._tasks[task]
            if self._tasks:
                self._hand_over()
                return
            self._current = None
        self._failure = caught.error  # what ranks raise is caught where they run
        self._done.release()

    def _advance(self) -> None:
        """Move the clock to the next alarm; unwind every task if there is none."""
        alarms = self._alarms
        while alarms and not self._ready:
            time_s, _, _, turn, task = heappop(alarms)
            if task.is_blocked and task.turn == turn and time_s < _LONGEST_S:
                self.now_s = max(self.now_s, time_s)
                self._wake(task, turn, by_signal=False)
        if not self._ready:
            self.hung = True
            self._current = None
            for task in self._tasks:
                self.unwind(task, Hung("every rank waits, and for nothing that could happen"))


@final
class VirtualClock(Clock):
    """The time of the simulation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._scheduler.now_s

    def lock(self) -> "SimLock":
        """One in which tasks wait, since a rank may be held up in the middle of a send."""
        return SimLock(self._scheduler)

    def condition(self) -> "SimCondition":
        """One in which tasks wait."""
        return SimCondition(self._scheduler)

    def aside(self, work: Callable[[], None], limit_s: float) -> bool:
        """Run at once: nothing that is simulated hangs without a limit."""
        work()
        return True


@final
class SimLock:
    """A lock of tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._released, self._is_held = scheduler, Signal(), False

    def __enter__(self) -> None:
        while self._is_held:
            self._scheduler.block(self._released, None)
        self._is_held = True

    def __exit__(self, *error: object) -> None:
        self._is_held = False
        self._scheduler.fire(self._released)


@final
class SimCondition(threading.Condition):
    """A condition of tasks, which change only where they wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler, self._changed = scheduler, Signal()

    def wait(self, timeout: float | None = None) -> bool:
        """Let other tasks run until `notify_all`, or for so long."""
        deadline_s = None if timeout is None else self._scheduler.now_s + timeout
        self.release()
        try:
            return self._scheduler.block(self._changed, deadline_s)
        finally:
            self.acquire()

    def notify_all(self) -> None:
        """Let all go on that wait."""
        self._scheduler.fire(self._changed)
