import tomllib
from pathlib import Path

import pytest

from moe_train.config.data_tables import DataConfig, SourceConfig
from moe_train.config.keys import keys_of
from moe_train.config.toml_file import dump_toml, format_compact, keys_help, load_config

JOB = """
[model]
config_file = "config.json"
[train]
output_dir = "out"
max_steps = 10
global_batch_size = 8
[optimizer]
lr = 1e-3
[data]
kind = "chat"
max_bytes = 1000
"""
SOURCES = """
[sources.code]
corpus = ["code/*.jsonl"]
weight = 2
kind = "text"
field = "meta.content"
[sources.talk-2]
corpus = ["talk.jsonl"]
max_bytes = 7
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB + SOURCES)
    return path


def test_without_tables_of_sources_there_is_one_made_of_data(job: Path) -> None:
    job.write_text(JOB)
    (source,) = load_config(job).all_sources
    assert (source.name, source.corpus, source.weight) == ("data", ("python_stdlib",), 1.0)
    assert (source.kind, source.field, source.packing) == ("chat", "messages", "best_fit")
    (plain,) = load_config(job, ["data.kind=text"]).all_sources
    assert (plain.field, plain.packing, plain.extensions) == ("text", "stream", (".py",))


def test_absent_keys_of_a_source_are_those_of_data(job: Path, tmp_path: Path) -> None:
    config = load_config(job, ["data.packing=pad"])
    code, talk = config.all_sources
    assert code.corpus == (str(tmp_path / "code/*.jsonl"),)
    assert (code.weight, code.kind, code.field, code.max_bytes) == (2, "text", "meta.content", 1000)
    assert (talk.weight, talk.kind, talk.field, talk.max_bytes) == (1, "chat", "messages", 7)
    assert (code.packing, talk.packing) == ("pad", "pad")
    assert (config.sources[1].kind, config.sources[1].packing) == (None, None)


def test_sources_are_overridden_and_read_back(job: Path, tmp_path: Path) -> None:
    config = load_config(job, ["sources.code.weight=3.5", "sources.new.corpus=a.txt"])
    assert [source.weight for source in config.sources] == [3.5, 1.0, 1.0]
    assert config.sources[2].corpus == (str(Path.cwd() / "a.txt"),)
    copy = tmp_path / "other" / "copy.toml"
    copy.parent.mkdir()
    copy.write_text(dump_toml(config))
    assert load_config(copy) == config
    assert tomllib.loads(dump_toml(config))["sources"]["talk-2"]["max_bytes"] == 7
    assert "[sources.talk-2]" in format_compact(config)


def test_help_names_every_key_of_a_source() -> None:
    text = keys_help()
    assert all(f"  {key.full_name}  (" in text for key in keys_of(SourceConfig))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.corpus=a.txt"], "data.corpus and [sources.NAME] are both given"),
        (
            ["sources.code.wieght=2"],
            "unknown key sources.code.wieght; did you mean sources.code.",
        ),
        (["sources.code.weight=0"], "sources.code.weight=0.0 is too small; it must be above 0"),
        (["source.code.weight=0"], "unknown table source.code in"),
        (["sources.code=1"], "unknown table sources in"),
        (["sources.code.corpus="], "lacks sources.code.corpus (folders"),
        (["sources.code.corpus=[]"], "sources.code.corpus=[] names no file"),
        (["sources.a b.corpus=x"], "[sources.a b] is no name of a source"),
        (["sources.code.format=npy"], 'sources.code.kind="text" cannot be read from'),
        (["sources.talk-2.format=text"], "choose among auto, jsonl, parquet"),
        (["data.format=megatron"], 'data.kind="chat" cannot be read from data.format="megatron"'),
    ],
)
def test_mistakes_in_sources_are_named(job: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        load_config(job, overrides)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["sources = 3\n", "[sources]\ncorpus = ['a']\n"])
def test_sources_without_names_are_refused(job: Path, text: str) -> None:
    job.write_text(text + JOB)
    with pytest.raises(ValueError, match=r"write \[sources\.NAME\] above"):
        load_config(job)


def test_a_config_refuses_two_sources_of_one_name_and_wrong_types(job: Path) -> None:
    config = load_config(job)
    table = {name: getattr(config, name) for name in ("model", "train", "optimizer")}
    with pytest.raises(ValueError, match="not distinct"):
        type(config)(**table, sources=(config.sources[0], config.sources[0]))
    with pytest.raises(TypeError, match="must be SourceConfig"):
        type(config)(**table, sources=(DataConfig(),))
    with pytest.raises(ValueError, match="are both given"):
        type(config)(**table, data=DataConfig(corpus=("a",)), sources=config.sources)
