"""Writing into given tensors: only what is in the view, and only where that is well defined."""

from collections.abc import Callable

import pytest
import torch

from comm_collectives.base.wire import DTYPES, as_bytes, check_apart, dense
from comm_collectives.collectives import drop_in
from comm_collectives.collectives.drop_in.in_place import (
    extent,
    mark_written,
    overlap,
    write,
)
from ranktest import run_ranks

_LAYOUTS = {
    "contiguous": ((3, 4), (4, 1)),
    "transposed": ((4, 3), (1, 4)),
    "every other": ((3, 2), (8, 2)),
    "one column": ((3, 1), (4, 1)),
    "gaps that fit": ((2, 2), (2, 3)),
    "nothing": ((0, 5), (5, 1)),
    "a number": ((), ()),
}


def test_every_layout_of_every_dtype_is_written() -> None:
    for dtype in DTYPES:
        for name, (shape, stride) in _LAYOUTS.items():
            memory = torch.zeros(40 * dtype.itemsize, dtype=torch.uint8).view(dtype)
            view = memory.as_strided(shape, stride, 1)
            check_apart(view, name)
            ones = torch.ones(view.numel() * dtype.itemsize, dtype=torch.uint8)
            source = ones.view(dtype).view(shape)
            write(view, source)
            assert torch.equal(as_bytes(dense(view)), as_bytes(source)), (dtype, name)
            written = int(memory.view(torch.uint8).sum())
            assert written == view.numel() * dtype.itemsize, (dtype, name)


def test_conjugate_view_is_written_as_a_conjugate() -> None:
    memory = torch.zeros(3, dtype=torch.complex64)
    write(memory.conj(), torch.tensor([1j, 2j, 3j]))
    assert memory.tolist() == [-1j, -2j, -3j]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1).expand(3),
        torch.zeros(9).as_strided((3, 3), (1, 1)),
        torch.zeros(9).as_strided((2, 3), (2, 1)),
    ],
)
def test_elements_that_share_memory_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"elements of output may share memory \(shape"):
        check_apart(x, "output")


def test_overlap_is_one_of_addresses() -> None:
    memory = torch.zeros(10)
    assert overlap(memory[:5], memory[4:])
    assert not overlap(memory[:5], memory[5:])
    assert overlap(memory[::2], memory[1::2])  # elements apart, but one among the other
    assert not overlap(memory, torch.zeros(10))
    assert not overlap(memory[:0], memory)
    first, end = extent(memory[1::3])
    assert (first - memory.data_ptr(), end - memory.data_ptr()) == (4, 32)


def test_marking_counts_as_a_change_also_of_views() -> None:
    x = torch.zeros(4)
    before = x._version
    mark_written(x[2:])
    assert x._version == before + 1
    with torch.inference_mode():
        mark_written(torch.zeros(1))


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_conjugated_and_negated_outputs_get_what_was_sent(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.tensor([1 + rank * 1j, 2])
        memory = torch.zeros(4, dtype=x.dtype)
        drop_in.all_gather_into_tensor(view(memory), x)
        assert torch.equal(view(memory), torch.tensor([1, 2, 1 + 1j, 2]))
        drop_in.all_to_all_single(view(memory[:2]), x)
        assert torch.equal(view(memory[:2]), torch.tensor([1, 1 + 1j]) if rank == 0 else x * 0 + 2)

    run_ranks(fn, 2)
