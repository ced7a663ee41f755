"""Jobs run in their order, on the thread that waits for one or on the worker's own."""

import threading
import time
from concurrent.futures import Future

from comm_collectives.call.handles.worker import Awaiting, Worker
from comm_collectives.threads import Thread, Threads, this_thread


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
    awaiting, me, job = Awaiting(), this_thread(), Future[int]()
    other: list[Thread] = []
    looks = threading.Event()
    thread = threading.Thread(target=lambda: (other.append(this_thread()), looks.wait(60)))
    thread.start()
    while not other:
        time.sleep(0.001)
    awaiting.use()
    assert not awaiting.is_all(set())
    awaiting.begin(job)
    assert awaiting.is_all({me})
    assert not awaiting.is_all({me, *other})  # another thread may still make a transfer
    looks.set()
    thread.join()
    job.set_result(1)
    assert not awaiting.is_all({me}), "it goes on, though it has not noted that"
    awaiting.begin(Future())
    awaiting.end()
    assert not awaiting.is_all(set())


def test_threads_that_have_ended_are_none_of_them_whatever_their_number() -> None:
    users, here, numbers = Threads(), this_thread(), list[int]()
    users.add()

    def use() -> None:
        users.add()
        if users.alive() == {here, this_thread()}:
            numbers.append(threading.get_ident())

    for _ in range(20):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert users.alive() == {here} == {this_thread()}
    assert len(numbers) == 20 > len(set(numbers)), "numbers of threads are used again"
