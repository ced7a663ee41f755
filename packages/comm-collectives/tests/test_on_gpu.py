"""CUDA tensors: alone, over gloo (staged on the host), over nccl with one rank, and with two.

Everything runs in forked ranks, so that the parent never initialises CUDA.
"""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.base.wire import as_bytes
from comm_collectives.call.calls import Call
from comm_collectives.call.groups.groups import group_state
from comm_collectives.checking import FEW_DTYPES, check_machine, on_devices
from comm_collectives.errors import CommValueError, PeerFailedError
from ranktest import Outcome, collect_ranks, run_ranks

pytestmark = pytest.mark.gpu


def _layer(device: str, group: dist.ProcessGroup | None, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    idx = torch.rand(20, 4, generator=generator).topk(2, dim=1).indices.to(device)
    weights = torch.rand(20, 2, generator=generator, dtype=torch.float64).to(device)
    weights.requires_grad_()
    sent = cc.dispatch(x, idx, weights, num_experts=4, group=group, expert_alignment=4)
    assert sent.x.device.type == device
    out = cc.combine(sent.x.square() * sent.topk_weights[:, None], sent.handle)
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [t.detach().cpu() for t in (out, x.grad, weights.grad)]


def test_dispatch_on_cuda_equals_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        for got, want in zip(_layer("cuda", None, 0), _layer("cpu", None, 0), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    run_ranks(fn, 1, init=False)


def test_cuda_tensors_over_gloo_equal_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        for got, want in zip(_layer("cuda", group, rank), _layer("cpu", group, rank), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        x = torch.full((2, 3), rank, dtype=torch.int16, device="cuda")
        y = cc.all_to_all(x)
        assert y.is_cuda
        assert y[:, 0].tolist() == [0, 1]
        assert cc.all_reduce(x.t()).flatten().tolist() == [1] * 6

    run_ranks(fn, 2)


@pytest.mark.gpu(needs="tensors of no subclass")
def test_cuda_tensors_are_sent_as_values_over_gloo() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.full((2, 3), rank, dtype=torch.int16, device="cuda")
        got = cc.broadcast_nested([x] if rank == 1 else None, src=1, device="cuda")
        assert isinstance(got, list)
        assert got[0].is_cuda
        assert bool((got[0] == 1).all())
        if rank == 0:
            cc.isend_tensors([x.t(), x[:0]], dst=1).wait()
        else:
            received, empty = cc.recv_tensors(src=0, device="cuda")
            assert received.is_cuda
            assert received.shape == (3, 2)
            assert not received.any()
            assert empty.shape == (0, 3)

    run_ranks(fn, 2)


@pytest.mark.gpu(needs="tensors of no subclass")
def test_every_cell_and_mistake_ends_as_it_must_on_two_ranks_of_the_devices() -> None:
    """Over NCCL where each rank has a device of its own, else over gloo."""
    backend = on_devices("gloo", 2)
    assert check_machine(2, backend=backend, dtypes=FEW_DTYPES).problems == []


def test_nccl_with_one_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        state = group_state(None)
        assert state.control_type == "cuda"
        cuda = torch.device("cuda")
        assert state.transport_type(cuda) == state.transport_type(torch.device("cpu")) == "cuda"
        value = {"a": torch.ones(2, dtype=torch.uint16), "b": [None, "x"]}
        got = cc.broadcast_nested(value, src=0, device="cuda")
        assert isinstance(got, dict)
        assert got["a"].is_cuda
        # One rank needs no exchange; the transfers themselves, as many ranks make them:
        x = torch.arange(6, device="cuda").view(3, 2)
        transport = state.transport
        for timeout_s in (None, 20.0):
            call = Call(state, "test", timeout_s=timeout_s)
            y = torch.empty_like(x)
            source, target, size = as_bytes(x), as_bytes(y), [x.nbytes]
            call.run(lambda t=target, s=source, n=size: transport.exchange(t, s, n, n))
            assert torch.equal(y, x)
            y = torch.empty_like(x)
            target = as_bytes(y)
            call.run(lambda t=target, s=source: transport.all_gather(t, s))
            assert torch.equal(y, x)
            total = x.clone()
            call.run(lambda t=total: transport.all_reduce(t, "sum"))
            target = as_bytes(total)
            call.run(lambda t=target: transport.broadcast(t, 0))
            assert torch.equal(total, x)
        assert cc.all_reduce(x.t()).tolist() == x.t().tolist()
        assert cc.all_to_all(x).tolist() == x.tolist()
        dist.destroy_process_group()

    run_ranks(fn, 1, init=False)


def _busy(x: torch.Tensor) -> torch.Tensor:
    """Keep the current stream busy for a while, and return `x` + 1 at its end."""
    torch.cuda._sleep(200_000_000)
    return x + 1


def test_asynchronous_call_waits_for_the_stream_that_makes_its_input() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.full((1000,), float(rank), device="cuda")
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            handle = cc.all_reduce(_busy(x), async_op=True)
            total = handle.wait()
            # Used on the stream that waited, without a synchronisation of the host.
            doubled = total * 2
        stream.synchronize()
        assert doubled.unique().tolist() == [6.0]

    run_ranks(fn, 2)


def test_memory_of_an_asynchronous_call_is_not_reused_too_early() -> None:
    def fn(rank: int, world_size: int) -> None:
        main = torch.cuda.current_stream()
        for turn in range(20):
            x = torch.full((1 << 20,), float(rank + turn), device="cuda")
            handle = cc.all_to_all(x, async_op=True)
            del x
            torch.full((1 << 20,), -1.0, device="cuda")  # would land in the freed input
            y = handle.wait()
            kept = y.clone()
            del y, handle
            torch.full((1 << 20,), -2.0, device="cuda")  # would land in the freed result
            main.synchronize()
            half = 1 << 19
            assert kept[:half].unique().tolist() == [float(turn)]
            assert kept[half:].unique().tolist() == [float(turn + 1)]

    run_ranks(fn, 2)


def test_asynchronous_call_over_nccl_orders_streams_by_events() -> None:
    def fn(rank: int, world_size: int) -> None:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.zeros(1000, device="cuda", requires_grad=True)
        handle = cc.all_reduce(_busy(x), async_op=True)
        y = handle.wait()
        (y * 3).sum().backward()
        assert y.unique().tolist() == [1.0]
        assert x.grad is not None
        assert x.grad.unique().tolist() == [3.0]
        dist.destroy_process_group()

    run_ranks(fn, 1, init=False)


def test_gradients_are_reduced_while_the_backward_runs_on_cuda() -> None:
    def fn(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
        x = torch.full((8, 64), 1.0 + rank, device="cuda")
        with cc.overlap_gradients(model.parameters(), op="sum", bucket_bytes=1):
            model(x).square().sum().backward()
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).square().sum().backward()
        for p, grad in zip(model.parameters(), got, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(grad, cc.all_reduce(p.grad))

    run_ranks(fn, 2)


def test_quantised_dispatch_on_cuda_equals_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(20, 256, generator=generator)
        idx = torch.rand(20, 4, generator=generator).topk(2, dim=1).indices
        weights = torch.rand(20, 2, generator=generator)
        for route in ("flat", "dedup"):
            options = cc.MoeOptions(route=route, payload="float8_e4m3")
            rows = []
            for device in ("cuda", "cpu"):
                args = [t.to(device) for t in (x, idx, weights)]
                sent = cc.dispatch(*args, num_experts=4, group=group, options=options)
                rows.append(sent.x.cpu())
            torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=0)

    run_ranks(fn, 2)


def over_nccl(folder: Path, program: Callable[[int], object]) -> list[Outcome]:
    """Run a program on two ranks, each with a card of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two cards are needed")

    def fn(rank: int, world_size: int) -> object:
        torch.cuda.set_device(rank)
        store = dist.FileStore(str(folder / "store"), 2)
        limit = timedelta(seconds=60)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=limit)
        return program(rank)

    return collect_ranks(fn, 2, init=False, timeout_s=120)


def test_calls_in_a_cuda_graph_are_replayed_or_refused_by_name(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        x = torch.ones(4, 2, device="cuda")
        splits = [1, 3] if rank == 0 else [3, 1]

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            rows = cc.all_to_all(x * (rank + 1), input_splits=splits, output_splits=splits)
            return cc.all_reduce(x * (rank + 1)), rows

        step()  # NCCL makes its communicator outside of a graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total, rows = step()
        for value in (2.0, 5.0):
            x.fill_(value)
            graph.replay()
            assert total.unique().tolist() == [3 * value]
            assert rows[:, 0].tolist() == [value] * splits[0] + [2 * value] * splits[1]
        told = pytest.raises(CommValueError, match="all_gather cannot be captured")
        with told, torch.cuda.graph(torch.cuda.CUDAGraph()):
            cc.all_gather(x)
        assert cc.all_reduce(torch.ones(3, device="cuda")).tolist() == [2] * 3

    for outcome in over_nccl(tmp_path, program):
        assert outcome.ok, outcome.error


@pytest.mark.gpu(needs="silence of NCCL here; call/devices/test_launches.py has it")
def test_a_communicator_whose_peer_died_is_aborted_and_names_it(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        x = torch.ones(1000, device="cuda")
        for _ in range(3):
            cc.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerFailedError) as error:
            while True:  # NCCL itself waits until torch's watchdog ends the process
                cc.all_reduce(x)
                torch.cuda.synchronize()
        text = str(error.value)
        with pytest.raises(PeerFailedError):
            cc.all_reduce(x)
        return text

    survivor, _ = over_nccl(tmp_path, program)
    assert survivor.ok, survivor.error
    assert "rank 1 has ended" in str(survivor.value)


@pytest.mark.gpu(needs="tensors that a compiler traces")
def test_a_compiled_function_goes_around_calls_on_a_device(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            return cc.all_reduce(x * 2) + 1

        x = torch.full((3,), 1.0 + rank, device="cuda", requires_grad=True)
        y = step(x)
        y.sum().backward()
        assert y.tolist() == [7] * 3
        assert x.grad is not None and x.grad.tolist() == [4] * 3

    for outcome in over_nccl(tmp_path, program):
        assert outcome.ok, outcome.error
