import dataclasses
import math
import re
from pathlib import Path

import pytest

from moe_train.config.data_tables import DataConfig
from moe_train.config.model_tables import ModelConfig, MoeTable
from moe_train.config.optimizer_tables import OptimizerConfig, ParamGroupConfig
from moe_train.config.parallel_table import ParallelConfig
from moe_train.config.run_tables import CheckpointConfig, LogConfig
from moe_train.config.tables import TABLES, Config, all_keys
from moe_train.config.train_tables import TrainConfig
from moe_train.errors import TrainValueError


def train(**changes: object) -> TrainConfig:
    values = {"output_dir": "out", "max_steps": 10, "global_batch_size": 8, **changes}
    return TrainConfig(**values)  # type: ignore[arg-type]


def config(**tables: object) -> Config:
    values = {
        "model": ModelConfig(config_file="config.json"),
        "train": train(),
        "optimizer": OptimizerConfig(lr=1e-3),
        **tables,
    }
    return Config(**values)  # type: ignore[arg-type]


def test_world_size_is_the_product_of_the_axes() -> None:
    made = config(parallel=ParallelConfig(pp=2, dp=2, ep=4), train=train(global_batch_size=8))
    assert made.world_size == 16


def test_a_run_whose_checkpoints_go_to_a_store_says_where_the_rest_goes() -> None:
    store = train(output_dir="s3://bucket/run")
    with pytest.raises(ValueError, match=r"^train.output_dir is a s3:// URL.*set log.dir to a dir"):
        config(train=store)
    made = config(train=store, log=LogConfig(dir="/logs"))
    assert (made.log_folder, made.local_folders) == (Path("/logs"), {"log.dir": Path("/logs")})
    assert config().local_folders == {"train.output_dir": Path("out")}
    with pytest.raises(ValueError, match=r"log.dir is a s3:// URL, but metrics are appended"):
        LogConfig(dir="s3://bucket/logs")


def test_tables_are_frozen_and_slotted() -> None:
    table = train()
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.seed = 1  # type: ignore[misc]
    assert not hasattr(table, "__dict__")


def test_every_key_is_described() -> None:
    names = [key.full_name for key in all_keys()]
    assert len(names) == len(set(names))
    assert {key.table for key in all_keys()} == set(TABLES)
    for key in all_keys():
        assert key.help and not key.help.endswith("."), key.full_name


def test_batch_that_does_not_divide_names_the_numbers_and_a_remedy() -> None:
    batch = train(global_batch_size=12, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match=r"=12 does not divide .* = 8; choose 8 or 16"):
        config(train=batch, parallel=ParallelConfig(ep=2)).check_batch()
    with pytest.raises(ValueError, match=r"=3 does not divide .* = 8; choose 8$"):
        config(train=train(global_batch_size=3), parallel=ParallelConfig(dp=8)).check_batch()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "train.max_steps=0 is too small; it must be at least 1"),
        ({"seed": -1}, "train.seed=-1 is too small"),
        ({"output_dir": ""}, "train.output_dir is empty; give a value"),
        ({"dtype": "float16"}, 'train.dtype must be one of "float32", "bfloat16", got'),
        ({"master_weights": True}, "train.master_weights=true has no use"),
        ({"stochastic_rounding": True}, 'weights without copies, not for train.dtype="float32"'),
        (
            {"stochastic_rounding": True, "dtype": "bfloat16", "master_weights": True},
            "train.master_weights=true; choose one of them",
        ),
        ({"recompute_keep": ("attention",)}, 'is for train.recompute="selective"; set that'),
        ({"recompute": "selective", "recompute_keep": ()}, "train.recompute_keep=[] keeps"),
        ({"gradient_accumulation_steps": 3}, "choose 6 or 9"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        train(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_learning_rate_must_be_a_positive_number(lr: float) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr="):
        OptimizerConfig(lr=lr)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": "10"}, "train.max_steps must be int, got str '10'"),
        ({"max_steps": 10.0}, "train.max_steps must be int, got float 10.0"),
        ({"max_steps": True}, "train.max_steps must be int, got bool True"),
        ({"master_weights": 1}, "train.master_weights must be bool, got int 1"),
    ],
)
def test_wrong_types_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        train(**changes)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aux_loss_coef", -0.5),
        ("z_loss_coef", -1.0),
        ("capacity_factor", 0.0),
        ("capacity_factor", float("inf")),
        ("expert_bias_update_rate", 0.0),
        ("token_drop_policy", "random"),
        ("aux_loss_scope", "batch"),
    ],
)
def test_values_of_the_moe_table_that_mean_nothing_are_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"moe.{name}"):
        MoeTable(**{name: value})  # type: ignore[arg-type]


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(TypeError, match=r"moe\.update_expert_bias must be bool"):
        MoeTable(update_expert_bias="yes")  # type: ignore[arg-type]


def test_keys_that_are_not_set_are_none_and_nothing_else_stands_for_them() -> None:
    table = MoeTable()
    assert (table.aux_loss_coef, table.capacity_factor) == (None, None)
    assert MoeTable(aux_loss_coef=0).aux_loss_coef == 0
    absent = {key.full_name for key in all_keys() if key.default is None}
    assert {"data.max_bytes", "checkpoint.interval_steps", "model.init_from"} <= absent
    for key in all_keys():
        assert key.default not in ("", -1, -1.0), key.full_name
        is_number = isinstance(key.default, int | float) and not isinstance(key.default, bool)
        # A default of 0 is a number as any other: no seed, warm-up, loss beside, or sharing out.
        known = {"train.seed", "optimizer.warmup_steps", "moe.z_loss_coef", "parallel.sharding"}
        assert not is_number or key.default or key.full_name in known, key.full_name


def test_a_key_does_not_repeat_its_table() -> None:
    for key in all_keys():
        assert key.table not in key.name.split("_"), key.full_name


def test_gradients_may_have_no_limit_and_an_empty_text_is_no_path() -> None:
    assert OptimizerConfig(lr=1, max_grad_norm=math.inf).max_grad_norm == math.inf
    with pytest.raises(ValueError, match=r"max_grad_norm=nan is not a finite number"):
        OptimizerConfig(lr=1, max_grad_norm=math.nan)
    with pytest.raises(ValueError, match=r"data\.cache_dir is empty; .* leave the key out"):
        DataConfig(cache_dir="")


def test_a_config_is_made_of_its_tables() -> None:
    with pytest.raises(TypeError, match=r"Config\(optimizer=\.\.\.\) must be OptimizerConfig"):
        config(optimizer=None)


def test_numbers_and_lists_are_kept_in_one_form() -> None:
    assert isinstance(OptimizerConfig(lr=1).lr, float)
    assert DataConfig(corpus=["a", "b"]).corpus == ("a", "b")  # type: ignore[arg-type]


def test_empty_corpus_and_missing_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.corpus"):
        DataConfig(corpus=())
    with pytest.raises(ValueError, match=r"set model\.config_file"):
        ModelConfig()


def test_the_layout_follows_the_finished_steps() -> None:
    made = ParallelConfig(ep=4, relayout=("10: pp=2 ep=2", "20: pp=2, dp=2"))
    assert [made.at_step(step).axis_sizes for step in (0, 9, 10, 19, 20, 99)] == [
        *[(1, 1, 4)] * 2,
        *[(2, 1, 2)] * 2,
        *[(2, 2, 1)] * 2,
    ]
    assert [made.next_change(step) for step in (0, 9, 10, 20)] == [10, 10, 20, None]
    assert made.changed(15, (1, 4, 1, 1, 1, 1)).at_step(16).axis_sizes == (1, 4, 1)
    assert made.changed(15, (1, 4, 1, 1, 1, 1)).at_step(20).axis_sizes == (2, 2, 1)
    assert made.changed(10, (1, 4, 1, 2, 2, 2)).at_step(10).sizes == (1, 4, 1, 2, 2, 2)
    assert ParallelConfig(ep=4, cp=2, relayout=("9: ep=4",)).at_step(9).sizes == (1, 1, 4, 1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["10: pp=3"], "'10: pp=3' needs 3 ranks, but the job has 4"),
        (["10: pp=4", "10: ep=4"], "'10: ep=4' does not come after step 10"),
        (["0: pp=4"], "'0: pp=4' does not come after step 0"),
        (["pp=4"], "'pp=4' is no change of layout"),
        (["10: xp=4"], "'10: xp=4' is no change of layout"),
        (["10: ep=4 cp=2 tp=4"], "cp=2 * tp=4 ranks share each sample, but the dp * ep = 4 ranks"),
        (["10: pp=2 pp=2"], "'10: pp=2 pp=2' is no change of layout"),
        (["10:"], "'10:' is no change of layout"),
        (["10: ep=4 cp=3"], "cp=3 ranks share each sample, but the dp * ep = 4 ranks"),
    ],
)
def test_changes_of_layout_that_cannot_be_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(TrainValueError, match=re.escape(message)):
        ParallelConfig(ep=4, relayout=tuple(changes))


def test_ranks_that_share_samples_are_some_of_a_stage_and_no_more_than_heads() -> None:
    made = ParallelConfig(pp=2, dp=2, ep=3, cp=3)
    assert (made.world_size, made.num_sample_ranks, made.sizes) == (12, 2, (2, 2, 3, 3, 1, 1))
    with pytest.raises(TrainValueError, match=r"parallel\.cp=4 .* dp \* ep = 6 .* 1, 2, 3, 6"):
        ParallelConfig(dp=2, ep=3, cp=4)
    for heads in (3, 8):
        made.check_divides(num_hidden_layers=None, num_experts=None, num_heads=heads)
    many = ParallelConfig(dp=2, ep=3, cp=6)
    with pytest.raises(TrainValueError, match=r"num_attention_heads=5, .*parallel\.cp=3, or set"):
        many.check_divides(num_hidden_layers=None, num_experts=None, num_heads=5)
    ring = dataclasses.replace(many, cp_attention="ring")
    ring.check_divides(num_hidden_layers=None, num_experts=None, num_heads=5)
    many.check_dropout(0.1)
    ring.check_dropout(0.0)
    with pytest.raises(TrainValueError, match=r"ring.* attention_dropout=0.1 .*all_to_all"):
        ring.check_dropout(0.1)


def test_ranks_that_share_samples_take_them_together() -> None:
    shared = config(parallel=ParallelConfig(dp=4, cp=2), train=train(global_batch_size=2))
    shared.check_batch()
    with pytest.raises(ValueError, match=r"dp=4 \* parallel\.ep=1 / parallel\.cp=2 = 2; choose 2"):
        config(parallel=ParallelConfig(dp=4, cp=2), train=train(global_batch_size=3)).check_batch()


def test_ranks_that_share_heads_divide_them_and_leave_enough_to_the_others() -> None:
    made = ParallelConfig(pp=2, dp=4, ep=2, cp=2, tp=2)
    assert (made.num_sample_ranks, made.sizes) == (2, (2, 4, 2, 2, 2, 1))
    nothing = {"num_hidden_layers": None, "num_experts": None}
    made.check_divides(**nothing, num_heads=4)
    with pytest.raises(TrainValueError, match=r"tp=2 .* num_attention_heads=5 .*choose among 1$"):
        made.check_divides(**nothing, num_heads=5)
    with pytest.raises(TrainValueError, match=r"=2 / parallel\.tp=2, .* is parallel\.cp=1, or set"):
        made.check_divides(**nothing, num_heads=2)
    dataclasses.replace(made, cp_attention="ring").check_divides(**nothing, num_heads=2)
    made.check_tensor(widths={}, vocab_size=4, norms_all_heads=False)
    wide = ParallelConfig(dp=6, tp=6)
    with pytest.raises(TrainValueError, match=r"vocab_size=5, at least .* is parallel\.tp=3$"):
        wide.check_tensor(widths={}, vocab_size=5, norms_all_heads=False)
    with pytest.raises(TrainValueError, match=r"tp=6 .* intermediate_size=8 .*among 1, 2$"):
        wide.check_tensor(widths={"intermediate_size": 8}, vocab_size=6, norms_all_heads=False)
    with pytest.raises(TrainValueError, match=r"norms queries .* parallel\.cp=6"):
        wide.check_tensor(widths={"intermediate_size": 6}, vocab_size=6, norms_all_heads=True)


def test_a_shared_expert_is_not_overlapped_where_ranks_share_it() -> None:
    with pytest.raises(TrainValueError, match=r"tp=2 ranks gather .* moe\.shared_expert_overlap"):
        config(moe=MoeTable(shared_expert_overlap=True), parallel=ParallelConfig(ep=2, tp=2))


def test_muon_is_refused_where_a_layout_cuts_matrices() -> None:
    muon = OptimizerConfig(lr=1e-3, name="muon")
    assert config(optimizer=muon, parallel=ParallelConfig(dp=2, relayout=("3: dp=2 cp=2",)))
    for parallel in (ParallelConfig(dp=2, tp=2), ParallelConfig(dp=2, relayout=("3: ep=2 tp=2",))):
        with pytest.raises(TrainValueError, match=r"parallel\.tp=2 cuts matrices .*adamw"):
            config(optimizer=muon, parallel=parallel)
    some = ParamGroupConfig(name="some", parameters=("*",), algorithm="muon")
    with pytest.raises(TrainValueError, match=r'use param_groups\.some\.algorithm="adamw"'):
        config(param_groups=(some,), parallel=ParallelConfig(dp=2, etp=2))


def test_a_layout_cannot_change_where_states_are_kept_on_nodes() -> None:
    parallel = ParallelConfig(ep=2, relayout=("3: pp=2",))
    config(parallel=parallel, checkpoint=CheckpointConfig(save_mode="async"))
    with pytest.raises(TrainValueError, match=r"checkpoint\.node_folder"):
        config(parallel=parallel, checkpoint=CheckpointConfig(node_folder="/dev/shm/x"))


def test_fp8_experts_are_refused_in_other_formats_and_with_an_implementation() -> None:
    fp8 = ModelConfig(config_file="config.json", experts_fp8=True)
    assert config(model=fp8, train=train(dtype="bfloat16")).model.experts_fp8
    with pytest.raises(ValueError, match='float32"; set train'):
        config(model=fp8)
    with pytest.raises(ValueError, match=r'its own, not model\.experts_implementation="loop"'):
        dataclasses.replace(fp8, experts_implementation="loop")


def test_stochastic_rounding_is_refused_where_muon_updates_something() -> None:
    low = train(dtype="bfloat16", stochastic_rounding=True)
    group = ParamGroupConfig(name="some", parameters=("*",), algorithm="muon")
    assert config(train=low).train.stochastic_rounding
    with pytest.raises(ValueError, match="is for AdamW, and muon updates some parameters"):
        config(train=low, param_groups=(group,))
    with pytest.raises(ValueError, match="is for AdamW"):
        config(train=low, optimizer=OptimizerConfig(lr=1e-3, name="muon"))


def test_parameters_that_come_and_go_are_refused_beside_offloaded_activations() -> None:
    offloaded = train(offload_activations=True)
    assert config(parallel=ParallelConfig(sharding=2), train=offloaded).parallel.sharding == 2
    with pytest.raises(ValueError, match=r"offload_activations=true cannot tell .*sharding=2"):
        config(parallel=ParallelConfig(sharding=3), train=offloaded)


def test_experts_lie_as_the_keys_say() -> None:
    made = ParallelConfig(ep=2, expert_parts=("3,5", "7: 8,0"))
    assert made.parts_by_layer([1, 7]) == {1: (3, 5), 7: (8, 0)}
    assert ParallelConfig(ep=2, expert_parts=("7: 8,0",)).parts_by_layer([1, 7]) == {7: (8, 0)}
    changes = ("2: ep=2, experts=1,7", "4: dp=2", "6: experts=load ep=2", "8: experts=1,7,ep=2")
    made = ParallelConfig(ep=2, expert_parts=("3,5",), relayout=changes)
    found = [made.at_step(step).parts_by_layer([0]) for step in (0, 2, 4, 6, 8)]
    assert found == [{0: (3, 5)}, {0: (1, 7)}, {}, {}, {0: (1, 7)}]
    assert [made.is_by_load(step) for step in (5, 6, 7, 8)] == [False, True, True, False]
    asked = made.changed(5, (1, 1, 2, 1, 1, 1), "4,4")
    assert asked.at_step(5).parts_by_layer([0]) == {0: (4, 4)}
    assert [asked.last_change(step) for step in (1, 4, 5, 6)] == [0, 4, 5, 6]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_parts": ("3,5,1",)}, "'3,5,1' has parts for 3 ranks, but ep=2"),
        ({"expert_parts": ("3;5",)}, "'3;5' are no parts"),
        ({"expert_parts": ("load",)}, "'load' are no parts"),
        ({"expert_parts": ("3,5", "4,4")}, "says twice what every layer has"),
        ({"expert_parts": ("1: 3,5", "1: 4,4")}, "says twice what layer 1 has"),
        ({"relayout": ("4: ep=2 experts=3",)}, "has parts for 1 ranks, but ep=2"),
        ({"relayout": ("4: ep=2 experts=loads",)}, "is no change of layout"),
        ({"relayout": ("4: ep=2 experts=",)}, "is no change of layout"),
    ],
)
def test_parts_that_cannot_be_are_refused(keys: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(TrainValueError, match=re.escape(message)):
        ParallelConfig(ep=2, **keys)  # type: ignore[arg-type]
