import gc
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="the recorder needs torch")

from torch import distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from gpu_alloc import AllocatorConfig, AllocError, TraceEvent, replay  # noqa: E402
from gpu_alloc.torch import TraceRecorder  # noqa: E402
from ranktest import run_ranks  # noqa: E402


def live_bytes(events: list[TraceEvent]) -> int:
    sizes: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            assert event.block_id not in sizes
            sizes[event.block_id] = event.size_bytes
        elif event.action == "free":
            del sizes[event.block_id]
    return sum(sizes.values())


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_storage_is_counted_once_and_freed_when_torch_drops_it(fake: bool) -> None:
    mode = FakeTensorMode() if fake else torch.no_grad()
    with mode, TraceRecorder() as recorder:
        x = torch.zeros(1000)
        view = x.view(10, 100)[3:]
        assert live_bytes(recorder.events) == 4000
        y = x + 1
        assert live_bytes(recorder.events) == 8000
        del x
        assert live_bytes(recorder.events) == 8000, "the view keeps the storage"
        del view
        gc.collect()
        assert live_bytes(recorder.events) == 4000
        del y
        gc.collect()
        assert live_bytes(recorder.events) == 0


def _backward(rank: int, world_size: int) -> None:
    w = torch.randn(64, 64, requires_grad=True)
    with TraceRecorder() as recorder:
        loss = (w @ w).exp().sum()
        before = live_bytes(recorder.events)
        assert before >= 64 * 64 * 4
        loss.backward()
        assert live_bytes(recorder.events) == 64 * 64 * 4 + 4, "the gradient and the loss"
    result = replay(recorder.events, AllocatorConfig())
    assert result.peak_live_bytes >= before


def test_what_backward_saves_is_live_until_backward() -> None:
    run_ranks(_backward, 1, init=False)  # a process that has run a backward cannot fork


def test_fake_and_real_runs_of_a_step_allocate_the_same() -> None:
    def step() -> list[int]:
        with TraceRecorder() as recorder:
            layer = torch.nn.Linear(32, 48)
            layer(torch.ones(7, 32)).square().mean().backward()
        return [event.size_bytes for event in recorder.events if event.action == "alloc"]

    def both(*_: int) -> tuple[list[int], list[int]]:
        with FakeTensorMode():
            fake = step()
        return fake, step()

    # In a process of its own: fake tensors start threads, after which nothing can be forked.
    fake, real = run_ranks(both, 1, init=False)[0]
    assert fake == real
    assert len(fake) > 5


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_an_operator_that_writes_into_memory_allocates_none(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad(), TraceRecorder() as recorder:
        left, whole = torch.ones(16), torch.empty(64)
        torch.add(left, left, out=whole[16:32])
        torch.topk(left, 2, out=(whole[:2], torch.empty(2, dtype=torch.int64)))
        whole[32:].add_(1)
    sizes = [event.size_bytes for event in recorder.events if event.action == "alloc"]
    assert sizes == [64, 256, 16]


def _sparse(rank: int, world_size: int) -> None:
    with TraceRecorder() as recorder:
        table = torch.nn.Embedding(100, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        table(torch.arange(5)).sum().backward()
        optimizer.step()
        before = live_bytes(recorder.events)
        table.weight.grad = None
        gc.collect()
        assert before - live_bytes(recorder.events) == 5 * 8 * 4 + 5 * 8  # values, indices


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_are_recorded_by_what_has_their_memory() -> None:
    run_ranks(_sparse, 1, init=False)  # as above
    with TraceRecorder() as recorder:
        csr = torch.ones(3, 3).to_sparse_csr()
        assert torch.ones(3, 3).to_mkldnn().is_mkldnn
        gc.collect()
        assert live_bytes(recorder.events) >= 9 * 4 + (9 + 4) * 8
        assert (csr @ torch.ones(3, 3)).sum() == 27
        del csr
        gc.collect()
        assert live_bytes(recorder.events) == 0


def test_empty_tensors_and_inplace_operators_record_nothing() -> None:
    x = torch.zeros(8)
    with TraceRecorder() as recorder:
        torch.zeros(0)
        seen = torch.ones(8)
        count = len(recorder.events)
        seen.add_(1).mul_(2)
        assert len(recorder.events) == count
        x.copy_(seen)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn_x2", "bfloat16"])
def test_narrow_types_are_sized_by_their_storage(name: str) -> None:
    dtype = getattr(torch, name)
    with TraceRecorder() as recorder:
        kept = torch.empty(96, dtype=dtype)
    assert recorder.events[0].size_bytes == kept.untyped_storage().nbytes()
    assert recorder.events[0].size_bytes == 96 * (2 if name == "bfloat16" else 1)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_storage_that_is_resized_gives_its_memory_back_and_takes_other(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad(), TraceRecorder() as recorder:
        weight = torch.zeros(1000)
        recorder.label("parameters", [weight])
        weight.untyped_storage().resize_(0)
        assert live_bytes(recorder.events) == 0
        recorder.mark("step")
        recorder.mark("step")
        recorder.forget("step")
        weight.untyped_storage().resize_(4000)
        assert live_bytes(recorder.events) == 4000
        grown = torch.zeros(10)
        grown.resize_(500)
        torch.add(torch.ones(700), 1.0, out=grown.resize_(0))
        assert live_bytes(recorder.events) == 4000 + 2800
        del grown, weight
        gc.collect()
    assert live_bytes(recorder.events) == 0
    allocated = [(e.size_bytes, e.note) for e in recorder.events if e.action == "alloc"]
    assert (4000, "parameters") in allocated, "memory taken again is what it was before"
    torch.zeros(10).untyped_storage().resize_(0)
    assert len([e for e in recorder.events if e.action == "alloc"]) == len(allocated)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_what_was_empty_or_is_from_before_is_recorded_once_it_is_resized(fake: bool) -> None:
    before, of_thread = torch.zeros(1000), torch.zeros(10).untyped_storage()
    with FakeTensorMode() if fake else torch.no_grad(), TraceRecorder() as recorder:
        ones = torch.ones(700)
        total, rows, bare = torch.empty(0), torch.empty(0), torch.empty(0)
        torch.add(ones, ones, out=total)
        rows.resize_(500)
        bare.untyped_storage().resize_(600)
        sizes = [event.size_bytes for event in recorder.events if event.action == "alloc"]
        assert sizes == [2800, 2800, 2000, 600]
        del ones, total, rows, bare
        gc.collect()
        assert live_bytes(recorder.events) == 0
    with TraceRecorder() as recorder:  # as of weights that are sharded before
        before.untyped_storage().resize_(0)
        assert recorder.events == []
        before.untyped_storage().resize_(8000)
        thread = threading.Thread(target=of_thread.resize_, args=(400,))
        thread.start()
        thread.join()
    assert [event.size_bytes for event in recorder.events] == [8000]


def test_data_that_becomes_a_tensor_is_recorded() -> None:
    with TraceRecorder() as recorder:
        kept = torch.tensor(list(range(100)))
        assert live_bytes(recorder.events) == 800
        del kept
        gc.collect()
        assert live_bytes(recorder.events) == 0


def test_a_free_that_a_collection_notes_inside_an_allocation_mixes_no_labels() -> None:
    class Knot:
        def __init__(self) -> None:
            self.me, self.held = self, torch.zeros(10)

    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()  # so that collections take no time
    try:
        with TraceRecorder() as recorder:
            for number in range(1, 150):
                gc.disable()
                Knot()
                gc.set_threshold(number)  # collects after so many objects, wherever that is
                gc.enable()
                kept = torch.zeros(1000)
                gc.set_threshold(*threshold)
                recorder.label(f"kept {number}", [kept])
                recorder.mark("end")
                recorder.forget("end")
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        gc.enable()
    assert [event.note for event in recorder.events if event.size_bytes == 4000] == ["kept 149"]


def _wrapped(rank: int, world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    shard = DTensor.from_local(torch.ones(1000), mesh, [Shard(0)])
    assert shard.shape == (4000,)
    with TraceRecorder() as recorder:
        moments = torch.zeros_like(shard)
        assert live_bytes(recorder.events) == 4000, "what this rank has of it"
        recorder.label("moments", [moments])
        recorder.add([shard])
    assert [(e.size_bytes, e.note) for e in recorder.events] == [(4000, "moments"), (4000, "")]
    with TraceRecorder() as recorder:
        rows = torch.nested.nested_tensor([torch.ones(10), torch.ones(20)], layout=torch.jagged)
        before = live_bytes(recorder.events)
        assert (rows * 2).shape[0] == 2
        assert max(e.size_bytes for e in recorder.events) == 120
        gc.collect()
        assert live_bytes(recorder.events) == before
    dist.destroy_process_group()


def test_tensors_that_wrap_others_are_recorded_by_what_has_their_memory() -> None:
    run_ranks(_wrapped, 1, init=False)


def test_operators_of_higher_order_are_recorded_by_what_they_return() -> None:
    x = torch.ones(10)
    with TraceRecorder() as recorder:
        kept = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        assert live_bytes(recorder.events) >= kept.nbytes


def test_a_fake_tensor_is_of_the_device_that_it_names() -> None:
    with FakeTensorMode(), TraceRecorder() as recorder:
        kept = torch.zeros(10), torch.zeros(20, device="cuda:1")
        assert {device: len(events) for device, events in recorder.traces().items()} == {
            "cpu": 1,
            "cuda:1": 1,
        }
        assert len(kept) == 2


def test_threads_that_start_meanwhile_are_recorded_if_asked_for() -> None:
    def recorded(all_threads: bool) -> list[int]:
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.zeros(1000)))
        with TraceRecorder(all_threads=all_threads) as recorder:
            thread.start()
            thread.join()
            made.append(made[0] + 1)
            made.clear()
        assert live_bytes(recorder.events) == 0
        return [event.size_bytes for event in recorder.events if event.action == "alloc"]

    assert recorded(all_threads=True) == [4000, 4000]
    assert recorded(all_threads=False) == [4000]
    started = []
    thread = threading.Thread(target=lambda: started.append(sys.getprofile()))
    thread.start()
    thread.join()
    assert started == [threading.getprofile()], "nothing is left behind"


def test_a_thread_that_outlives_the_recording_records_no_longer() -> None:
    recorder, seen, go_on = TraceRecorder(all_threads=True), threading.Event(), threading.Event()

    def work() -> None:
        torch.zeros(8)
        seen.set()
        go_on.wait()
        torch.zeros(16)

    thread = threading.Thread(target=work)
    with recorder:
        thread.start()
        seen.wait()
    go_on.set()
    thread.join()
    assert [event.size_bytes for event in recorder.events] == [32, 32]


def test_phases_are_marked_also_when_they_raise() -> None:
    recorder = TraceRecorder()
    with pytest.raises(RuntimeError, match="stop"), recorder, recorder.phase("forward"):
        kept = torch.ones(8)
        raise RuntimeError("stop")
    assert kept.numel() == 8
    assert [(e.action, e.note) for e in recorder.events] == [
        ("mark", "forward"),
        ("alloc", ""),
        ("mark", "end of forward"),
    ]
    assert replay(recorder.events, AllocatorConfig()).peak_live_bytes == 32


def test_another_device_is_left_out() -> None:
    with TraceRecorder(device="cuda") as recorder:
        torch.ones(8)
    assert recorder.events == []
    with TraceRecorder(device="cpu") as recorder:
        torch.ones(8)
    assert len(recorder.events) == 2


def test_a_recorder_is_entered_once_and_sees_no_free_after_its_end() -> None:
    with TraceRecorder() as recorder:
        kept = torch.ones(8)
    del kept
    gc.collect()
    assert len(recorder.events) == 1
    with pytest.raises(AllocError, match="once"), recorder:
        raise AssertionError


def test_missing_torch_is_one_clear_error() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "try:\n    import gpu_alloc.torch\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "pip install torch" in done.stdout


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_streams_are_recorded() -> None:
    stream = torch.cuda.Stream()
    with TraceRecorder(device="cuda") as recorder:
        torch.ones(8, device="cuda")
        with torch.cuda.stream(stream):
            torch.ones(8, device="cuda")
    streams = [event.stream for event in recorder.events if event.action == "alloc"]
    assert streams == [torch.cuda.default_stream().cuda_stream, stream.cuda_stream]


def test_what_is_over_is_forgotten_and_what_lives_stays_labelled_and_is_freed_later() -> None:
    with TraceRecorder() as recorder:
        kept = torch.zeros(1000)
        for number in range(4):
            with recorder.phase(f"step {number}"):
                held = torch.zeros(100)
                del held
        inside = torch.zeros(500)
        before = list(recorder.events)
        recorder.forget("step 9")
        assert recorder.events == before, "there is no such mark"
        recorder.forget("step 2")
        recorder.label("kept", [kept])
        recorder.label("inside", [inside])
        recorder.mark("end")
        del kept
        gc.collect()
    sizes = [(e.action, e.size_bytes, e.note) for e in recorder.events]
    step = [("mark", 0, "step {}"), ("alloc", 400, ""), ("free", 400, ""), ("mark", 0, "end of {}")]
    steps = [(a, size, note.format("step 3" if "end" in note else 3)) for a, size, note in step]
    assert sizes[0] == ("alloc", 4000, "kept")
    assert [s[2] for s in sizes if s[0] == "mark"] == [
        "step 2", "end of step 2", "step 3", "end of step 3", "end",
    ]  # fmt: skip
    assert sizes[5:9] == steps
    assert sizes[9:] == [("alloc", 2000, "inside"), ("mark", 0, "end"), ("free", 4000, "")]
    replay(recorder.events, AllocatorConfig())


def test_a_request_that_failed_is_made_by_replays() -> None:
    with TraceRecorder() as recorder:
        held = torch.zeros(1 << 20)
        recorder.failed(8 << 20)
        del held
    found = replay(recorder.events, AllocatorConfig(), 10 << 20)
    assert found.oom is not None and found.oom.requested_bytes == 8 << 20


def test_a_trace_of_each_device_has_all_marks_and_its_own_blocks() -> None:
    with TraceRecorder() as recorder:
        recorder.mark("step 1")
        kept = [torch.empty(10, device=device) for device in ("cpu", "meta", "cpu")]
        recorder.mark("step 2")
        recorder.failed(1 << 40)
        del kept[0]
        recorder.forget("step 2")
        traces = recorder.traces()
    assert set(traces) == {"cpu", "meta"}
    for name, blocks in (("cpu", ["alloc", "alloc"]), ("meta", ["alloc"])):
        actions = [event.action for event in traces[name]]
        assert actions == [*blocks, "mark", *(["free"] if name == "cpu" else [])]
    assert sum(map(len, traces.values())) == len(recorder.events) - 2 + 1
