import torch
import torch.distributed as dist

from moe_pipeline.executor.groups.token_scale import token_scale
from ranktest import run_ranks


def test_counts_labels_of_all_microbatches_that_are_not_ignored():
    labels = [
        torch.tensor([1, -100, 2]),
        None,
        torch.tensor([[0, 5]]),
        torch.zeros(0).long(),
    ]
    assert token_scale(labels) == 1 / 4
    assert token_scale(labels, ignore_index=0) == 1 / 4
    assert token_scale([torch.tensor([-100])]) == 1.0


def test_counts_those_of_all_ranks_of_the_group():
    def fn(rank, world_size):
        labels = [torch.ones(rank, dtype=torch.int64)] * 2
        return token_scale(labels, group=dist.group.WORLD)

    assert run_ranks(fn, 3) == [1 / 6] * 3
