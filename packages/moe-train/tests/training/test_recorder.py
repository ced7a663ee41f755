import torch

from gpu_alloc import AllocatorConfig, TraceEvent, replay
from moe_train.training.recorder import record_allocations


def live_bytes(events: list[TraceEvent]) -> int:
    sizes: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            assert event.block_id not in sizes
            sizes[event.block_id] = event.size_bytes
        else:
            del sizes[event.block_id]
    return sum(sizes.values())


def test_a_storage_is_counted_once_and_freed_when_torch_drops_it() -> None:
    with record_allocations() as events:
        x = torch.zeros(1000)
        view = x.view(10, 100)[3:]
        assert live_bytes(events) == 4000
        y = x + 1
        assert live_bytes(events) == 8000
        del x
        assert live_bytes(events) == 8000, "the view keeps the storage"
        del view
        assert live_bytes(events) == 4000
        del y
        assert live_bytes(events) == 0


def test_what_backward_saves_is_live_until_backward() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    with record_allocations() as events:
        loss = (w @ w).exp().sum()
        before = live_bytes(events)
        assert before >= 64 * 64 * 4
        loss.backward()
        assert live_bytes(events) == 64 * 64 * 4 + 4, "the gradient and the loss"
    result = replay(events, AllocatorConfig())
    assert result.peak_live_bytes >= before


def test_empty_tensors_and_inplace_operators_record_nothing() -> None:
    x = torch.zeros(8)
    with record_allocations() as events:
        torch.zeros(0)
        seen = torch.ones(8)
        count = len(events)
        seen.add_(1).mul_(2)
        assert len(events) == count
        x.copy_(seen)
