"""The fixture finds what was planted, and finds nothing where nothing is wrong."""

import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from devicetest import Machine, fake_cuda
from devicetest.nccl import NcclRuleError
from ranktest import run_ranks


def side_by_side(cuda: Machine, *, waits: bool) -> list[str]:
    """Two streams use one memory; return the kinds of races."""
    cuda.forget()
    x = torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    y.add_(1)
    x.add_(1)
    return sorted({race.kind for race in cuda.races})


def test_a_missing_wait_is_a_race_and_a_wait_is_none() -> None:
    with fake_cuda() as cuda:
        assert side_by_side(cuda, waits=True) == []
        assert side_by_side(cuda, waits=False) == [
            "read after write",
            "write after read",
            "write after write",
        ]
        assert all("test_fake_cuda.py" in race.first for race in cuda.races)


def test_what_raises_inside_leaves_torch_as_it_was() -> None:
    flag = torch.__future__.get_overwrite_module_params_on_conversion
    before = flag()
    with pytest.raises(RuntimeError, match="stop"), fake_cuda():
        raise RuntimeError("stop")
    assert flag() == before
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with fake_cuda():
        with pytest.raises(RuntimeError, match="uniform_"):
            torch.empty(3, device="cuda").uniform_(2, 1)
        assert torch.rand(4).equal(expected), "the host's numbers go on"


def test_values_gradients_and_devices_are_real() -> None:
    with fake_cuda(devices=2):
        layer = torch.nn.Linear(3, 2, device="cuda:1")
        x = torch.arange(3.0).to("cuda:1")
        layer(x).sum().backward()
        assert layer.weight.grad.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert layer.weight.device == torch.device("cuda", 1)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, device="cuda:0")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        assert x.to("cuda:0").device.index == 0 and x.cpu().tolist() == [0, 1, 2]
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda index: torch.cuda.set_device(index),
        lambda index: torch.ones(2, device=f"cuda:{index}"),
        lambda index: torch.ones(2).to(f"cuda:{index}"),
        lambda index: torch.cuda.Stream(device=index),
        lambda index: torch.cuda.device(index).__enter__(),
        lambda index: torch.cuda.synchronize(index),
    ],
    ids=["set_device", "new", "move", "stream", "block", "synchronize"],
)
def test_a_device_that_is_not_there_is_refused(use: Callable[[int], object]) -> None:
    with fake_cuda(devices=2):
        use(1)
        with pytest.raises(RuntimeError, match="invalid device ordinal 2; devices are 0 to 1"):
            use(2)


def test_pinned_memory_holds_garbage_until_the_host_has_waited() -> None:
    with fake_cuda() as cuda:
        x, host = torch.arange(4.0, device="cuda"), torch.empty(4, pin_memory=True)
        cuda.forget()
        host.copy_(x, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        assert host.tolist() != [0, 1, 2, 3]
        x.fill_(9)
        event.synchronize()
        assert host.tolist() == [0, 1, 2, 3]
        assert [sync.kind for sync in cuda.syncs] == ["event.synchronize"] and not cuda.races


def test_a_copy_to_a_device_reads_what_the_host_left_there() -> None:
    with fake_cuda() as cuda:
        host, x = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
        x.copy_(host, non_blocking=True)
        host.fill_(7)  # too early
        assert x.tolist() == [7] * 4
        x.copy_(host, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        host.fill_(1)
        assert x.tolist() == [7] * 4 and cuda.races == []


@pytest.mark.parametrize("waits", [True, False])
def test_what_goes_to_the_host_comes_back_right_where_its_stream_is_waited_for(waits: bool) -> None:
    with fake_cuda():
        x, y = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
        host = torch.empty(4, pin_memory=True)
        out, back = torch.cuda.Stream(), torch.cuda.Stream()
        out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(out):
            host.copy_(x, non_blocking=True)
        back.wait_stream(out if waits else torch.cuda.current_stream())
        with torch.cuda.stream(back):
            y.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(back)
        assert (y.tolist() == [0, 1, 2, 3]) == waits


def test_synchronize_waits_for_all_streams_of_its_device_and_for_no_other() -> None:
    with fake_cuda(devices=2) as cuda:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.full((4,), 3.0, device="cuda")
        there = torch.empty(4, pin_memory=True)
        with torch.cuda.device(1):
            there.copy_(torch.full((4,), 5.0, device="cuda:1"), non_blocking=True)
        torch.cuda.synchronize()
        x.add_(1)  # on another stream, but after all of its device
        cuda.check()
        assert there.tolist() != [5.0] * 4
        torch.cuda.synchronize(1)
        assert there.tolist() == [5.0] * 4


def test_what_stops_the_host_is_counted_with_its_line() -> None:
    with fake_cuda() as cuda:
        x = torch.arange(4.0, device="cuda")
        cuda.forget()
        x.sum().item()
        x[x > 1]
        torch.empty(4).copy_(x, non_blocking=True)
        assert [sync.kind for sync in cuda.syncs] == [
            "aten::_local_scalar_dense",
            "aten::index",
            "copy to the host of pageable memory",
        ]
        assert all("test_fake_cuda.py" in sync.where for sync in cuda.syncs)


def test_memory_is_counted_and_must_not_be_freed_under_a_stream() -> None:
    with fake_cuda() as cuda:
        x = torch.ones(1 << 18, device="cuda")
        assert torch.cuda.memory_allocated() == 1 << 20
        side = torch.cuda.Stream()
        for recorded in (True, False):
            side.wait_stream(torch.cuda.current_stream())
            y = x * 2
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.mul_(2)
            if recorded:
                y.record_stream(side)
            del y
            assert torch.cuda.memory_allocated() == 1 << 20
            kinds = [race.kind for race in cuda.races]
            assert kinds == [] if recorded else kinds == ["freed while another stream uses it"]
        assert torch.cuda.max_memory_allocated() == 2 << 20


@pytest.mark.parametrize("waits", [True, False])
def test_a_recorded_stream_stands_for_all_that_it_waits_for_itself(waits: bool) -> None:
    with fake_cuda() as cuda:
        side, far = torch.cuda.Stream(), torch.cuda.Stream()
        y = torch.ones(1 << 10, device="cuda")
        y.record_stream(side)
        for each in (side, far):
            each.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(far):
            y.mul_(2)
        if waits:
            side.wait_stream(far)
        del y
        kinds = [race.kind for race in cuda.races]
        assert kinds == ([] if waits else ["freed while another stream uses it"])


def test_a_tensor_that_is_given_other_memory_has_its_values_and_frees_its_own() -> None:
    with fake_cuda() as cuda:
        weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        before = torch.cuda.memory_allocated()
        weight.data = torch.arange(3.0, device="cuda")  # as a tensor that is computed again
        (weight * 2).sum().backward()
        assert weight.tolist() == [0, 1, 2] and weight.grad.tolist() == [2, 2, 2]
        weight.grad = None
        weight.data = weight.data.new_empty(0)  # as what is needed no more
        assert weight.numel() == 0 and torch.cuda.memory_allocated() <= before - 4000
        assert cuda.races == []


def test_a_failed_page_lock_leaves_its_error_to_the_next_operation() -> None:
    with fake_cuda() as cuda:
        memory = torch.zeros(64, dtype=torch.uint8)
        cuda.fail_page_locks = 304
        assert torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 64, 0) == 304
        with pytest.raises(RuntimeError, match="304"):
            torch.zeros(1, device="cuda")
        assert torch.zeros(1, device="cuda").tolist() == [0]
        with pytest.raises(RuntimeError, match="page-lock"):
            torch.empty(3, pin_memory=True)
        cuda.fail_page_locks = 0
        assert torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 64, 0) == 0
        assert memory[3:].is_pinned()


def test_threads_have_their_own_streams_and_see_the_devices() -> None:
    found = []

    def work() -> None:
        torch.cuda.set_device(1)
        found.append(torch.zeros(1, device="cuda").device.index)

    with fake_cuda(devices=2), torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert torch.cuda.current_device() == 0
    assert found == [1] and not torch.cuda.is_available()


def test_generators_are_a_devices_own_and_go_on_where_they_stood() -> None:
    with fake_cuda(devices=2):
        own = torch.Generator("cuda:1").manual_seed(3)
        assert own.device == torch.device("cuda", 1) and isinstance(own, torch.Generator)
        first = torch.rand(2, device="cuda:1", generator=own).tolist()
        torch.manual_seed(3)
        assert torch.rand(2, device="cuda:1").tolist() == first
        state = torch.cuda.get_rng_state(0)
        torch.rand(9)  # the host's generator is another one
        numbers = torch.rand(2, device="cuda:0").tolist()
        torch.cuda.set_rng_state(state, 0)
        assert torch.rand(2, device="cuda:0").tolist() == numbers == first


def test_gradients_follow_a_move_back_to_the_device_from_which_it_came() -> None:
    with fake_cuda(devices=2):
        x = torch.ones(3, requires_grad=True)
        y = x.to("cuda:1", torch.float64).to("cuda:0")
        (y.cpu() * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.device.type == "cpu" and x.grad.tolist() == [2, 2, 2]
        low = torch.ones(2, 2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (low @ low).float().sum().backward()  # the engine casts the gradient
        assert low.grad is not None and low.grad.is_cuda and low.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("width", [8, 6])
def test_causal_attention_has_its_mask_on_the_device(width: int) -> None:
    shapes = [(1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, width)]  # of latent attention: narrow values
    host = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with fake_cuda():
        mine = [x.detach().cuda().requires_grad_() for x in host]
        y = functional.scaled_dot_product_attention(*mine, is_causal=True)
        y.square().sum().backward()
        found = [x.cpu() for x in (y.detach(), *(x.grad for x in mine if x.grad is not None))]
    expected = functional.scaled_dot_product_attention(*host, is_causal=True)
    expected.square().sum().backward()
    wanted = [expected.detach(), *(x.grad for x in host if x.grad is not None)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_group_of_nccl_takes_device_tensors_alone_and_orders_streams_by_wait() -> None:
    def fn(rank: int, world_size: int) -> None:
        with fake_cuda(devices=2) as cuda:
            torch.cuda.set_device(rank)
            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2, device_id=None
            )
            only = dist.new_group(backend="nccl")
            assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
            x, host = torch.ones(4, device="cuda"), torch.ones(4)
            dist.all_reduce(x)
            dist.all_reduce(host)
            assert x.tolist() == host.tolist() == [2] * 4
            with pytest.raises(NcclRuleError, match="tensor of the CPU"):
                dist.all_reduce(host, group=only)
            assert cuda.races == []
            work = dist.all_reduce(x, group=only, async_op=True)
            x.add_(1)  # planted: nobody has waited
            assert [race.kind for race in cuda.races] == ["write after write"]
            work.wait()
            cuda.forget()
            work = dist.all_reduce(x, group=only, async_op=True)
            work.wait()
            x.add_(1)
            assert cuda.races == [] and cuda.syncs == []
            work.wait(timedelta(seconds=20))
            assert [sync.kind for sync in cuda.syncs] == ["wait with a limit"]
            torch.cuda.set_device(0)
            with pytest.raises(NcclRuleError, match="both on cuda:0"):
                dist.all_reduce(torch.ones(1, device="cuda"), group=dist.new_group(backend="nccl"))

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(fn, 2, init=False)


def test_faults_of_forked_ranks_come_to_the_process_that_has_the_devices() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank:
            assert side_by_side(cuda, waits=False)

    with fake_cuda() as cuda:
        run_ranks(fn, 2, init=False)
        (told,) = {line.split(": ", 1)[1] for line in cuda.found.all() if "read after" in line}
        assert "test_fake_cuda.py" in told and cuda.races == []
        with pytest.raises(AssertionError, match=r"(?s)found on fake devices:.*in process \d+"):
            cuda.check()
        cuda.forget()
        cuda.check()


def test_a_helper_thread_that_means_device_zero_is_found() -> None:
    def work(device: str) -> None:
        torch.zeros(1, device=device)

    with fake_cuda(devices=2) as cuda:
        torch.cuda.set_device(1)
        for device in ("cuda:1", "cuda"):
            assert cuda.problems == []
            thread = threading.Thread(target=work, args=(device,), name="helper")
            thread.start()
            thread.join()
        assert len(cuda.problems) == 1 and "thread 'helper'" in cuda.problems[0]
        assert cuda.problems[0].startswith("test_fake_cuda.py")
        cuda.forget()


def test_properties_of_a_device_are_those_that_its_other_calls_say() -> None:
    with fake_cuda(devices=2) as cuda:
        cuda.memory_bytes = 6000
        found = torch.cuda.get_device_properties("cuda:1")
        assert found.name == torch.cuda.get_device_name(1)
        assert (found.major, found.minor) == torch.cuda.get_device_capability(1)
        assert found.total_memory == torch.cuda.mem_get_info(1)[1]
        assert found.multi_processor_count > 0
        assert torch.cuda.get_device_properties().name == found.name
        with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
            torch.cuda.get_device_properties(2)
        with pytest.raises(AttributeError, match="warp_size"):
            _ = found.warp_size


def test_a_device_has_so_much_memory_and_what_is_freed_can_be_had_again() -> None:
    with fake_cuda(devices=2) as cuda:
        x = torch.zeros(1000, device="cuda:1")
        cuda.memory_bytes = 6000
        assert torch.cuda.mem_get_info(1) == (2000, 6000)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4000 bytes\. GPU 1"):
            x + 1
        torch.zeros(1000, device="cuda:0")
        del x
        torch.zeros(1500, device="cuda:1")


def test_tensors_without_a_device_are_on_the_default_one() -> None:
    with fake_cuda(devices=2):
        torch.set_default_device("cuda")
        try:
            torch.cuda.set_device(1)
            made = (torch.tensor([]), torch.tensor(1.5), torch.as_tensor([2]), torch.zeros(3))
            assert [x.get_device() for x in made] == [1] * 4
            assert torch.tensor(1, device="cpu").device.type == "cpu"
            assert torch.get_default_device() == torch.device("cuda", 1)
        finally:
            torch.set_default_device(None)
        assert torch.tensor(1).device.type == "cpu"
