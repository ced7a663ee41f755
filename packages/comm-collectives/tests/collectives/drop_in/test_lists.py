"""Lists of tensors: any sizes, dtypes and strides, compared with what each rank gave."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.collectives import drop_in
from comm_collectives.collectives.drop_in.in_place import write
from comm_collectives.errors import MismatchError, RefusedError, RefusedTypeError
from ranktest import run_ranks

_SENT = [[2, 1, 0], [0, 3, 1], [400, 0, 2]]  # elements from each rank to each


def _bits(elements: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    size = (elements * dtype.itemsize,)
    return torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype)


def _strided(elements: int, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.zeros(2 * elements * dtype.itemsize, dtype=torch.uint8)
    return flat.view(dtype)[::2]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(as_bytes(dense(a)), as_bytes(dense(b)))


def test_tensors_of_every_dtype_and_size_arrive_in_strided_outputs() -> None:
    def fn(rank: int, world_size: int) -> None:
        for dtype in DTYPES:
            values = [
                [_bits(n, 10 * s + d, dtype) for d, n in enumerate(r)] for s, r in enumerate(_SENT)
            ]
            own = [_strided(n, dtype) for n in _SENT[rank]]
            for room, value in zip(own, values[rank], strict=True):
                write(room, value)
            outputs = [_strided(row[rank], dtype) for row in _SENT]
            drop_in.all_to_all(outputs, own)
            assert all(_same(y, row[rank]) for y, row in zip(outputs, values, strict=True)), dtype

            outputs = [_strided(row[0], dtype) for row in _SENT]
            drop_in.all_gather(outputs, own[0])
            assert all(_same(y, row[0]) for y, row in zip(outputs, values, strict=True)), dtype

            outputs = [_strided(row[1], dtype) for row in _SENT]
            drop_in.gather(own[1], outputs if rank == 1 else None, dst=1)
            if rank == 1:
                assert all(_same(y, row[1]) for y, row in zip(outputs, values, strict=True)), dtype
            else:
                assert not any(as_bytes(dense(y)).any() for y in outputs)

            output = _strided(_SENT[2][rank], dtype)
            drop_in.scatter(output, own if rank == 2 else None, src=2)
            assert _same(output, values[2][rank]), dtype

    run_ranks(fn, 3)


def test_coalesced_gathers_write_every_list() -> None:
    def fn(rank: int, world_size: int) -> None:
        inputs = [
            torch.full((2, 2), rank),
            torch.zeros(0, dtype=torch.int64),
            torch.full((3,), -rank),
        ]
        outputs = [[torch.empty_like(x) for x in inputs] for _ in range(world_size)]
        drop_in.all_gather_coalesced(outputs, inputs)
        for r, row in enumerate(outputs):
            assert [x.tolist() for x in row] == [[[r, r], [r, r]], [], [-r] * 3]
        future = drop_in.all_gather_coalesced(outputs, inputs, async_op=True)
        assert future is not None
        assert [[x.tolist() for x in row] for row in future.wait()] == [
            [[[r, r], [r, r]], [], [-r] * 3] for r in range(world_size)
        ]

    run_ranks(fn, 2)


def test_roots_are_global_ranks_or_those_of_the_group_and_the_first_without_one() -> None:
    def fn(rank: int, world_size: int) -> None:
        pair = dist.new_group([1, 2])
        if rank == 0:
            with pytest.warns(UserWarning, match="gather of a group in which this rank is not"):
                assert drop_in.gather(torch.ones(1), group=pair) is None
            return
        parts = [torch.zeros(1) for _ in range(2)]
        for root, keyword in ((2, {"dst": 2}), (2, {"group_dst": 1}), (1, {})):
            drop_in.gather(
                torch.tensor([1.0 * rank]), parts if rank == root else None, group=pair, **keyword
            )
            assert rank != root or [x.item() for x in parts] == [1, 2]
        y = torch.zeros(1)
        drop_in.scatter(y, parts if rank == 1 else [], group=pair)
        with pytest.raises(RefusedError, match=r"dst=0 is not one of the global ranks \(1, 2\)"):
            drop_in.gather(y, parts, dst=0, group=pair)

    run_ranks(fn, 3)


def test_lists_that_do_not_fit_are_an_error_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        ones = [torch.ones(2) for _ in range(world_size)]
        with pytest.raises(RefusedError, match="input_tensor_list has 1 tensors; give one"):
            drop_in.all_to_all(ones, ones[:1] if rank == 1 else ones)
        with pytest.raises(RefusedTypeError, match="tensors are of several dtypes"):
            drop_in.all_gather(ones, ones[0].double() if rank == 0 else ones[0])
        with pytest.raises(RefusedError, match="scatter_list is for rank 0 alone; leave it out"):
            drop_in.scatter(ones[0], ones, src=0)
        with pytest.raises(RefusedError, match=r"tensor_list\[0\] may share memory"):
            drop_in.all_gather([torch.ones(1).expand(2), ones[1]] if rank else ones, ones[0])
        with pytest.raises(MismatchError, match="rank 1 sends 3 elements to rank 0, which"):
            drop_in.all_gather(ones, torch.ones(2 + rank))
        with pytest.raises(MismatchError):
            drop_in.gather(
                ones[0], ones if rank == 0 else None, dst=0
            ) if rank else drop_in.all_gather(ones, ones[0])
        drop_in.barrier()

    run_ranks(fn, 2, timeout_s=30)


_LISTS: dict[str, Callable[[Any], object]] = {
    "tensor_list": lambda given: drop_in.all_gather(given, torch.ones(2)),
    "output_tensor_list": lambda given: drop_in.all_to_all(given, [torch.ones(2)] * 2),
    "gather_list": lambda given: drop_in.gather(torch.ones(2), given),
    "scatter_list": lambda given: drop_in.scatter(torch.ones(2), given),
    "input_list": lambda given: drop_in.reduce_scatter(torch.ones(2), given),
    "output_tensor_lists for input 0": lambda given: drop_in.all_gather_coalesced(
        given, [torch.ones(2)]
    ),
}


def test_what_is_no_list_is_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        for name, call in _LISTS.items():
            right = None if name in ("gather_list", "scatter_list") else [torch.ones(2)] * 2
            for wrong in None, torch.ones(2, 2):
                with pytest.raises((RefusedError, RefusedTypeError), match=f"rank 0: {name}"):
                    call(wrong if rank == 0 else right)
        with pytest.raises(RefusedTypeError, match="rank 0: tensor is a NoneType"):
            drop_in.all_reduce_coalesced(None if rank == 0 else [torch.ones(2)])  # type: ignore[arg-type]

    run_ranks(fn, 2)


def test_one_tensor_in_the_place_of_coalesced_ones_is_reduced() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.tensor(float(rank + 1))
        drop_in.all_reduce_coalesced(x)  # type: ignore[arg-type]
        assert x.item() == 3

    run_ranks(fn, 2)
