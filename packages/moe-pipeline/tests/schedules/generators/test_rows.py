import pytest

from moe_pipeline.schedules.generators.rows import check_sizes, finish, folded_rank
from moe_pipeline.schedules.table.schedule import Action


def test_stages_go_to_and_fro():
    assert [folded_rank(s, 3) for s in range(7)] == [0, 1, 2, 2, 1, 0, 0]


def test_microbatches_beyond_the_number_are_dropped():
    rows = [[Action.parse(text) for text in ("0F0", "0F1", "0B0", "0B1")]]
    assert [str(a) for a in finish("t", rows, 1).ranks[0]] == ["0F0", "0B0"]


def test_a_size_is_refused_by_its_name():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        check_sizes(num_ranks=0)
