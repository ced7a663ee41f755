"""Drop-ins for torch's functions: the same numbers as torch's oracle, in outputs of any layout."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
import comm_collectives.collectives.drop_in as torch_order
from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.collectives.drop_in.in_place import write
from comm_collectives.errors import (
    MismatchError,
    MutatedInputError,
    RefusedError,
    RefusedTypeError,
)
from comm_collectives.shm import register_backends
from ranktest import run_ranks

_SENT = [[2, 1, 0], [0, 3, 1], [4, 0, 2]]  # rows from each rank to each


def _bits(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    """[rows, 3] of random bits."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    size = (rows, 3 * dtype.itemsize)
    return torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype)


def _placed(rows: int, columns: int, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, ...]:
    """Room for a result, and the memory that it lies in, filled with bytes of 7."""
    if layout == "contiguous":
        memory = torch.full((rows, columns * dtype.itemsize), 7, dtype=torch.uint8).view(dtype)
        return memory, memory
    shape = (2 * columns + 1, (2 * rows + 1) * dtype.itemsize)
    memory = torch.full(shape, 7, dtype=torch.uint8).view(dtype)
    return memory[1::2, 1::2].t(), memory


def _untouched(memory: torch.Tensor) -> bool:
    """Whether all but the view of `_placed` still are bytes of 7."""
    if memory.shape[0] % 2 == 0:
        return True
    flat = memory.view(torch.uint8).view(*memory.shape, -1)
    return bool((flat[::2] == 7).all()) and bool((flat[:, ::2] == 7).all())


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(as_bytes(dense(a)), as_bytes(dense(b)))


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([as_bytes(dense(part)) for part in parts])
    return flat.view(parts[0].dtype).view(-1, *parts[0].shape[1:])


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("scale", [1, 60])
def test_rows_of_every_dtype_arrive_in_the_output(layout: str, scale: int) -> None:
    sent = [[n * scale for n in row] for row in _SENT]

    def fn(rank: int, world_size: int) -> None:
        received = [row[rank] for row in sent]
        for dtype in DTYPES:
            inputs = [_bits(dtype, sum(row), src) for src, row in enumerate(sent)]
            want = _cat([x.split(row)[rank] for x, row in zip(inputs, sent, strict=True)])
            x, _ = _placed(sum(sent[rank]), 3, dtype, layout)
            write(x, inputs[rank])
            y, memory = _placed(sum(received), 3, dtype, layout)
            assert torch_order.all_to_all_single(y, x, received, sent[rank]) is None
            assert _equal_bits(y, want), dtype
            assert _equal_bits(x, inputs[rank])
            assert layout == "contiguous" or _untouched(memory)

            same = [_bits(dtype, 2 * scale, src) for src in range(world_size)]
            y, memory = _placed(2 * scale * world_size, 3, dtype, layout)
            torch_order.all_gather_into_tensor(y, same[rank])
            assert _equal_bits(y, _cat(same)), dtype
            assert layout == "contiguous" or _untouched(memory)

            y, memory = _placed(2 * scale, 3, dtype, layout)
            torch_order.broadcast(same[2] if rank == 2 else y, src=2)
            assert rank == 2 or _equal_bits(y, same[2]), dtype
            assert layout == "contiguous" or _untouched(memory)

    run_ranks(fn, 3)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("rows", [2, 100])
def test_reductions_are_written_into_the_output(layout: str, rows: int) -> None:
    """All ranks' numbers are small integers, so the order of summation does not count."""
    ops = {
        "sum": (dist.ReduceOp.SUM, torch.sum),
        "avg": (dist.ReduceOp.AVG, torch.mean),
        "min": (dist.ReduceOp.MIN, torch.amin),
        "max": (dist.ReduceOp.MAX, torch.amax),
        "product": (dist.ReduceOp.PRODUCT, torch.prod),
    }

    def fn(rank: int, world_size: int) -> None:
        for name, (op, reduce) in ops.items():
            for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16):
                if name in ("min", "max", "avg") and dtype in (torch.complex64, torch.int16):
                    continue
                generator = torch.Generator().manual_seed(1)
                size = (world_size, 2 * rows, 3)
                inputs = torch.randint(-2, 4, size, generator=generator).to(dtype)
                want = reduce(inputs, 0).to(dtype)
                y, memory = _placed(rows, 3, dtype, layout)
                torch_order.reduce_scatter_tensor(y, inputs[rank], op)
                assert torch.equal(y, want[rank * rows :][:rows]), (name, dtype)
                assert layout == "contiguous" or _untouched(memory)
                y, memory = _placed(2 * rows, 3, dtype, layout)
                y.copy_(inputs[rank])
                torch_order.all_reduce(y, name)
                assert torch.equal(y, want), (name, dtype)
                assert layout == "contiguous" or _untouched(memory)

    run_ranks(fn, 2)


def test_outputs_and_inputs_may_be_stacked() -> None:
    def fn(rank: int, world_size: int) -> None:
        for shape in [(), (2,), (3, 2), (0, 2)]:
            x = torch.full(shape, float(rank))
            want = torch.stack([torch.full(shape, float(r)) for r in range(world_size)])
            y = torch.empty_like(want)
            torch_order.all_gather_into_tensor(y, x)
            assert torch.equal(y, want)
            part = torch.empty(shape)
            torch_order.reduce_scatter_tensor(part, y)
            assert torch.equal(part, torch.full(shape, 2.0 * rank))

    run_ranks(fn, 2)


def test_keywords_are_torchs() -> None:
    def fn(rank: int, world_size: int) -> None:
        y, x = torch.zeros(2), torch.arange(2.0) + 10 * rank
        torch_order.all_to_all_single(
            output=y, input=x, output_split_sizes=[1, 1], input_split_sizes=[], group=None
        )
        assert y.tolist() == [rank, 10 + rank]
        large = torch.zeros(4)
        torch_order.all_gather_into_tensor(output_tensor=large, input_tensor=x)
        torch_order.reduce_scatter_tensor(output=y, input=large, op=dist.ReduceOp.MAX)
        assert y.tolist() == large[2 * rank :][:2].tolist()
        torch_order.all_reduce(tensor=y, op=dist.ReduceOp.SUM)
        assert y.tolist() == [10, 12]

    run_ranks(fn, 2)


def test_source_is_a_global_rank_or_one_of_the_group() -> None:
    def fn(rank: int, world_size: int) -> object:
        pair = dist.new_group([1, 2])
        if rank == 0:
            return None
        by_global, by_group = torch.tensor(rank), torch.tensor(rank)
        torch_order.broadcast(by_global, src=2, group=pair)
        torch_order.broadcast(by_group, group=pair, group_src=0)
        with pytest.raises(RefusedError, match=r"src=0 is not one of the global ranks \(1, 2\)"):
            torch_order.broadcast(by_group, src=0, group=pair)
        with pytest.raises(RefusedError, match="src=None and group_src=None; give one of them"):
            torch_order.broadcast(by_group, group=pair)
        return [by_global.item(), by_group.item()]

    assert run_ranks(fn, 3) == [None, [2, 1], [2, 1]]


@pytest.mark.parametrize("rows", [2, 300])
def test_output_may_share_memory_with_the_input(rows: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        memory = torch.arange(2.0 * rows + 1) + 1000 * rank
        x, y = memory[:-1], memory[1:]
        theirs = torch.arange(2.0 * rows) + 1000 * (1 - rank)
        want = [x.clone(), theirs]
        want = [w[rank * rows :][:rows] for w in (want if rank == 0 else want[::-1])]
        handle = torch_order.all_to_all_single(y, x, async_op=True)
        assert handle is not None
        assert handle.wait()
        assert torch.equal(y, torch.cat(want))
        assert memory[0] == 1000 * rank
        whole = torch.arange(2.0 * rows) * (rank + 1)
        torch_order.all_gather_into_tensor(whole, whole[rows * rank :][:rows])
        assert torch.equal(whole[:rows], torch.arange(1.0 * rows))
        assert torch.equal(whole[rows:], torch.arange(1.0 * rows, 2 * rows) * 2)

    run_ranks(fn, 2)


def test_async_calls_write_before_wait_returns_and_watch_their_inputs() -> None:
    def fn(rank: int, world_size: int) -> None:
        x, y = torch.full((4,), float(rank)), torch.zeros(8)
        handle = torch_order.all_gather_into_tensor(y, x, async_op=True)
        assert handle is not None
        handle.wait()
        assert y.tolist() == [0] * 4 + [1] * 4
        total = torch_order.all_reduce(y, async_op=True)
        assert total is not None
        total.wait()
        assert y.tolist() == [0] * 4 + [2] * 4
        handle = torch_order.reduce_scatter_tensor(x, y, async_op=True)
        assert handle is not None
        y.add_(1)
        with pytest.raises(MutatedInputError, match="reduce_scatter_tensor: input 1 was changed"):
            handle.wait()

    run_ranks(fn, 2)


def test_autograd_notices_that_the_output_changed() -> None:
    def fn(rank: int, world_size: int) -> None:
        for rows in (2, 300):
            x = torch.ones(rows, requires_grad=True)
            y = torch.zeros(rows)
            loss = (x * y).sum()  # saves y
            torch_order.all_to_all_single(y, torch.ones(rows))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            weights = torch.nn.Parameter(torch.full((rows,), float(rank)))
            torch_order.broadcast(weights, src=1)
            assert bool((weights == 1).all())
            assert weights.is_leaf

    run_ranks(fn, 2)


_ONES = torch.ones(4)
_Call = Callable[[], object]


def _swapped() -> list[tuple[_Call, str]]:
    return [
        (
            lambda: torch_order.all_gather_into_tensor(torch.ones(2), _ONES),
            r"\[2\] and input \[4\].*they fit the other way round: output is the first argument",
        ),
        (
            lambda: torch_order.reduce_scatter_tensor(_ONES, torch.ones(2)),
            "they fit the other way round: output is the first argument and input the second",
        ),
        (
            lambda: torch_order.all_to_all_single(torch.ones(3), _ONES, [1, 3], [2, 1]),
            "other way round: output comes before input, and so do the splits",
        ),
        (
            lambda: torch_order.all_to_all_single(torch.ones(2, requires_grad=True), torch.ones(2)),
            "output needs a gradient and input does not, as if they were swapped",
        ),
    ]


def test_tensors_that_look_swapped_on_one_rank_are_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        right: list[_Call] = [
            lambda: torch_order.all_gather_into_tensor(_ONES.clone(), torch.ones(2)),
            lambda: torch_order.reduce_scatter_tensor(torch.ones(2), _ONES),
            lambda: torch_order.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
            lambda: torch_order.all_to_all_single(torch.ones(2), torch.ones(2)),
        ]
        for good, (bad, match) in zip(right, _swapped(), strict=True):
            with pytest.raises(RefusedError, match=match):
                _ = bad() if rank == 1 else good()

    run_ranks(fn, 2, timeout_s=20)


def test_tensors_and_splits_swapped_on_one_rank_show_by_what_its_peers_expect() -> None:
    """Its own sizes fit; only what the others send and expect does not."""

    def fn(rank: int, world_size: int) -> None:
        sent, received = _SENT[rank], [row[rank] for row in _SENT]
        x, y = torch.ones(sum(sent)), torch.zeros(sum(received))
        before = x.clone()
        given = (x, y, sent, received) if rank == 2 else (y, x, received, sent)
        match = "all fit if rank 2 gave input and its splits in output's place"
        with pytest.raises(MismatchError, match=match):
            torch_order.all_to_all_single(*given)
        assert torch.equal(x, before)
        assert not y.any()

    run_ranks(fn, 3, timeout_s=20)


_MISTAKES: list[tuple[_Call, type[Exception], str]] = [
    (
        lambda: torch_order.all_to_all_single(torch.zeros(2).half(), torch.ones(2)),
        RefusedTypeError,
        "output is torch.float16 but input is torch.float32",
    ),
    (
        lambda: torch_order.all_to_all_single(torch.zeros(2, 3), torch.ones(2, 2)),
        RefusedError,
        "of which all but the first are equal",
    ),
    (
        lambda: torch_order.all_to_all_single(torch.zeros(1).expand(2), torch.ones(2)),
        RefusedError,
        "elements of output may share memory",
    ),
    (
        lambda: torch_order.all_to_all_single(torch.zeros(2), torch.ones(2), [1, 1], [2, 1]),
        RefusedError,
        "do not fit input, which has 2 rows",
    ),
    (
        lambda: torch_order.all_to_all_single(torch.zeros(2), torch.ones(3)),
        RefusedError,
        "input has 3 rows, which 2 ranks cannot share evenly; give input_split_sizes",
    ),
    (
        lambda: torch_order.all_to_all_single(torch.zeros(2), torch.eye(2).to_sparse()),
        RefusedTypeError,
        "give a dense tensor",
    ),
    (
        lambda: torch_order.all_to_all_single(torch.zeros(2), [1]),  # type: ignore[arg-type]
        RefusedTypeError,
        "input is a list",
    ),
]


def test_mistakes_of_one_rank_end_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        for bad, kind, match in _MISTAKES:
            with pytest.raises(kind, match=match):
                if rank == 0:
                    bad()
                else:
                    torch_order.all_to_all_single(torch.zeros(2), torch.ones(2))
        x = torch.ones(2)
        with pytest.raises(RefusedError, match="op='band' is not defined"):
            torch_order.all_reduce(x, dist.ReduceOp.BAND if rank else dist.ReduceOp.SUM)
        with pytest.raises(RefusedError, match="elements of tensor may share memory"):
            torch_order.all_reduce(torch.ones(1).expand(2) if rank else x)
        with pytest.raises(MismatchError, match=r"x of rank 1 is .*int32\[2\] but that"):
            torch_order.broadcast(x.int() if rank else x, src=0)
        with pytest.raises(MismatchError, match=r"row shape|rows"):
            torch_order.all_gather_into_tensor(torch.ones(2 + 2 * rank), torch.ones(1 + rank))

    run_ranks(fn, 2, timeout_s=20)


@pytest.mark.parametrize("backend", ["gloo", "comm_shm"])
def test_default_device_of_the_program_changes_nothing(backend: str) -> None:
    """Nothing that travels may land there: here it would have no data, elsewhere another stream."""

    def calls(group: dist.ProcessGroup, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        got = [cc.all_reduce(x, group=group), cc.all_gather(x, group=group)]
        cc.send(x, dst=1 - rank, group=group, async_op=True)
        got.append(cc.recv(src=1 - rank, group=group))
        z = x.clone().requires_grad_()
        (cc.all_to_all(z, group=group) * 2).sum().backward()
        assert z.grad is not None
        strided = x.repeat_interleave(2)[::2]
        reduce = dist.all_reduce if backend == "comm_shm" else torch_order.all_reduce
        reduce(strided, group=group)
        return [*got, z.grad, strided]

    def fn(rank: int, world_size: int) -> None:
        register_backends()
        sizes = (4, 400, 200_000)  # with the control exchange, beside it, and apart
        inputs = [torch.full((size,), rank + 1.0) for size in sizes]
        group = dist.new_group(backend=backend)
        with torch.device("meta"):  # from the group's first call on
            got = [y for x in inputs for y in calls(group, x, rank)]
        wanted = [y for x in inputs for y in calls(group, x, rank)]
        assert all(map(torch.equal, got, wanted))

    run_ranks(fn, 2)


@pytest.mark.filterwarnings("ignore")  # torch has not made up its mind about nested tensors
def test_tensor_of_tensors_is_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        odd = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with pytest.raises(RefusedTypeError, match=r"rank 1: tensor is a .* wraps other tensors"):
            torch_order.all_reduce(odd if rank else torch.ones(2))

    run_ranks(fn, 2, timeout_s=20)


def test_a_barrier_ends_when_all_are_there_and_names_who_is_not() -> None:
    def fn(rank: int, world_size: int) -> None:
        torch_order.barrier()
        handle = torch_order.barrier(async_op=True)
        assert handle is not None
        assert handle.wait()
        if rank == 0:
            with pytest.raises(cc.CommError, match=r"barrier call 3 .*rank 1"):
                torch_order.barrier(timeout=timedelta(seconds=0.5))

    run_ranks(fn, 2)
