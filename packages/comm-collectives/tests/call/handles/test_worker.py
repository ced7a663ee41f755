"""Jobs run in their order, on the thread that waits for one or on the worker's own."""

import threading
import time
from concurrent.futures import Future

from comm_collectives.call.handles.worker import Awaiting, Worker


class _Owner:
    pass


def test_jobs_keep_their_order_whoever_waits_and_each_runs_once() -> None:
    owner, ran = _Owner(), list[int]()
    worker = Worker("jobs", owner)
    futures: list[Future[None]] = []
    for number in range(500):
        futures.append(worker.submit(lambda number=number: ran.append(number)))
        if number % 7 == 0:
            futures[-1 - number % 3].result()
    futures[-1].result()
    assert ran == list(range(500))
    deadline = time.monotonic() + 60  # the worker may be about to count its last one
    while worker.is_busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.is_busy
    assert not worker.is_here()


def test_a_job_that_waits_behind_a_slow_one_runs_on_a_thread_that_waits_or_the_workers() -> None:
    owner, start = _Owner(), threading.Event()
    worker = Worker("jobs", owner)
    slow = worker.submit(lambda: (start.wait(60), worker.is_here()))
    threads = [threading.Thread(target=slow.result), threading.Thread(target=slow.result)]
    for thread in threads:
        thread.start()
    later = worker.submit(lambda: (threading.get_ident(), worker.is_here()))
    start.set()
    for thread in threads:
        thread.join()
    assert slow.result() == (True, True)
    assert later.result()[1]


def test_a_program_is_blocked_only_when_all_its_threads_wait() -> None:
    awaiting, me = Awaiting(), threading.get_ident()
    awaiting.use()
    assert not awaiting.is_all(())
    awaiting.begin()
    assert awaiting.is_all({me})
    assert not awaiting.is_all({me, me + 1})  # another thread may still make a transfer
    awaiting.end()
    assert not awaiting.is_all(())
