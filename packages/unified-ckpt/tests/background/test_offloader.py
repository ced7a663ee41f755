import threading

import pytest
import torch

from devicetest import fake_cuda
from unified_ckpt import Shard
from unified_ckpt.background.offloader import Offloader
from unified_ckpt.errors import SaveError
from unified_ckpt.geometry import shard
from unified_ckpt.geometry.tensors.dtypes import _ALL
from unified_ckpt.snapshots.shared_memory import SharedMemory
from unified_ckpt.snapshots.staging import StagingLayout


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.of(key, tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def never(error: SaveError) -> None:
    raise AssertionError(error)


def test_chunks_arrive_whoever_copies_them() -> None:
    tensors = [
        torch.rand(1000, 33),
        torch.rand(40, 50).t(),
        torch.tensor(3),
        torch.rand(9, 8) > 0.5,
    ]
    tensors.append(torch.view_as_complex(torch.rand(30, 2)).conj())
    shards = [whole(str(n), t) for n, t in enumerate(tensors)]
    layout = StagingLayout.of({"model": shards})
    offloader = Offloader(6)
    for issued in range(9):
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        views, done = layout.views(memory), []
        offloader.start(tensors, views, layout)
        for _ in range(issued):
            offloader.issue_next()
        offloader.finish(lambda done=done: done.append(True), on_error=never, timeout_s=10)
        assert done == [True] and offloader.chunks_left == 0
        assert all(torch.equal(v, t) for v, t in zip(views, tensors, strict=True)), issued
    offloader.close()


def test_large_tensors_of_every_dtype_arrive() -> None:
    raw = torch.randint(0, 256, (3 << 18,), dtype=torch.uint8)
    dtypes = [d.torch_dtype for d in _ALL if d.torch_dtype not in (None, torch.bool)]
    tensors = [raw.clone().view(dtype) for dtype in dtypes]
    tensors += [raw > 127, torch.rand(1 << 17).requires_grad_(), raw[1:], torch.tensor(3.0)]
    layout = StagingLayout.of({"model": [whole(str(n), t) for n, t in enumerate(tensors)]})
    views = layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    offloader, done = Offloader(5), []
    offloader.start(tensors, views, layout)
    offloader.issue_next()
    offloader.finish(lambda: done.append(True), on_error=never, timeout_s=60)
    offloader.close()
    for view, tensor in zip(views, tensors, strict=True):
        bits, wanted = (t.detach().flatten().view(torch.uint8) for t in (view, tensor))
        assert torch.equal(bits, wanted), tensor.dtype
    assert done == [True]


def test_a_copy_that_fails_or_hangs_is_an_error_and_the_next_works() -> None:
    tensors = [torch.rand(10).t(), torch.rand(6, 4).t()]
    layout = StagingLayout.of({"model": [whole(str(n), t) for n, t in enumerate(tensors)]})
    views = layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    offloader, called = Offloader(1), []
    wrong = [views[0], torch.empty(5, 5)]
    offloader.start(tensors, wrong, layout)
    with pytest.raises(SaveError, match=r"copying the state failed: The size of tensor"):
        offloader.finish(lambda: called.append(1), on_error=never, timeout_s=10)
    assert called == []
    offloader.start(tensors, views, layout)
    offloader.finish(lambda: called.append(1), on_error=never, timeout_s=10)
    assert called == [1] and torch.equal(views[1], tensors[1])
    offloader.close()


@pytest.mark.gpu
def test_device_tensors_reach_pinned_memory_in_order_and_take_no_device_memory() -> None:
    source = torch.rand(4_000_000, device="cuda")
    kept = source.clone()
    layout = StagingLayout.of({"model": [whole("w", source)]})
    memory = SharedMemory.allocate(layout.num_bytes, purpose="a test")
    memory.pin()
    assert memory.tensor.is_pinned()
    views, offloader = layout.views(memory.tensor), Offloader(8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        done = threading.Event()
        source.copy_(kept)
        offloader.start([source], views, layout)
        for _ in range(8):
            offloader.issue_next()
        offloader.finish(done.set, on_error=never, timeout_s=10)
        source.fill_(-1.0)  # the stream waits for the copies, the host need not
        assert done.wait(10)
        assert torch.equal(views[0], kept.cpu())
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before
    offloader.close()
    memory.close()


def test_device_tensors_whose_strides_change_arrive_whole() -> None:
    """Slices are planned once: those of a tensor that was plain memory then."""
    with fake_cuda(unchecked=[(shard, "_check_tensor")]):
        plain = [torch.rand(300, 400, device="cuda"), torch.rand(9000, device="cuda")]
        strided = [torch.rand(400, 300, device="cuda").t(), plain[1]]
        layout = StagingLayout.of({"model": [whole(str(n), t) for n, t in enumerate(plain)]})
        offloader = Offloader(16)
        for tensors in (plain, strided, plain):
            memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            views, done = layout.views(memory), threading.Event()
            offloader.start(tensors, views, layout)
            offloader.finish(done.set, on_error=never, timeout_s=10)
            assert done.wait(10)
            assert all(torch.equal(v, t.cpu()) for v, t in zip(views, tensors, strict=True))
        offloader.close()
