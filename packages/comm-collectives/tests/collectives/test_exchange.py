"""What a device's backend moves arrives as what travels over the host; here gloo is the backend."""

from collections.abc import Callable

import torch

from comm_collectives.call.groups.groups import group_state
from comm_collectives.collectives import alltoall, exchange, gathers, pieces, reduction, rooted
from ranktest import run_ranks

_MODULES = (alltoall, exchange, gathers, pieces, reduction, rooted)


def _by_transport(fn: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run with tensors on the host taken for those of a device that has a backend."""
    own = exchange.on_host
    try:
        for module in _MODULES:
            module.on_host = lambda state, device: False  # type: ignore[attr-defined]
        return fn()
    finally:
        for module in _MODULES:
            module.on_host = own  # type: ignore[attr-defined]


def _everything(rank: int, size: int) -> list[torch.Tensor]:
    """Results and gradients of collectives with even, nearly even and very uneven rows."""
    results = []
    for rows in ([2, 2, 2], [8, 8, 7], [12, 0, 1], [0, 0, 0]):
        x = (torch.arange(2.0 * rows[rank]).view(-1, 2) + 100 * rank).requires_grad_()
        whole = gathers.all_gather(x)
        mine = gathers.reduce_scatter(whole, splits=rows, op="max")
        splits = [rows[rank] - sum(divmod(rows[rank], 2)), *divmod(rows[rank], 2)]
        routed = alltoall.all_to_all(mine, input_splits=splits)
        parts = rooted.gather(routed, dst=1) or []
        loss = torch.cat(parts).square().sum() if parts else x.sum() * 0
        loss.backward()
        assert x.grad is not None
        results += [whole.detach(), mine.detach(), routed.detach(), x.grad]
    for op in ("sum", "avg", "max", "product"):
        y = torch.tensor([rank + 1.0, -2.0, rank * 0.5], requires_grad=True)
        total = reduction.all_reduce(y, op=op)
        total.square().sum().backward()
        assert y.grad is not None
        results += [total.detach(), y.grad]
    odd = torch.tensor([rank, 65535 - rank], dtype=torch.uint16)
    return [*results, reduction.all_reduce(odd, op="min")]


def test_transfers_of_a_backend_give_what_the_host_gives() -> None:
    def fn(rank: int, world_size: int) -> None:
        wanted = _everything(rank, world_size)
        transport, moved = group_state(None).transport, set()

        def counted(name: str) -> Callable[..., object]:
            own = getattr(transport, name)
            return lambda *args: (moved.add(name), own(*args))[1]

        names = {"exchange", "all_gather", "all_reduce"}
        for name in names:
            setattr(transport, name, counted(name))
        found = _by_transport(lambda: _everything(rank, world_size))
        assert moved == names
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(one, other, msg=f"result {i} of rank {rank}")

    run_ranks(fn, 3)
