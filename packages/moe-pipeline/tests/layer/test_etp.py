import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from moe_pipeline.layer.etp import gather_rows, return_rows, rows_by_expert, share_counts
from ranktest import run_ranks

D = 3


def rows_of(counts, rank):
    """Rows that name their rank, expert and place, sorted by expert."""
    rows = [(rank, expert, i) for expert, n in enumerate(counts) for i in range(n)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)


COUNTS = [
    ([[2, 0, 3], [1, 4, 0]], "unequal"),
    ([[0, 0, 0], [1, 4, 0]], "a rank without rows"),
    ([[0, 0], [0, 0], [0, 0]], "no rows at all"),
    ([[5], [0], [1], [2]], "one expert"),
]


@pytest.mark.parametrize(("counts", "_name"), COUNTS)
def test_rows_by_expert_sorts_by_expert_then_rank_then_place(counts, _name):
    by_rank = torch.cat([rows_of(own, rank) for rank, own in enumerate(counts)])
    ordered = by_rank[rows_by_expert(torch.tensor(counts))].tolist()
    assert ordered == sorted(ordered, key=lambda row: (row[1], row[0], row[2]))
    assert len(ordered) == len(by_rank)


@pytest.mark.parametrize(("counts", "_name"), COUNTS)
def test_shared_rows_are_everyones_sorted_and_come_back_summed(counts, _name):
    world_size = len(counts)

    def fn(rank, world_size):
        x, weights = rows_of(counts[rank], rank), torch.arange(sum(counts[rank])) + 100.0 * rank
        layout = share_counts(counts[rank], group=dist.group.WORLD)
        x_SD, weights_S = gather_rows(x, weights, layout)
        back = return_rows(x_SD * (rank + 1), layout)
        return x_SD.tolist(), weights_S.tolist(), layout.num_tokens_per_expert, back.numpy()

    results = run_ranks(fn, world_size)
    everything = [row for rank, own in enumerate(counts) for row in rows_of(own, rank).tolist()]
    ordered = sorted(everything, key=lambda row: (row[1], row[0], row[2]))
    starts = [[sum(own[:expert]) for expert in range(len(own))] for own in counts]
    weights = [100.0 * r + starts[int(r)][int(e)] + i for r, e, i in ordered]
    factor = world_size * (world_size + 1) / 2
    for rank, (x_SD, weights_S, totals, back) in enumerate(results):
        assert x_SD == ordered
        assert weights_S == weights
        assert list(totals) == [sum(column) for column in zip(*counts, strict=True)]
        assert torch.equal(torch.from_numpy(back), rows_of(counts[rank], rank) * factor)


def test_slices_give_the_values_and_gradients_of_whole_experts(seed):
    counts = [[2, 0, 3], [1, 4, 0]]
    rows = sum(map(sum, counts))
    x, factors = torch.randn(2, rows, D, dtype=torch.float64)
    weights = torch.rand(rows, dtype=torch.float64)
    up, down = torch.randn(3, 4, D).double(), torch.randn(3, D, 4).double()

    def experts(x, weights, totals, up, down):
        pieces = zip(x.split(list(totals)), weights.split(list(totals)), up, down, strict=True)
        return torch.cat([(torch.tanh(x @ u.T) * w[:, None]) @ d.T for x, w, u, d in pieces])

    def fn(rank, world_size):
        own = [slice(0, 5), slice(5, 10)][rank]
        half = slice(rank * 2, rank * 2 + 2)
        leaves = [t.clone().requires_grad_() for t in (x[own], weights[own])]
        leaves += [t.clone().requires_grad_() for t in (up[:, half], down[:, :, half])]
        layout = share_counts(counts[rank], group=dist.group.WORLD)
        x_SD, weights_S = gather_rows(leaves[0], leaves[1], layout)
        partial = experts(x_SD, weights_S, layout.num_tokens_per_expert, *leaves[2:])
        y = return_rows(partial, layout)
        (y * factors[own]).sum().backward()
        return [y.detach().numpy(), *(t.grad.numpy() for t in leaves)]

    got = [[torch.from_numpy(t) for t in values] for values in run_ranks(fn, 2)]
    leaves = [t.clone().requires_grad_() for t in (x, weights, up, down)]
    y = torch.cat(
        [
            experts(leaves[0][own], leaves[1][own], counts[rank], *leaves[2:])
            for rank, own in enumerate((slice(0, 5), slice(5, 10)))
        ]
    )
    (y * factors).sum().backward()
    dims = (0, 0, 0, 1, 2)
    wanted = [y.detach(), *(t.grad for t in leaves)]
    for parts, dim, whole in zip(zip(*got, strict=True), dims, wanted, strict=True):
        assert_close(torch.cat(parts, dim=dim), whole, atol=1e-13, rtol=1e-13)
