"""Which tensors share memory: against the addresses that each tensor really touches."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from comm_collectives.base.wire import as_bytes, dense
from comm_collectives.nested.sharing import find_cargo

_ALIGNMENT = 15
_Pick = Callable[[torch.Tensor], list[torch.Tensor]]


def _delivered(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """What a receiver makes of the cargo, and how many bytes it got."""
    cargo = find_cargo(tensors)
    items = {number: dense(item).clone() for number, item in cargo.items.items()}
    num_bytes = sum(item.nbytes for item in items.values())
    items |= {view.number: view.of(items[view.base]) for view in cargo.views}
    return [items[number] for number in range(len(tensors))], num_bytes


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return as_bytes(dense(x))


def _addresses(x: torch.Tensor) -> set[int]:
    """Every byte that the elements of `x` occupy."""
    steps = [{i * s for i in range(n)} for n, s in zip(x.shape, x.stride(), strict=True)]
    size = x.element_size()
    starts = (x.data_ptr() + size * sum(at) for at in itertools.product(*steps))
    return {start + i for start in starts for i in range(size)}


def _is_compact(x: torch.Tensor) -> bool:
    touched = _addresses(x)
    return not touched or max(touched) - min(touched) < x.nbytes


def _share(tensors: list[torch.Tensor]) -> set[tuple[int, int]]:
    touched = [_addresses(x) for x in tensors]
    pairs = itertools.combinations(range(len(tensors)), 2)
    return {(i, j) for i, j in pairs if touched[i] & touched[j]}


def _random_view(generator: random.Random, flat: torch.Tensor) -> torch.Tensor:
    start = generator.randrange(0, flat.numel(), 8)
    x = flat[start : start + 8 * generator.randrange(1, 9)]
    x = x.view(generator.choice([torch.uint8, torch.int16, torch.float32, torch.float64]))
    if generator.random() < 0.5 and x.numel() % 4 == 0:
        x = x.view(4, -1)
        kind = generator.randrange(5)
        if kind == 0:
            x = x.t()
        elif kind == 1:
            x = x[:, : max(1, x.shape[1] // 2)]
        elif kind == 2:
            x = x[::2]
        elif kind == 3:
            x = x[1:3].unsqueeze(1).expand(-1, 3, -1)
        elif kind == 4:
            x = x[:0]
    return x


def test_values_arrive_and_shared_memory_stays_shared_at_no_cost() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    for _ in range(300):
        flats = [torch.randint(1, 100, (128,), dtype=torch.uint8) for _ in range(2)]
        count = generator.randrange(1, 7)
        tensors = [_random_view(generator, generator.choice(flats)) for _ in range(count)]
        got, num_bytes = _delivered(tensors)
        for theirs, ours in zip(got, tensors, strict=True):
            assert theirs.dtype == ours.dtype
            assert theirs.shape == ours.shape
            assert torch.equal(_bytes(theirs), _bytes(ours)), f"seed {seed}"
        most = sum(x.nbytes for x in tensors) + _ALIGNMENT * count
        assert num_bytes <= most, f"seed {seed}"
        wanted, found = _share(tensors), _share(got)
        assert found <= wanted, f"seed {seed}"
        compact = [_is_compact(x) for x in tensors]
        assert {(i, j) for i, j in wanted if compact[i] and compact[j]} <= found, f"seed {seed}"
        assert all(
            theirs.stride() == ours.stride()
            for theirs, ours, small in zip(got, tensors, compact, strict=True)
            if small and ours.numel() and not ours.is_contiguous()
        ), f"seed {seed}"


@pytest.mark.parametrize(
    ("pick", "num_bytes"),
    [
        (lambda w: [w, w.t(), w.view(-1), w.detach()], 400),
        (lambda w: [w, w[:, 2], w[3:5]], 400),  # inside a compact one
        (lambda w: [w[:6], w[4:]], 400),  # overlapping
        (lambda w: [w[:, :6], w[:, 3:]], 400),  # gaps, but together they have none
        (lambda w: [w[:, :2], w.detach()[:, :2]], 80),  # gaps, exactly alike
        (lambda w: [w[0], w[:1].expand(50, 10)], 40),
        (lambda w: [w, w.view(torch.int64), w.view(torch.uint8)[1, 3:9]], 400),
    ],
)
def test_a_change_to_one_is_seen_in_the_others(pick: _Pick, num_bytes: int) -> None:
    ours = pick(torch.arange(100, dtype=torch.float32).view(10, 10))
    got, arrived = _delivered(ours)
    assert arrived == num_bytes
    for tensors in (ours, got):
        tensors[0][..., 0] = -1.0
        tensors[0][..., -1] = 7.0
    for theirs, expected in zip(got, ours, strict=True):
        assert torch.equal(theirs, expected)


@pytest.mark.parametrize(
    ("pick", "num_bytes"),
    [
        (lambda w: [w[:, :2], w[:, 1:3]], 160),  # together they would be 4 times larger
        (lambda w: [w[:, 0], w[:, 5], w[9, 9]], 84),
        (lambda w: [w[:3], w[3:6]], 240),  # neighbours share nothing
        (lambda w: [w[2, 3]], 4),
        (lambda w: [w[:1].expand(50, 10)], 40),
    ],
)
def test_separate_tensors_bring_only_their_own_bytes(pick: _Pick, num_bytes: int) -> None:
    ours = pick(torch.arange(100, dtype=torch.float32).view(10, 10))
    got, arrived = _delivered(ours)
    assert arrived == num_bytes
    assert not _share(got)
    assert sum(x.untyped_storage().nbytes() for x in got) == num_bytes
    for theirs, expected in zip(got, ours, strict=True):
        assert torch.equal(theirs, expected)


def test_memory_format_survives() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (got,), num_bytes = _delivered([x])
    assert torch.equal(got, x)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert num_bytes == x.nbytes


def test_conjugated_and_negated_views_arrive_resolved() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    got, _ = _delivered([x, x.conj(), x.conj().imag])
    for theirs, ours in zip(got, [x, x.conj(), x.conj().imag], strict=True):
        assert torch.equal(theirs, ours)
        assert not theirs.is_conj()
        assert not theirs.is_neg()


def test_thousand_views_of_one_buffer_are_found_quickly() -> None:
    flat = torch.arange(1_000_000)
    views = list(flat.split(1000))
    assert find_cargo(views).items.keys() == set(range(1000))
    cargo = find_cargo([*views, flat])
    assert [item.nbytes for item in cargo.items.values()] == [flat.nbytes]
    columns = [flat.view(1000, 1000)[:, i] for i in range(0, 1000, 5)]
    assert len(find_cargo(columns).items) == 200
