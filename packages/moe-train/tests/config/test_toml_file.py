import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_train.config.data_tables import DataConfig
from moe_train.config.model_tables import ModelConfig
from moe_train.config.optimizer_tables import OptimizerConfig
from moe_train.config.tables import Config, all_keys
from moe_train.config.toml_file import dump_toml, format_compact, keys_help, load_config
from moe_train.config.train_tables import TrainConfig

MINIMAL = """
[model]
config_file = "config.json"
[train]
output_dir = "out"
max_steps = 10
global_batch_size = 8
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(MINIMAL)
    return path


def test_missing_tables_and_keys_take_their_defaults(job: Path) -> None:
    config = load_config(job)
    assert config.data.corpus == ("python_stdlib",)
    assert (config.parallel.pp, config.train.max_steps, config.optimizer.lr) == (1, 10, 1e-3)


def test_overrides_win_over_the_file_and_later_ones_over_earlier(job: Path) -> None:
    config = load_config(
        job, ["train.max_steps=3", "train.max_steps=5", "log.plots=false", "train.dtype=bfloat16"]
    )
    assert (config.train.max_steps, config.log.plots, config.train.dtype) == (5, False, "bfloat16")


def test_override_values_may_be_quoted_or_lists(job: Path) -> None:
    config = load_config(job, ['train.dtype="bfloat16"', 'data.extensions=[".c", ".h"]'])
    assert (config.train.dtype, config.data.extensions) == ("bfloat16", (".c", ".h"))
    assert load_config(job, ["data.extensions=.c"]).data.extensions == (".c",)
    assert load_config(job, ["data.extensions=*"]).data.extensions == ("*",)


def test_an_override_without_a_value_takes_the_key_out(job: Path) -> None:
    job.write_text(MINIMAL + "[data]\nmax_bytes = 7\n")
    assert load_config(job).data.max_bytes == 7
    assert load_config(job, ["data.max_bytes="]).data.max_bytes is None
    assert load_config(job, ["log.plots="]).log.plots is True
    with pytest.raises(ValueError, match=r"lacks train\.max_steps"):
        load_config(job, ["train.max_steps="])


def test_paths_start_at_the_file_and_at_the_current_folder(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(job, ['data.corpus=["../text", "python_stdlib", "*.txt"]'])
    assert config.model.config_file == str(tmp_path / "config.json")
    assert config.train.output_dir == str(tmp_path / "out")
    assert config.data.corpus == (
        str(tmp_path / "text"),
        "python_stdlib",
        str(elsewhere / "*.txt"),
    )
    assert load_config(job, ["train.output_dir=run"]).train.output_dir == str(elsewhere / "run")
    url = load_config(job, ["train.output_dir=s3://bucket/run", "log.dir=logs"])
    assert (url.train.output_dir, url.log.dir) == ("s3://bucket/run", str(elsewhere / "logs"))


def test_folder_with_glob_signs_in_its_name_is_not_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]"
    folder.mkdir()
    (folder / "job.toml").write_text(MINIMAL + '[data]\ncorpus = ["*.txt"]\n')
    assert load_config(folder / "job.toml").data.corpus == (str(tmp_path / "run[[]1]" / "*.txt"),)


def test_home_is_expanded(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/someone")
    assert load_config(job, ["data.cache_dir=~/c"]).data.cache_dir == "/someone/c"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_stps=3", "unknown key train.max_stps; did you mean train.max_steps?"),
        ("train.pp=2", "unknown key train.pp; did you mean parallel.pp?"),
        ("trian.max_steps=3", "unknown table trian in 'trian.max_steps=3'; did you mean train?"),
        ("max_steps=3", "override 'max_steps=3' names no table; did you mean train.max_steps?"),
        ("train.max_steps", "override 'train.max_steps' is not of the form table.key=value"),
        ("log.interval=3", "unknown key log.interval; did you mean log.interval_steps?"),
        ("train.max_steps=0", "train.max_steps=0 is too small; it must be at least 1"),
        (f"train.max_steps=1{400 * '0'}", "train.max_steps=1000"),
        (f"optimizer.lr=1{400 * '0'}", "optimizer.lr=1000"),
        ("parallel.timeout_s=1e300", "parallel.timeout_s=1e+300 is too large; it must be at most"),
    ],
)
def test_bad_override_names_the_nearest_key(job: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        load_config(job, [override])
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_steps=many", "train.max_steps must be int, got 'many'"),
        ("train.max_steps=3.5", "train.max_steps must be int, got float 3.5"),
        ("log.plots=yes", "log.plots must be bool, got 'yes'"),
        ("data.corpus=[1]", "data.corpus must be list of str, got list [1]"),
    ],
)
def test_override_of_a_wrong_type_says_got_and_expected(
    job: Path, override: str, message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        load_config(job, [override])
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nseed = 1\n", "unknown table [trian]"),
        ("[train]\nmax_stps = 1\n", "unknown key train.max_stps; did you mean train.max_steps?"),
        ("max_steps = 3\n", "max_steps stands outside of a table; did you mean train.max_steps?"),
        ("train = 3\n", "train must be a table, got 3; write [train] above its keys"),
        ("[train\n", "is not valid TOML"),
        ("[model]\nconfig_file = 'c'\n", "lacks train.output_dir (folder for"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        load_config(path)
    assert message in str(raised.value)


def test_file_that_is_no_text_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_config(path)
    with pytest.raises(FileNotFoundError, match=r"none\.toml does not exist"):
        load_config(tmp_path / "none.toml")


def test_dumped_config_reads_back_from_another_folder(job: Path, tmp_path: Path) -> None:
    config = load_config(
        job, ['data.corpus=["a b", "c\\"d\\\\", "é\\u0007"]', "optimizer.eps=1e-12"]
    )
    copy = tmp_path / "other" / "copy.toml"
    copy.parent.mkdir()
    copy.write_text(dump_toml(config), encoding="utf-8")
    assert load_config(copy) == config


characters = st.characters(exclude_categories=("Cs",))


@given(
    text=st.text(characters, min_size=1),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
)
def test_any_value_survives_the_writer(text: str, lr: float, seed: int) -> None:
    config = Config(
        model=ModelConfig(config_file=text),
        data=DataConfig(corpus=(text, "b"), extensions=("*",)),
        train=TrainConfig(output_dir=text, max_steps=1, global_batch_size=1, seed=seed),
        optimizer=OptimizerConfig(lr=lr),
    )
    tables = tomllib.loads(dump_toml(config))
    assert tables["model"]["config_file"] == text
    assert tables["data"]["corpus"] == [text, "b"]
    assert tables["data"]["extensions"] == ["*"]
    assert "max_bytes" not in tables["data"]
    assert (tables["optimizer"]["lr"], tables["train"]["seed"]) == (lr, seed)


def test_help_and_compact_form_hold_every_key(job: Path) -> None:
    config, text = load_config(job), keys_help()
    lines = {line.split("]")[0][1:]: line for line in format_compact(config).splitlines()}
    for key in all_keys():
        is_set = getattr(getattr(config, key.table), key.name) is not None
        assert (f" {key.name}=" in lines[key.table]) == is_set, key.full_name
        assert f"  {key.full_name}  (" in text
        assert not key.unit or key.unit in text


def test_groups_of_parameters_are_tables_with_a_name(job: Path, tmp_path: Path) -> None:
    job.write_text(
        MINIMAL + '[param_groups.routers]\nparameters = ["*.mlp.gate.weight"]\nlr_ratio = 0.1\n'
    )
    config = load_config(
        job, ["param_groups.routers.weight_decay=0.0", "param_groups.b.parameters=x"]
    )
    (routers, other) = config.param_groups
    assert (routers.lr_ratio, routers.weight_decay, routers.algorithm) == (0.1, 0.0, None)
    assert (other.name, other.parameters, other.lr_ratio) == ("b", ("x",), 1.0)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_toml(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[param_groups.a]\nlr_ratio = 1.0\n", "lacks param_groups.a.parameters"),
        ("[param_groups]\nparameters = ['x']\n", r"write \[param_groups.NAME\]"),
        ("[param_groups.a]\nparameter = ['x']\n", "did you mean param_groups.a.parameters"),
        ("[param_group.a]\nparameters = ['x']\n", r"unknown table|param_groups.NAME"),
        ("[param_groups.a]\nparameters = []\n", "names none"),
        ("[param_groups.a]\nparameters = ['x']\nlr_ratio = -1.0\n", "too small"),
    ],
)
def test_a_mistaken_group_is_refused(job: Path, text: str, message: str) -> None:
    job.write_text(MINIMAL + text)
    with pytest.raises(ValueError, match=message):
        load_config(job)


def test_a_byte_order_mark_is_no_part_of_a_job(job: Path) -> None:
    job.write_text(MINIMAL, encoding="utf-8-sig")
    assert load_config(job).train.max_steps == 10
