import pytest

from moe_pipeline.schedules import SCHEDULES
from moe_train.config import ParallelConfig
from moe_train.config.keys import keys_of
from moe_train.config.pipelines import IN_A_V, LOOPED, stages_needed

NAMES = next(key.choices for key in keys_of(ParallelConfig) if key.name == "schedule")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_stages_lie_where_the_schedule_of_moe_pipeline_puts_them(name: str) -> None:
    for pp in (1, 2, 3, 4):
        parallel = ParallelConfig(pp=pp, schedule=name)
        made = SCHEDULES[name](pp, 2 * pp)
        assert made.num_stages == parallel.num_stages
        for rank, row in enumerate(made.ranks):
            assert sorted({action.stage for action in row}) == list(parallel.stages_of(rank))


def test_a_key_for_every_named_schedule_that_trains_without_copies_of_stages() -> None:
    trains = {name for name, make in SCHEDULES.items() if make(2, 2).has_backward}
    assert set(NAMES) == (trains - {"dualpipe"}) | {"auto"}
    assert set(NAMES) >= LOOPED | IN_A_V and not LOOPED & IN_A_V


@pytest.mark.parametrize(
    ("schedule", "count", "words"),
    [
        ("1f1b", 2, 'schedule="1f1b", which has 1 stage on a rank; leave the key out'),
        ("zbv", 3, 'schedule="zbv", which has 2 stages on a rank'),
        ("looped_bfs", 1, 'schedule="looped_bfs", which has 2 stages or more on a rank'),
    ],
)
def test_another_number_of_stages_than_a_schedule_has_is_refused(
    schedule: str, count: int, words: str
) -> None:
    with pytest.raises(ValueError, match=f"parallel.stages_per_rank={count} does not fit") as told:
        ParallelConfig(pp=2, schedule=schedule, stages_per_rank=count)
    assert words in str(told.value)
    assert stages_needed("looped_bfs") == (2, None)


def test_a_limit_that_no_plan_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory_limit_mib=8 is only kept by .*got .zbv."):
        ParallelConfig(schedule="zbv", memory_limit_mib=8)
    assert ParallelConfig(schedule="auto", memory_limit_mib=8).per_rank == 2


def test_layers_that_do_not_fit_the_stages_are_refused_with_what_would() -> None:
    twice = ParallelConfig(pp=3, schedule="interleaved_1f1b")
    with pytest.raises(ValueError, match=r"pp=3 x 2 on a rank stages; choose pp among 1, 2, 4"):
        twice.check_divides(num_hidden_layers=8, num_experts=None)
    with pytest.raises(ValueError, match="have fewer of them, or"):
        twice.check_divides(num_hidden_layers=7, num_experts=None)
    by_cost = ParallelConfig(pp=3, schedule="interleaved_1f1b", layer_split="cost")
    by_cost.check_divides(num_hidden_layers=7, num_experts=None)
    with pytest.raises(ValueError, match=r"num_hidden_layers=5 are fewer than parallel\.pp=3 x 2"):
        by_cost.check_divides(num_hidden_layers=5, num_experts=None)
