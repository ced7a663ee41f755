import math
import tomllib
from pathlib import Path

import pytest

from moe_train.config.renames import FORMER_VALUES, RENAMED_KEYS, renewed
from moe_train.config.tables import all_keys
from moe_train.config.toml_file import dump_toml, load_config

# The moe_train.toml of a checkpoint that was saved before the keys were renamed, with every key.
FORMER = Path(__file__).with_name("moe_train_0.toml").read_text(encoding="utf-8")
MINIMAL = """
model.config_file = "config.json"
train = { output_dir = "out", max_steps = 10, global_batch_size = 8 }
optimizer.lr = 1e-3
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "moe_train.toml").write_text(FORMER)
    (tmp_path / "trainer_state.json").write_text("{}")
    return tmp_path


def test_a_checkpoints_own_file_is_read_with_its_former_keys_and_values(checkpoint: Path) -> None:
    config = load_config(checkpoint / "moe_train.toml")
    assert config.moe.aux_loss_scope == "microbatch"
    assert (config.moe.aux_loss_coef, config.moe.capacity_factor) == (None, None)
    assert (config.moe.z_loss_coef, config.moe.expert_bias_update_rate) == (0.25, 0.001)
    assert (config.data.max_bytes, config.tokenizer.file) == (None, None)
    assert (config.train.recompute, config.train.loss_chunk_tokens) == (None, None)
    assert config.train.threads_per_rank == 1
    assert config.train.validation_interval_steps > config.train.max_steps
    assert config.optimizer.max_grad_norm == math.inf
    assert config.checkpoint.interval_steps is None
    copy = checkpoint / "copy.toml"
    copy.write_text(dump_toml(config))
    assert load_config(copy) == config


def test_the_former_file_has_every_key_of_its_time() -> None:
    """So that the test above reads each of them."""
    tables = tomllib.loads(FORMER)
    former = {f"{table}.{name}" for table, values in tables.items() for name in values}
    renamed = {RENAMED_KEYS.get(name, name) for name in former}
    assert renamed <= {key.full_name for key in all_keys()}
    assert set(RENAMED_KEYS) - former == {"model.router_aux_loss_scope"}


def test_renames_lead_to_keys_that_exist() -> None:
    names = {key.full_name for key in all_keys()}
    assert set(RENAMED_KEYS.values()) <= names
    assert not set(RENAMED_KEYS) & names
    assert set(FORMER_VALUES) <= names


@pytest.mark.parametrize("former", RENAMED_KEYS)
def test_a_former_key_in_a_users_file_or_override_names_the_new_one(
    tmp_path: Path, former: str
) -> None:
    job = tmp_path / "job.toml"
    message = f"{former} was renamed to {RENAMED_KEYS[former]}"
    job.write_text(MINIMAL)
    with pytest.raises(ValueError, match=message):
        load_config(job, [f"{former}=1"])
    job.write_text(f"{MINIMAL}\n{former} = 1\n")
    with pytest.raises(ValueError, match=message):
        load_config(job)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("moe.aux_loss_coef=-1", "moe.aux_loss_coef=-1 no longer stands for a key that is not set"),
        ("data.max_bytes=0", "data.max_bytes=0 no longer stands for a key that is not set; leave"),
        ("train.recompute=none", "train.recompute='none' no longer stands for"),
        ("moe.aux_loss_scope=micro_batch", "'micro_batch' is now written 'microbatch'"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm=0 is now written inf"),
        ('model.init_from=""', "model.init_from='' no longer stands for"),
        ("data.extensions=[]", r"data.extensions=\[\] is now written \['\*'\]"),
    ],
)
def test_a_former_value_in_a_users_file_is_refused_with_what_to_write(
    tmp_path: Path, override: str, message: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(MINIMAL)
    with pytest.raises(ValueError, match=message):
        load_config(job, [override])


def test_a_file_of_the_same_name_beside_no_checkpoint_is_a_users(tmp_path: Path) -> None:
    (tmp_path / "moe_train.toml").write_text(FORMER)
    with pytest.raises(ValueError, match="was renamed to"):
        load_config(tmp_path / "moe_train.toml")


def test_what_is_no_former_spelling_stays() -> None:
    tables = {"log": {"plots": False}, "data": {"max_bytes": 5}, "odd": 3}
    assert renewed(tables) == tables
