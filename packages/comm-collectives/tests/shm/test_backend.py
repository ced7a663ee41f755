"""The backend comm_shm: order and progress; disagreement, limits, deaths, no shared memory."""

import os
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.errors import (
    CollectiveTimeoutError,
    MismatchError,
    PeerFailedError,
    RefusedError,
)
from comm_collectives.shm.registration import register_backends
from ranktest import collect_ranks, run_ranks

pytestmark = pytest.mark.skipif(
    not backends_may_be_python(), reason="this torch has no backends written in Python"
)


def _group(*, timeout_s=30.0):
    register_backends()
    group = dist.new_group(backend="comm_shm", timeout=timedelta(seconds=timeout_s))
    assert group._get_backend(torch.device("cpu")).shares_memory
    return group


def _error(call):
    try:
        call()
    except RuntimeError as error:
        return error
    return None


MISTAKES = {
    "length": lambda rank, g: dist.all_reduce(torch.ones(2 + rank), group=g),
    "dtype": lambda rank, g: dist.all_reduce(
        torch.ones(4).to([torch.float32, torch.int32][rank]), group=g
    ),
    "reduce op": lambda rank, g: dist.all_reduce(
        torch.ones(2), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group=g
    ),
    "root": lambda rank, g: dist.broadcast(torch.ones(2), rank, group=g),
    "operation": lambda rank, g: (
        dist.all_reduce(torch.ones(2), group=g) if rank else dist.barrier(group=g)
    ),
    "long and short": lambda rank, g: dist.all_reduce(torch.ones(3_000_000 * rank + 1), group=g),
    "splits": lambda rank, g: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [2, 2], [[2, 2], [1, 3]][rank], group=g
    ),
    "parts": lambda rank, g: dist.reduce_scatter(
        torch.ones(2),
        [torch.ones(2), torch.ones(2)] if rank else [torch.ones(2), torch.ones(3)],
        group=g,
    ),
    "gloo's own": lambda rank, g: dist.reduce(
        torch.ones(2), 0, op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group=g
    ),
}


def test_ranks_that_disagree_all_raise_and_go_on():
    def fn(rank, size):
        group = _group()
        texts = {}
        for name, mistake in MISTAKES.items():
            error = _error(lambda mistake=mistake: mistake(rank, group))
            assert isinstance(error, MismatchError), (name, error)
            texts[name] = str(error)
            x = torch.full((400_000,), rank + 1.0)
            dist.all_reduce(x, group=group)
            assert x.unique().tolist() == [3.0]
        return texts

    first, second = run_ranks(fn, 2)
    assert first == second
    assert "rank 0: all_reduce(8 bytes, float32, op=sum)" in first["reduce op"]
    assert "rank 1: all_reduce(8 bytes, float32, op=max)" in first["reduce op"]
    assert "rank 1 sends 12 bytes to rank 1, which expects 8" in first["splits"]


def test_arguments_wrong_on_one_rank_are_told_to_the_other():
    def fn(rank, size):
        group = _group()
        error = _error(
            lambda: dist.all_to_all_single(
                torch.ones(4), torch.ones(4), [2, 2], [[2, 2], [1, 1]][rank], group=group
            )
        )
        dist.barrier(group=group)
        return type(error).__name__, str(error)

    (other, told), (own, said) = run_ranks(fn, 2)
    assert (other, own) == (MismatchError.__name__, RefusedError.__name__)
    assert "rank 1: refused its own arguments" in told
    assert "input_split_sizes=[1, 1] and output_split_sizes=[2, 2] do not fit" in said


def test_passed_limit_names_the_absent_and_the_group_goes_on():
    def fn(rank, size):
        group = _group(timeout_s=1.5)
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:
            store.wait(["through 0", "through 1"], timedelta(seconds=20))
        error = _error(lambda: dist.all_reduce(torch.ones(9), group=group))
        store.set(f"through {rank}", "yes")
        values = []
        dist.distributed_c10d._get_default_group().barrier().wait()
        for numel in (3, 400_000):
            x = torch.full((numel,), rank + 1.0)
            dist.all_reduce(x, group=group)
            values += x.unique().tolist()
        y = torch.empty(3, dtype=torch.float8_e5m2)
        dist.all_to_all_single(y, torch.full((3,), rank).to(y.dtype), group=group)
        return type(error), str(error), values, y.float().tolist()

    waited, also_waited, late = run_ranks(fn, 3)
    for outcome in (waited, also_waited, late):
        assert outcome[2:] == ([6.0, 6.0], [0.0, 1.0, 2.0])
    assert late[0] is PeerFailedError
    assert "gave up in this call" in late[1]
    first = next(o for o in (waited, also_waited) if o[0] is CollectiveTimeoutError)
    assert "Timed out after 1.5 s" in first[1]
    assert "did not arrive: rank 2" in waited[1]
    assert "did not arrive: rank 2" in also_waited[1]


def test_interrupted_rank_is_told_to_the_others_and_the_group_goes_on():
    def fn(rank, size):
        group = _group()
        store = dist.distributed_c10d._get_default_store()
        error = None
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(3), group=group)
            store.set("interrupted", "yes")
        else:
            store.wait(["interrupted"], timedelta(seconds=20))
            error = _error(lambda: dist.all_reduce(torch.ones(3), group=group))
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        return x.tolist(), type(error), str(error)

    (after, _, _), (also_after, kind, text) = run_ranks(fn, 2)
    assert after == also_after == [2.0] * 3
    assert kind is PeerFailedError
    assert "rank 0 gave up in this call" in text


def test_dead_peer_is_named_by_every_survivor():
    def fn(rank, size):
        group = _group()
        x = torch.ones(3_000_000)
        dist.all_reduce(x, group=group)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        error = _error(lambda: dist.all_reduce(x, group=group))
        elapsed_s = time.monotonic() - started
        again = _error(lambda: dist.all_reduce(x, group=group))
        return type(error), str(error), elapsed_s, again is not None

    outcomes = collect_ranks(fn, 3)
    assert outcomes[2].exitcode == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.error
        raised, text, elapsed_s, failed_again = outcome.value
        assert raised is PeerFailedError
        assert "all_reduce of group (0, 1, 2) failed: connection closed by peer" in text
        assert elapsed_s < 10
        assert failed_again


def test_ranks_that_cannot_share_memory_all_use_gloo():
    def fn(rank, size):
        register_backends()
        if rank == 0:
            # Enough for the store's file, too little for the region.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        group = dist.new_group(backend="comm_shm")
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        x = torch.full((700_000,), rank + 1.0)
        dist.all_reduce(x, group=group)
        y = torch.empty(size)
        dist.all_gather_into_tensor(y, torch.tensor([float(rank)]), group=group)
        dist.barrier(group=group)
        backend = group._get_backend(torch.device("cpu"))
        return backend.shares_memory, x.unique().tolist(), y.tolist()

    assert run_ranks(fn, 2) == [(False, [3.0], [0.0, 1.0])] * 2


def test_memory_is_bounded_whatever_is_sent():
    def fn(rank, size):
        group = _group()
        x = torch.ones(8_000_000)
        dist.all_reduce(x, group=group)
        mapped = 0
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "/dev/shm/comm-collectives" in line:
                    start, end = (int(part, 16) for part in line.split()[0].split("-"))
                    mapped += end - start
        return mapped

    for mapped in run_ranks(fn, 2):
        assert 0 < mapped < 4.1 * 2**20


@pytest.mark.parametrize("backend", ["comm_shm", "cpu:comm_shm,cuda:gloo"])
def test_default_group_can_be_of_this_backend(backend, tmp_path):
    def fn(rank, size):
        register_backends()
        register_backends()
        store = dist.FileStore(str(tmp_path / backend.replace(":", "_")), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        x = torch.ones(3)
        dist.all_reduce(x)
        told = [None] * size
        dist.all_gather_object(told, {"rank": rank})
        dist.destroy_process_group()
        return x.tolist(), [answer["rank"] for answer in told]

    assert run_ranks(fn, 2, init=False) == [([2.0] * 3, [0, 1])] * 2


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
    assert "still under way after 0.2 s" in text
    assert "did not arrive: rank 1" in text
