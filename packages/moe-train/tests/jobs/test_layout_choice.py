from collections.abc import Callable

import pytest

from moe_train.config import Config
from moe_train.jobs.job import check_model
from moe_train.jobs.layout_choice import _VALUES as VALUES
from moe_train.jobs.layout_choice import JobLayout, choose_layouts
from moe_train.training import read_model_config

Configure = Callable[..., Config]


def chosen(config: Config, ranks: int = 4, count: int = 12) -> list[JobLayout]:
    return choose_layouts(config, read_model_config(config), max_ranks=ranks, count=count)


def values_of(layouts: list[JobLayout], name: str) -> set[object]:
    return {layout.values[name] for layout in layouts}


def test_a_job_with_uneven_experts_is_compared_with_one_rank_and_with_its_own_parts(
    configure: Configure,
) -> None:
    parts = 'parallel.expert_parts=["2,4"]'
    config = configure("parallel.ep=2", parts, "train.global_batch_size=8")
    first, *others = chosen(config, ranks=2)
    assert str(first).startswith("one rank") and not first.applied(config).parallel.expert_parts
    kept = {layout.values["parallel.ep"]: layout.applied(config).parallel for layout in others}
    assert kept[2].expert_parts == ("2,4",)


def test_twenty_layouts_of_four_ranks_have_every_value_and_begin_with_one_rank(
    configure: Configure,
) -> None:
    config = configure(num_experts=4, num_hidden_layers=4)
    layouts = chosen(config, count=20)
    assert len(set(layouts)) == len(set(map(str, layouts))) == 20
    assert str(layouts[0]) == "one rank, 1f1b, 2 microbatches"
    assert max(layout.world_size for layout in layouts) == 4
    assert values_of(layouts, "parallel.pp") == {1, 2, 3, 4}
    assert values_of(layouts, "parallel.dp") == {1, 2, 3, 4}
    assert values_of(layouts, "parallel.ep") == {1, 2, 4}, "four experts"
    assert values_of(layouts, "parallel.cp") == {1, 2, 3, 4}
    exchanged = [x for x in layouts if x.values["parallel.cp_attention"] == "all_to_all"]
    assert values_of(exchanged, "parallel.cp") == {1, 2}, "two heads"
    assert values_of(layouts, "parallel.tp") == {1, 2}, "two heads"
    assert values_of(layouts, "train.gradient_accumulation_steps") == {1, 2, 4}
    for name, values in VALUES.items():
        only = {False} if name == "moe.shared_expert_overlap" else set(values)
        assert values_of(layouts, name) == only, name


def test_every_layout_fits_the_job_and_keeps_all_its_other_keys(configure: Configure) -> None:
    apart = ("checkpoint.node_folder=/dev/shm/x", "moe.record_routing=kept")
    config = configure(*apart, num_experts=4)
    for layout in chosen(config, ranks=6):
        job = layout.applied(config)
        check_model(job, read_model_config(job))
        assert job.world_size == layout.world_size <= 6 and job.checkpoint.node_folder is None
        assert job.moe.record_routing is None, "the job's own record stays as it is"
        for name, value in layout.keys:
            table, _, field = name.partition(".")
            assert getattr(getattr(job, table), field) == value, name
        assert (job.optimizer, job.data) == (config.optimizer, config.data)
        assert job.train.global_batch_size == config.train.global_batch_size


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["moe.aux_loss_coef=0.1"], False),
        (["moe.aux_loss_coef=0.1", "moe.aux_loss_scope=sequence"], True),
        (["moe.z_loss_coef=0.1"], False),
        (["moe.capacity_factor=1.5"], False),
        ([], True),
    ],
)
def test_microbatches_change_only_where_the_job_means_the_same(
    configure: Configure, overrides: list[str], changes: bool
) -> None:
    layouts = chosen(configure(*overrides))
    counts = values_of(layouts, "train.gradient_accumulation_steps")
    assert (counts != {2}) == changes


def test_a_balance_over_the_whole_step_goes_only_with_schedules_that_can(
    configure: Configure,
) -> None:
    over_step = ("moe.aux_loss_coef=0.1", "moe.aux_loss_scope=global_batch")
    config = configure(*over_step, "parallel.schedule=forward_then_backward")
    layouts = chosen(config, count=40)
    assert len(layouts) > 12
    for layout in layouts:
        alone = layout.values["train.gradient_accumulation_steps"] == 1
        assert alone or layout.values["parallel.schedule"] in (
            "forward_then_backward",
            "looped_bfs",
        )


def test_one_rank_has_layouts_too(configure: Configure) -> None:
    layouts = chosen(configure(), ranks=1)
    assert len(layouts) >= 6 and {layout.world_size for layout in layouts} == {1}


def test_values_that_contradict_each_other_are_in_different_layouts(configure: Configure) -> None:
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 8}
    layouts = chosen(configure(**shared), ranks=2)
    names = ("moe.dispatch_chunks", "moe.shared_expert_overlap")
    pairs = {tuple(layout.values[name] for name in names) for layout in layouts}
    assert pairs == {(1, False), (1, True), (2, False)}


def test_nodes_of_the_hierarchical_route_are_smaller_than_the_ep_axis(
    configure: Configure,
) -> None:
    config = configure(num_experts=4)
    for layout in chosen(config):
        job, ep = layout.applied(config), layout.values["parallel.ep"]
        is_hierarchical = job.moe.dispatch_route == "hierarchical"
        assert job.moe.dispatch_ranks_per_node == (max(ep // 2, 1) if is_hierarchical else None)
