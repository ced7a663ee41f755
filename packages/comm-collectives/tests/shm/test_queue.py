"""Order and progress of comm_shm's collectives, synchronous and asynchronous, and waits' limits."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.errors import CollectiveTimeoutError
from comm_collectives.shm.registration import register_backends
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not backends_may_be_python(), reason="this torch has no backends written in Python"
)


def _group(*, timeout_s=30.0):
    register_backends()
    group = dist.new_group(backend="comm_shm", timeout=timedelta(seconds=timeout_s))
    assert group._get_backend(torch.device("cpu")).shares_memory
    return group


def test_calls_run_in_order_whether_or_not_they_are_asynchronous():
    def fn(rank, size):
        group = _group()
        draw = torch.Generator().manual_seed(3)
        x = torch.full((40_000,), 1.0)
        handles = []
        for _ in range(60):
            is_async = bool(torch.rand(1, generator=draw) < 0.6)
            handle = dist.all_reduce(x, group=group, async_op=is_async)
            if is_async:
                handles.append(handle)
            if torch.rand(1) < 0.3 and handles:  # differs between the ranks
                handles.pop(int(torch.randint(len(handles), (1,)))).wait()
        for handle in handles:
            handle.wait()
        # Applied one after another: 2 ** 60, exact in float32.
        return x.unique().tolist()

    assert run_ranks(fn, 2) == [[2.0**60]] * 2


def test_asynchronous_call_goes_on_while_nobody_waits():
    def fn(rank, size):
        group = _group()
        store = dist.distributed_c10d._get_default_store()
        x = torch.full((2_000_000,), rank + 1.0)
        handle = dist.all_reduce(x, group=group, async_op=True)
        if rank == 0:
            handle.wait()
            store.set("through", "yes")
        store.wait(["through"], timedelta(seconds=20))
        handle.wait()
        return x.unique().tolist(), handle.get_future().wait()[0] is x

    assert run_ranks(fn, 2) == [([3.0], True)] * 2


def test_send_between_an_asynchronous_call_and_its_end_does_not_deadlock():
    def fn(rank, size):
        group = _group()
        x = torch.ones(1000)
        if rank == 0:
            handle = dist.all_reduce(x, group=group, async_op=True)
            dist.send(torch.full((5,), 7.0), 1, group=group)
            handle.wait()
            return x[0].item()
        received = torch.empty(5)
        dist.recv(received, 0, group=group)
        dist.all_reduce(x, group=group)
        return x[0].item() + received[0].item()

    assert run_ranks(fn, 2) == [2.0, 9.0]


def test_asynchronous_calls_of_two_groups_in_opposite_order_end():
    def fn(rank, size):
        groups = [_group(), _group()]
        tensors = [torch.ones(500_000), torch.ones(500_000)]
        order = (0, 1) if rank == 0 else (1, 0)
        handles = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
        for handle in handles:
            handle.wait()
        return [t.unique().tolist() for t in tensors]

    assert run_ranks(fn, 2) == [[[2.0], [2.0]]] * 2


def test_tensors_of_inference_mode_are_reduced_by_whichever_thread():
    def fn(rank, size):
        group = _group()
        with torch.inference_mode():
            x = torch.ones(300_000)
            handle = dist.all_reduce(x, group=group, async_op=True)
        if rank == 0:
            time.sleep(0.1)
        handle.wait()
        return x.unique().tolist()

    assert run_ranks(fn, 2) == [[2.0]] * 2


def test_other_threads_run_while_a_rank_waits():
    def fn(rank, size):
        group = _group()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["counted"], timedelta(seconds=20))

        def count():
            for _ in range(50):
                time.sleep(0.001)
            store.set("counted", "yes")

        thread = threading.Thread(target=count)
        if rank == 0:
            thread.start()
        x = torch.ones(10)
        dist.all_reduce(x, group=group)
        return x[0].item()

    assert run_ranks(fn, 2) == [2.0, 2.0]


def test_limit_of_a_wait_leaves_the_call_under_way():
    def fn(rank, size):
        group = _group()
        store = dist.distributed_c10d._get_default_store()
        x = torch.full((800_000,), rank + 1.0)
        if rank == 1:
            store.wait(["gave up"], timedelta(seconds=20))
        handle = dist.all_reduce(x, group=group, async_op=True)
        error = None
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                handle.wait(timedelta(seconds=0.2))
            error = caught.value
            store.set("gave up", "yes")
        handle.wait()
        return x.unique().tolist(), str(error)

    (value, text), (other, _) = run_ranks(fn, 2)
    assert value == other == [3.0]
    assert "Timed out after 0.2 s" in text
    assert "did not arrive: rank 1" in text
