import pytest
import torch
import torch.distributed as dist

from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.global_tokens import gather_tokens
from ranktest import collect_ranks, run_ranks


def test_alone_everything_is_ones_own():
    everyone = gather_tokens([torch.tensor([5, 6, 7])], MoEGroups(), None)
    assert everyone.rows[0].tolist() == [5, 6, 7]
    assert everyone.own_T.tolist() == [0, 1, 2]


def test_alone_tokens_are_ordered_by_their_ids_and_equal_ids_by_place():
    ids = torch.tensor([7, 2, 7, 0])
    everyone = gather_tokens([torch.arange(4), ids.double()], MoEGroups(), ids)
    assert everyone.rows[0].tolist() == [3, 1, 0, 2]
    assert everyone.rows[1].tolist() == [0, 2, 7, 7]
    assert torch.equal(everyone.rows[0][everyone.own_T], torch.arange(4))


@pytest.mark.parametrize("with_ids", [False, True])
def test_every_rank_sees_all_tokens_in_order_and_finds_its_own(with_ids):
    counts = [2, 0, 3]
    ids = [[40, 10], [], [20, 30, 0]]
    names = [[100, 101], [], [300, 301, 302]]

    def fn(rank, world_size):
        own = torch.tensor(names[rank], dtype=torch.int64)
        rows = [own, own.double().unsqueeze(1).expand(-1, 2)]
        given = torch.tensor(ids[rank], dtype=torch.int64) if with_ids else None
        everyone = gather_tokens(rows, MoEGroups(tokens=dist.group.WORLD), given)
        assert torch.equal(everyone.rows[1], everyone.rows[0].double().unsqueeze(1).expand(-1, 2))
        assert torch.equal(everyone.rows[0][everyone.own_T], own)
        return everyone.rows[0].tolist()

    everything = [name for own in names for name in own]
    if with_ids:
        place = dict(zip(everything, [i for own in ids for i in own], strict=True))
        everything.sort(key=place.__getitem__)
    assert run_ranks(fn, len(counts)) == [everything] * len(counts)


def test_ids_on_some_ranks_only_are_refused_on_all():
    def fn(rank, world_size):
        ids = torch.tensor([7, 3]) if rank == 0 else None
        gather_tokens([torch.zeros(2)], MoEGroups(tokens=dist.group.WORLD, timeout_s=20.0), ids)

    outcomes = collect_ranks(fn, 2)
    assert [outcome.error_type for outcome in outcomes] == ["MismatchError"] * 2
