import pytest
import torch.distributed as dist

from moe_pipeline.groups import MoEGroups
from ranktest import run_ranks


def test_without_groups_a_rank_has_everything():
    groups = MoEGroups()
    assert (groups.ep_size, groups.etp_size, groups.etp_rank) == (1, 1, 0)


def test_a_limit_that_is_no_time_is_refused():
    for limit in (-1, 0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"groups\.timeout_s"):
            MoEGroups(timeout_s=limit)
    with pytest.raises(TypeError, match=r"groups\.timeout_s"):
        MoEGroups(timeout_s="60")


def test_axes_that_cross_in_one_rank_are_accepted():
    def fn(rank, world_size):
        made = {pair: dist.new_group(list(pair)) for pair in [(0, 1), (2, 3), (0, 2), (1, 3)]}
        mine = [group for pair, group in made.items() if rank in pair]
        groups = MoEGroups(ep=mine[1], etp=mine[0], tokens=dist.group.WORLD, sequence=mine[0])
        alone = [dist.new_group([each]) for each in range(world_size)][rank]
        MoEGroups(ep=alone, etp=alone, sequence=alone)  # all tokens are here
        return groups.ep_size, groups.etp_size, groups.etp_rank

    assert run_ranks(fn, 4) == [(2, 2, rank % 2) for rank in range(4)]


def test_groups_that_contradict_each_other_are_refused_at_once():
    def fn(rank, world_size):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        world, own, other = dist.group.WORLD, pairs[rank // 2], pairs[1 - rank // 2]
        ranks = [0, 1] if rank < 2 else [2, 3]
        both = rf"ep has the ranks \[0, 1, 2, 3\], groups.etp \[{ranks[0]}, {ranks[1]}\]"
        with pytest.raises(ValueError, match=both):
            MoEGroups(ep=world, etp=own, tokens=world)
        for axis in ("ep", "etp", "sequence"):
            for tokens in ({}, {"tokens": own}):
                with pytest.raises(ValueError, match=rf"groups.{axis} has the ranks \[0, 1, 2, 3"):
                    MoEGroups(**{axis: world}, **tokens)
        for sequence, has in ((None, r"\[\]"), (own, rf"\[{ranks[0]}, {ranks[1]}\]")):
            with pytest.raises(ValueError, match=rf"tp has the ranks .*3\], groups.sequence {has}"):
                MoEGroups(tp=world, sequence=sequence, tokens=world)
        MoEGroups(tp=own, sequence=world, tokens=world)
        with pytest.raises(TypeError, match=r"groups\.ep is .*outside of a group"):
            MoEGroups(ep=other, tokens=world)

    run_ranks(fn, 4)
