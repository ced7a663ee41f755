import pytest
import torch

from devicetest import Machine, fake_cuda
from unified_ckpt.devices import CopyStream, Placed
from unified_ckpt.devices.pinning import pinned_memory


def odd_tensors(device: str) -> list[torch.Tensor]:
    """Small and large, strided, 0-dim, empty, of one byte, conjugate; the last is cut to pieces."""
    complex_values = torch.view_as_complex(torch.rand(30, 2))
    tensors = [
        torch.rand(7, 5),
        torch.tensor(3),
        torch.rand(40, 50).t(),
        torch.rand(2)[::2],
        torch.rand(33).to(torch.float8_e4m3fn),
        torch.empty(0, 4),
        complex_values.conj(),
        torch.rand(300_000),
        torch.rand(9, 8) > 0.5,
        torch.rand(600, 4001)[:, ::2].t(),
    ]
    return [tensor.to(device) for tensor in tensors] if device else tensors


def places(tensors: list[torch.Tensor]) -> list[int]:
    begins, at = [], 0
    for tensor in tensors:
        begins.append(at)
        at += -(-tensor.nbytes // 64) * 64
    return [*begins, at]


def strided_on_device(cuda: Machine, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values with the same strides; a move would make them contiguous."""
    made = []
    for tensor in tensors:
        if tensor.is_contiguous() or tensor.is_conj():
            made.append(tensor.resolve_conj().to("cuda"))
        else:
            made.append(tensor.t().contiguous().to("cuda").t())
    cuda.forget()
    return made


def test_tensors_of_all_kinds_cross_without_a_race_or_a_wait() -> None:
    with fake_cuda() as cuda:
        plain = odd_tensors("")
        sources = strided_on_device(cuda, plain)
        *begins, size = places(sources)
        memory = pinned_memory(size)
        copy_stream = CopyStream(torch.device("cuda", 0))
        copy_stream.fetch(memory, map(Placed, sources, begins))
        assert cuda.syncs == []
        event = copy_stream.join()
        for source in sources:
            source.zero_()  # the current stream waits, the host does not
        event.synchronize()
        for tensor, begin in zip(plain, begins, strict=True):
            raw = memory[begin : begin + tensor.nbytes].clone()
            assert torch.equal(raw.view(tensor.dtype).view(tensor.shape), tensor.resolve_conj())
        copy_stream.begin()
        copy_stream.send(memory, map(Placed, sources, begins))
        copy_stream.join()
        assert "copy with a device temporary" not in cuda.counts and cuda.problems == []
        for tensor, source in zip(plain, sources, strict=True):
            assert torch.equal(source.cpu(), tensor.resolve_conj())
        assert cuda.races == []


def test_the_current_stream_must_wait_before_the_tensors_change() -> None:
    with fake_cuda() as cuda:
        source = torch.ones(100, device="cuda")
        memory = pinned_memory(400)
        copy_stream = CopyStream(torch.device("cuda", 0))
        copy_stream.fetch(memory, [Placed(source, 0)])
        source.zero_()
        assert {race.kind for race in cuda.races} == {"write after read"}


def test_many_small_tensors_are_one_copy_and_one_launch() -> None:
    with fake_cuda() as cuda:
        sources = [torch.full((1000,), float(n), device="cuda") for n in range(500)]
        memory = pinned_memory(500 * 4032)
        cuda.forget()
        copy_stream = CopyStream(torch.device("cuda", 0))
        copy_stream.fetch(memory, [Placed(s, 4032 * n) for n, s in enumerate(sources)])
        assert cuda.counts["late copy to host"] == 1 and cuda.counts["aten::_foreach_copy_"] == 1
        copy_stream.send(memory, [Placed(s, 4032 * n) for n, s in enumerate(sources)])
        assert cuda.counts["late copy to device"] == 1 and cuda.counts["aten::_foreach_copy_"] == 2
        copy_stream.join()


@pytest.mark.gpu
def test_all_kinds_cross_on_a_device_with_a_buffer_of_fixed_size() -> None:
    plain = odd_tensors("")
    sources = [t.resolve_conj().to("cuda") for t in plain]
    sources[-1] = plain[-1].t().contiguous().to("cuda").t()
    *begins, size = places(sources)
    memory = pinned_memory(size)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    copy_stream = CopyStream(torch.device("cuda", torch.cuda.current_device()))
    copy_stream.fetch(memory, map(Placed, sources, begins))
    event = copy_stream.join()
    for source in sources:
        source.zero_()
    event.synchronize()
    copy_stream.begin()
    copy_stream.send(memory, map(Placed, sources, begins))
    copy_stream.join()
    for tensor, source in zip(plain, sources, strict=True):
        assert torch.equal(source.cpu(), tensor.resolve_conj())
    assert torch.cuda.max_memory_allocated() - before < 5 << 20
