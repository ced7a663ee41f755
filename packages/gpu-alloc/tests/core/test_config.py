import dataclasses

import pytest

from gpu_alloc import AllocatorConfig, AllocError, ConfigError
from gpu_alloc.errors import IgnoredSettingWarning


@pytest.mark.filterwarnings("ignore::gpu_alloc.errors.IgnoredSettingWarning")
def test_text_form_round_trips():
    config = AllocatorConfig(
        small_pool_size_in_mb=3,
        auto_growth_chunk_size_in_mb=5,
        small_pool_auto_growth_chunk_size_in_mb=7,
        large_pool_auto_growth_chunk_size_in_mb=11,
        small_pool_pre_alloc_in_mb=13,
        large_pool_pre_alloc_in_mb=17,
        alignment_size=64,
        free_idle_chunk=True,
        free_when_no_cache_hit=True,
        memory_limit_in_mb=100,
        use_virtual_memory=True,
    )
    assert all(
        getattr(config, field.name) != field.default for field in dataclasses.fields(config)
    ), "every field must differ from its default, or the round trip proves nothing about it"
    assert AllocatorConfig.parse(config.format()) == config


def test_environment_is_read_and_spaces_are_allowed():
    environ = {"GPU_ALLOC_CONF": " small_pool_size_in_mb : 2 , free_idle_chunk:On ,"}
    config = AllocatorConfig.from_env(environ)
    assert config == AllocatorConfig(small_pool_size_in_mb=2, free_idle_chunk=True)
    assert AllocatorConfig.from_env({}) == AllocatorConfig()
    assert AllocatorConfig.from_env({"GPU_ALLOC_CONF": ""}) == AllocatorConfig()


def test_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("GPU_ALLOC_CONF", "alignment_size:256")
    assert AllocatorConfig.from_env().alignment_size == 256


def test_base_keeps_what_is_not_named():
    base = AllocatorConfig(large_pool_pre_alloc_in_mb=64)
    changed = AllocatorConfig.parse("alignment_size:256", base)
    assert changed == AllocatorConfig(large_pool_pre_alloc_in_mb=64, alignment_size=256)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("small_pool_size_mb:1", "did you mean 'small_pool_size_in_mb'"),
        ("zzz:1", "Valid keys: small_pool_size_in_mb"),
        ("alignment_size", "not key:value"),
        ("alignment_size:512,alignment_size:256", "given twice"),
        ("alignment_size:500", "power of two"),
        ("alignment_size:0", "power of two"),
        ("alignment_size:4194304", "power of two"),
        ("alignment_size:", "not a whole number"),
        ("large_pool_pre_alloc_in_mb:-1", "not a whole number"),
        ("large_pool_pre_alloc_in_mb:1.5", "not a whole number"),
        ("large_pool_pre_alloc_in_mb:12GiB", "not a whole number"),
        ("large_pool_pre_alloc_in_mb:99999999999", "out of range"),
        ("free_idle_chunk:yes", "write true or false"),
        ("memory_limit_in_mb:10,large_pool_pre_alloc_in_mb:11", "raise the limit"),
    ],
)
def test_wrong_text_is_refused_with_a_reason(text, said):
    with pytest.raises(ConfigError, match="GPU_ALLOC_CONF=") as caught:
        AllocatorConfig.from_env({"GPU_ALLOC_CONF": text})
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AllocError)


@pytest.mark.parametrize(
    "changes",
    [
        {"small_pool_size_in_mb": True},
        {"small_pool_size_in_mb": 1.0},
        {"alignment_size": "512"},
        {"free_idle_chunk": 1},
        {"memory_limit_in_mb": -1},
    ],
)
def test_wrong_python_values_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        AllocatorConfig(**changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("small_pool_size_in_mb:0,small_pool_pre_alloc_in_mb:4", "small_pool_pre_alloc_in_mb=4"),
        ("small_pool_size_in_mb:0,large_pool_auto_growth_chunk_size_in_mb:9", "makes one"),
        ("auto_growth_chunk_size_in_mb:9", "one-pool mode"),
    ],
)
def test_a_setting_of_a_pool_that_there_is_not_is_dropped_with_a_word(text, said):
    with pytest.warns(IgnoredSettingWarning, match=said):
        AllocatorConfig.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpu_alloc]\nalignment_size = 500", "power of two"),
        ("[gpu_alloc]\nalignment = 512", r"unknown keys \['alignment'\]"),
        ("alignment_size = 512", r"no table \[gpu_alloc\]"),
        ("gpu_alloc = ", "is not TOML"),
    ],
)
def test_a_wrong_file_of_settings_is_named(tmp_path, text, said):
    (tmp_path / "tuned.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        AllocatorConfig.from_toml(tmp_path / "tuned.toml")
    assert "tuned.toml" in str(caught.value)
