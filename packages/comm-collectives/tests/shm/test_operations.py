"""What each collective of comm_shm gives: known answers, every dtype, strided, aliased, uneven."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.shm.registration import register_backends
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not backends_may_be_python(), reason="this torch has no backends written in Python"
)
# One step, some steps, and a last step that is not full.
NUMELS = (0, 1, 1000, 300_000, 700_001)


def _group(*, timeout_s=30.0):
    register_backends()
    group = dist.new_group(backend="comm_shm", timeout=timedelta(seconds=timeout_s))
    assert group._get_backend(torch.device("cpu")).shares_memory
    return group


def _ramp(numel, rank, dtype=torch.float32):
    return torch.arange(numel, dtype=dtype) + 1000 * rank


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_collective_gives_the_known_answer(num_ranks):
    def fn(rank, size):
        group = _group()
        for numel in NUMELS:
            inputs = [_ramp(numel * size, src) for src in range(size)]
            x, parts = inputs[rank], [whole.chunk(size) for whole in inputs]
            if numel == 0:
                parts = [[whole] * size for whole in inputs]
            total = torch.stack(inputs).double().sum(0)

            y = x.double()
            dist.all_reduce(y, group=group)
            assert torch.equal(y, total)

            y = torch.empty(numel, dtype=torch.float64)
            dist.reduce_scatter_tensor(y, x.double(), group=group)
            mine = slice(rank * numel, (rank + 1) * numel)
            assert torch.equal(y, total[mine])
            dist.reduce_scatter(y.zero_(), [p.double() for p in parts[rank]], group=group)
            assert torch.equal(y, total[mine])

            y = torch.empty_like(x)
            dist.all_to_all_single(y, x, group=group)
            assert torch.equal(y, torch.cat([parts[src][rank] for src in range(size)]))
            listed = [torch.empty(numel) for _ in range(size)]
            dist.all_to_all(listed, list(parts[rank]), group=group)
            assert torch.equal(torch.cat(listed), y)

            gathered = torch.empty(numel * size * size)
            dist.all_gather_into_tensor(gathered, x, group=group)
            assert torch.equal(gathered, torch.cat(inputs))
            listed = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(listed, x, group=group)
            assert torch.equal(torch.cat(listed), gathered)

            y = x.clone()
            dist.broadcast(y, size - 1, group=group)
            assert torch.equal(y, inputs[-1])

            listed = [torch.empty_like(x) for _ in range(size)] if rank == 1 else None
            dist.gather(x, listed, 1, group=group)
            assert rank != 1 or torch.equal(torch.cat(listed), torch.cat(inputs))
            y = torch.empty(numel)
            dist.scatter(y, list(parts[1]) if rank == 1 else None, 1, group=group)
            assert torch.equal(y, parts[1][rank])

            y = x.clone()
            dist.reduce(y, 0, op=dist.ReduceOp.MAX, group=group)
            assert rank != 0 or torch.equal(y, inputs[-1])
            dist.barrier(group=group)

    run_ranks(fn, num_ranks)


def test_reductions_equal_torch_and_are_the_same_bits_on_every_rank():
    ops = {
        dist.ReduceOp.SUM: lambda x: x.sum(0),
        dist.ReduceOp.AVG: lambda x: x.mean(0),
        dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
        dist.ReduceOp.MIN: lambda x: x.amin(0),
        dist.ReduceOp.MAX: lambda x: x.amax(0),
    }

    def fn(rank, size):
        group = _group()
        # Below and above the size from which ranks share the work, and more than one chunk.
        for numel in (1001, 70_001, 600_001):
            for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint16, torch.uint8):
                if numel > 100_000 and dtype != torch.float32:
                    continue
                draw = torch.Generator().manual_seed(numel)
                x = torch.rand(size, numel, generator=draw)
                x = x if dtype.is_floating_point else x * 9 + 1
                x = x.to(dtype)
                for op, oracle in ops.items():
                    if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                        continue
                    y = x[rank].clone()
                    dist.all_reduce(y, op=op, group=group)
                    wide = x.double() if dtype.is_floating_point else x.long()
                    expected = oracle(wide).to(dtype)
                    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
                    assert torch.allclose(y, expected, rtol=tolerance, atol=tolerance)
                    bits = y.view(torch.uint8)
                    reference = bits.clone()
                    dist.broadcast(reference, 0, group=group)
                    assert torch.equal(bits, reference)

    run_ranks(fn, 3)


@pytest.mark.parametrize("op", [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR])
def test_bitwise_reductions(op):
    def fn(rank, size):
        x = torch.tensor([0b1100, 0b1010, 7]) if rank else torch.tensor([0b1010, 0b0110, 7])
        dist.all_reduce(x, op=op, group=_group())
        return x.tolist()

    name = str(op).rpartition(".")[2]
    expected = {"BAND": [8, 2, 7], "BOR": [14, 14, 7], "BXOR": [6, 12, 0]}[name]
    assert run_ranks(fn, 2) == [expected] * 2


def test_bytes_of_every_dtype_move():
    dtypes = [torch.bool, torch.int16, torch.uint16, torch.uint64, torch.complex64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]

    def fn(rank, size):
        group = _group()
        for dtype in dtypes:
            # 0 and 1 are valid in every dtype, and bool has no others.
            whole = [
                (torch.arange(4 * size) % (2 + src) == 0).to(torch.float32) for src in range(size)
            ]
            x = whole[rank].to(dtype)
            y = torch.zeros_like(x)
            dist.all_to_all_single(y, x, group=group)
            expected = torch.cat([w[4 * rank : 4 * rank + 4] for w in whole]).to(dtype)
            assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
            dist.broadcast(x, 1, group=group)
            assert torch.equal(x.view(torch.uint8), whole[1].to(dtype).view(torch.uint8))

    run_ranks(fn, 2)


def test_strided_tensors_are_right_and_their_neighbours_untouched():
    def fn(rank, size):
        group = _group()
        for expected, run in (
            (3.0, lambda x: dist.all_reduce(x, group=group)),
            (2.0, lambda x: dist.broadcast(x, 1, group=group)),
            (3.0, lambda x: dist.reduce_scatter_tensor(x, torch.full((8, 3), 1.5), group=group)),
            (5.0, lambda x: dist.all_gather_into_tensor(x, torch.full((2, 3), 5.0), group=group)),
        ):
            base = torch.zeros(4, 6)
            view = base[:, ::2]
            view += rank + 1
            run(view)
            assert view.unique().tolist() == [expected]
            assert not base[:, 1::2].any()
        sent = torch.arange(8.0).view(4, 2).t() + 10 * rank
        y = torch.empty(2, 4)
        dist.all_to_all_single(y, sent, group=group)
        assert torch.equal(
            y, torch.stack([(torch.arange(4) * 2 + rank) + 10.0 * s for s in (0, 1)])
        )

    run_ranks(fn, 2)


def test_output_that_is_the_input_is_right():
    def fn(rank, size):
        group = _group()
        x = _ramp(600_000, rank)
        expected = torch.cat([_ramp(600_000, src).chunk(2)[rank] for src in range(size)])
        dist.all_to_all_single(x, x, group=group)
        assert torch.equal(x, expected)
        whole = torch.zeros(2 * 500_000)
        mine = whole.chunk(2)[rank].copy_(_ramp(500_000, rank))
        dist.all_gather_into_tensor(whole, mine, group=group)
        assert torch.equal(whole, torch.cat([_ramp(500_000, 0), _ramp(500_000, 1)]))
        dist.reduce_scatter_tensor(mine, whole, group=group)
        assert torch.equal(mine, 2 * _ramp(500_000, rank))

    run_ranks(fn, 2)


def test_uneven_exchanges_are_exact():
    def fn(rank, size):
        group = _group()
        # Rows from src to dst; ranks without rows, and more than fits into one step.
        for rows in (
            [[0, 3, 1], [2, 0, 0], [0, 0, 0]],
            [[5, 200_000, 1], [0, 0, 7], [90_000, 90_000, 2]],
        ):
            sent, received = rows[rank], [row[rank] for row in rows]
            pieces = [torch.full((n, 5), 10.0 * rank + dst) for dst, n in enumerate(sent)]
            expected = [torch.full((n, 5), 10.0 * src + rank) for src, n in enumerate(received)]
            y = torch.empty(sum(received), 5)
            dist.all_to_all_single(y, torch.cat(pieces), received, sent, group=group)
            assert torch.equal(y, torch.cat(expected))
            listed = [torch.empty(n, 5) for n in received]
            dist.all_to_all(listed, pieces, group=group)
            assert all(map(torch.equal, listed, expected))
        lengths = [1, 0, 400_000]
        y = torch.empty(lengths[rank])
        parts = [torch.full((n,), rank + 1.0 + 10 * dst) for dst, n in enumerate(lengths)]
        dist.reduce_scatter(y, parts, group=group)
        assert torch.equal(y, torch.full((lengths[rank],), 6.0 + 30 * rank))

    run_ranks(fn, 3)


# torch 2.11 says so of every first sparse tensor; torch 2.15 of coalesced calls that they will go.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:.*will be deprecated")
def test_work_of_calls_that_gloo_makes_has_what_they_write():
    def fn(rank, size):
        group = _group()
        x = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (3,))
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        # DistributedDataParallel reads the sum of sparse gradients there.
        assert work.get_future().value()[0].to_dense().tolist() == [1, 1, 0]
        y = torch.full((2,), float(rank))
        future = dist.all_reduce_coalesced([y], group=group, async_op=True)
        assert [t.tolist() for t in future.wait()] == [[1, 1]]
        lists = [[torch.empty(2)] for _ in range(size)]
        future = dist.all_gather_coalesced(lists, [y + rank], group=group, async_op=True)
        assert [[t.tolist() for t in row] for row in future.wait()] == [[[1, 1]], [[2, 2]]]

    run_ranks(fn, 2)
