"""Chunks: what goes in comes out, whatever the dtype, and every rank lays them out alike."""

import random

import pytest
import torch

from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.nested.packing import (
    Buffer,
    Packer,
    Table,
    Unpacker,
    describe,
    make_plan,
)
from comm_collectives.nested.sharing import find_cargo

_MIB = 1 << 20


def _through(
    tensors: list[torch.Tensor], blobs: list[bytes], device: torch.device | None = None
) -> tuple[list[torch.Tensor], list[bytes], list[int]]:
    """What a receiver gets, and the sizes of the messages."""
    cargo = find_cargo(tensors)
    table = describe(cargo, len(tensors), blobs, lambda device: device.type)
    read = Table.from_json(table.to_json())
    packer, unpacker = Packer(cargo.items, blobs), Unpacker(read, device)
    sizes = []
    for sent, received in zip(make_plan(table).chunks, make_plan(read).chunks, strict=True):
        assert sent.num_bytes == received.num_bytes
        buffer = Buffer.of(sent.num_bytes + 5)
        packer.fill(buffer, sent)
        unpacker.take(buffer, received)
        buffer.flat.fill_(77)  # nothing may still refer to the chunk
        sizes.append(sent.num_bytes)
    for group, number in make_plan(read).big:
        unpacker.take_big(as_bytes(dense(cargo.items[number])).clone(), group, number)
        sizes.append(group.item_bytes)
    return unpacker.tensors(), unpacker.blobs(), sizes


def _random_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    high = 2 if dtype == torch.bool else 256
    flat = torch.randint(0, high, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return flat.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_bit_by_bit(dtype: torch.dtype) -> None:
    wide = _random_bytes(dtype, 5, 8)
    tensors = [wide[0], wide[1:3], wide[3:, ::2], wide[4].t() if wide.dim() < 2 else wide.t()]
    tensors += [wide[:0], wide[2, 3], _random_bytes(dtype, 8)]
    got, _, _ = _through(tensors, [])
    for theirs, ours in zip(got, tensors, strict=True):
        assert theirs.dtype == dtype
        assert theirs.shape == ours.shape
        assert torch.equal(as_bytes(dense(theirs)), as_bytes(dense(ours)))


def test_small_tensors_have_memory_of_their_own() -> None:
    tensors = [torch.full((i % 7, 2), i) for i in range(300)]
    got, _, sizes = _through(tensors, [])
    assert len(sizes) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in got)


@pytest.mark.parametrize(
    "counts_and_sizes",
    [
        [(3000, 300)],
        [(300, 65_536)],
        [(2, 40_000_000), (300, 30_000)],
        [(1, 20 * _MIB), (2, _MIB), (3, _MIB - 1)],
        [(4, 1 << 22), (1, 5)],
    ],
)
def test_chunks_are_a_sixteenth_of_the_payload_within_bounds(
    counts_and_sizes: list[tuple[int, int]],
) -> None:
    tensors = [
        torch.full((size,), i % 251, dtype=torch.uint8)
        for count, size in counts_and_sizes
        for i in range(count)
    ]
    got, _, sizes = _through(tensors, [])
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
    payload = sum(x.nbytes for x in tensors)
    limit = min(max(payload // 16, _MIB), 4 * _MIB)
    big = [x.nbytes for x in tensors if x.nbytes >= _MIB]
    assert sizes[len(sizes) - len(big) :] == big
    chunks = sizes[: len(sizes) - len(big)]
    assert max(chunks) <= limit + 16
    assert sum(chunks) <= payload - sum(big) + 16 * len(tensors)
    assert len(chunks) <= 2 + 2 * sum(chunks) / limit


def test_bytes_are_cut_where_a_chunk_ends() -> None:
    generator = random.Random(seed := random.randrange(10**9))
    blobs = [generator.randbytes(n) for n in (0, 1, 17, 3_000_000, 0, 5, 262_144, 100_000)]
    got, copies, sizes = _through([torch.arange(5)], blobs)
    assert copies == blobs, f"seed {seed}"
    assert torch.equal(got[0], torch.arange(5))
    assert max(sizes) <= _MIB


def test_parameters_are_packed_without_their_history() -> None:
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(4)]
    got, _, _ = _through([*parameters, parameters[0] * 2], [])
    assert not any(x.requires_grad for x in got)
    assert torch.equal(got[4], parameters[0].detach() * 2)


def test_whole_groups_go_to_the_receivers_device() -> None:
    w = torch.ones(4, 4)
    got, _, _ = _through([w, w.t(), torch.ones(3), torch.ones(_MIB)], [], torch.device("meta"))
    assert [x.device.type for x in got] == ["meta"] * 4
    assert got[0].untyped_storage()._cdata == got[1].untyped_storage()._cdata


def test_value_without_tensors_has_one_empty_chunk() -> None:
    assert _through([], []) == ([], [], [0])
