"""One frozen configuration for every allocator, from Python or from one environment variable.

Names and meanings follow Paddle's allocator flags, so that settings carry over. Sizes ending in
`_in_mb` are MiB (2**20 bytes). Invariant: an `AllocatorConfig` that exists is valid; nothing is
checked again later.

>>> AllocatorConfig.parse("large_pool_pre_alloc_in_mb:64").large_pool_pre_alloc_in_mb
64
"""

import os
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import final

from gpu_alloc.errors import AllocValueError, ConfigError, IgnoredSettingWarning, check_kind
from gpu_alloc.sources import ChunkSource, PagedSource

ENV_VARIABLE = "GPU_ALLOC_CONF"
MIB = 1 << 20

_BOOLS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_MAX_MB = 1 << 30
_MAX_ALIGNMENT = 1 << 21


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """How requests are routed to the two pools and how the pools grow and shrink.

    small_pool_size_in_mb: requests up to this size go to the small pool; 0 sends everything to the
        large pool ("one-pool mode").
    auto_growth_chunk_size_in_mb: what the next two say, in one-pool mode, which ignores them.
    small_pool_auto_growth_chunk_size_in_mb, large_pool_auto_growth_chunk_size_in_mb: a pool that
        finds no free block takes at least this much from the source; 0 takes the request, rounded
        up to the source's granularity.
    small_pool_pre_alloc_in_mb, large_pool_pre_alloc_in_mb: one chunk of this size is taken when the
        allocator is made and kept; it is given back only when a request would otherwise fail, or on
        `close()`.
    alignment_size: bytes; every block starts at and is padded to a multiple of this power of two.
    free_idle_chunk: give a chunk back to the source as soon as its last block is freed.
    free_when_no_cache_hit: give idle chunks back before a pool grows.
    memory_limit_in_mb: hard limit on what both pools take from the source together; 0 is no limit.
    use_virtual_memory: reserve addresses once and map pages of 2 MiB behind them as they are needed
        (`PagedSource`); there are then no chunk sizes and no pre-allocation.

    Raises ConfigError (a ValueError) naming the key, the value and what is expected. Warns
    (IgnoredSettingWarning) of settings of a pool that there is not.
    """

    small_pool_size_in_mb: int = 1
    auto_growth_chunk_size_in_mb: int = 0
    small_pool_auto_growth_chunk_size_in_mb: int = 2
    large_pool_auto_growth_chunk_size_in_mb: int = 0
    small_pool_pre_alloc_in_mb: int = 0
    large_pool_pre_alloc_in_mb: int = 0
    alignment_size: int = 512
    free_idle_chunk: bool = False
    free_when_no_cache_hit: bool = False
    memory_limit_in_mb: int = 0
    use_virtual_memory: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _BOOL_NAMES:
                _require_bool(field.name, value)
            else:
                _require_size(field.name, value)
        if (
            self.alignment_size & (self.alignment_size - 1)
            or not 1 <= self.alignment_size <= _MAX_ALIGNMENT
        ):
            raise ConfigError(
                f"alignment_size={self.alignment_size} is not a power of two from 1 to "
                f"{_MAX_ALIGNMENT}; use 256 or 512"
            )
        small = self.small_pool_pre_alloc_in_mb if self.small_pool_size_in_mb else 0
        pre_alloc = small + self.large_pool_pre_alloc_in_mb
        if 0 < self.memory_limit_in_mb < pre_alloc:
            raise ConfigError(
                f"pre-allocation takes {pre_alloc} MiB but "
                f"memory_limit_in_mb={self.memory_limit_in_mb}; raise the limit "
                "or lower small_pool_pre_alloc_in_mb / large_pool_pre_alloc_in_mb"
            )
        _warn_of_ignored(self)

    def large_chunk_bytes(self) -> int:
        """What the pool of large requests, or the only pool, grows by at least."""
        if self.small_pool_size_in_mb:
            return self.large_pool_auto_growth_chunk_size_in_mb * MIB
        return self.auto_growth_chunk_size_in_mb * MIB

    def check_source(self, source: ChunkSource) -> None:
        """Raise AllocValueError unless a source maps pages just when these settings do."""
        if self.use_virtual_memory != isinstance(source, PagedSource):
            raise AllocValueError(
                f"use_virtual_memory is {self.use_virtual_memory} and the source a "
                f"{type(source).__name__}; a PagedSource needs it to be True, and others False"
            )

    @classmethod
    def parse(cls, text: str, base: "AllocatorConfig | None" = None) -> "AllocatorConfig":
        """Read `key:value,key:value`; keys that are not named keep their value in `base` (default:
        the defaults).

        Raises ConfigError for an unknown key (naming the nearest valid one), a repeated key or a
        bad value.
        """
        changes: dict[str, int | bool] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, colon, value = (part.strip() for part in item.partition(":"))
            if not colon:
                raise ConfigError(
                    f"{item!r} is not key:value; write for example alignment_size:512"
                )
            if key not in _NAMES:
                near = get_close_matches(key, _NAMES, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"unknown key {key!r}; did you mean {near!r}? Valid keys: {', '.join(_NAMES)}"
                )
            if key in changes:
                raise ConfigError(f"key {key!r} is given twice; keep one")
            changes[key] = _parse_value(key, value)
        return replace(base if base is not None else cls(), **changes)  # type: ignore[arg-type]

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "AllocatorConfig":
        """Read the variable `GPU_ALLOC_CONF` of `environ` (default: the process's); unset or empty
        gives the defaults.

        Raises ConfigError as `parse` does, naming the variable.
        """
        text = (os.environ if environ is None else environ).get(ENV_VARIABLE, "")
        try:
            return cls.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{ENV_VARIABLE}={text!r}: {error}") from None

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "AllocatorConfig":
        """Read the table `[gpu_alloc]` of a TOML file, such as `gpu-alloc tune` writes.

        Raises ConfigError as `parse` does, naming the file.
        """
        check_kind(path, (str, os.PathLike), "path must be a str or a Path")
        try:
            with open(path, "rb") as file:
                table = tomllib.load(file)
        except ValueError as error:
            raise ConfigError(f"{os.fspath(path)} is not TOML: {error}") from None
        settings = table.get("gpu_alloc")
        if not isinstance(settings, dict):
            raise ConfigError(f"{os.fspath(path)} has no table [gpu_alloc]; write one with tune")
        unknown = sorted(settings.keys() - set(_NAMES))
        if unknown:
            raise ConfigError(
                f"{os.fspath(path)}: unknown keys {unknown}; valid keys: {', '.join(_NAMES)}"
            )
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None

    def format(self) -> str:
        """Write every key in the text form that `parse` reads."""
        return ",".join(f"{name}:{str(getattr(self, name)).lower()}" for name in _NAMES)


_DEFAULTS = {field.name: field.default for field in fields(AllocatorConfig)}
_OF_TWO_POOLS = (
    "small_pool_auto_growth_chunk_size_in_mb",
    "large_pool_auto_growth_chunk_size_in_mb",
    "small_pool_pre_alloc_in_mb",
)
_OF_CHUNKS = (
    "auto_growth_chunk_size_in_mb",
    "large_pool_pre_alloc_in_mb",
    "free_idle_chunk",
    "free_when_no_cache_hit",
)
_BOOL_NAMES = frozenset(("free_idle_chunk", "free_when_no_cache_hit", "use_virtual_memory"))
_NAMES = tuple(field.name for field in fields(AllocatorConfig))


def _warn_of_ignored(config: AllocatorConfig) -> None:
    """Paddle's one-pool mode drops these settings without a word; a setting is dropped with one."""
    names: tuple[str, ...]
    if config.use_virtual_memory:
        names = _OF_CHUNKS + _OF_TWO_POOLS
        reason = "is of chunks, and use_virtual_memory maps pages; set one of the two only"
    elif config.small_pool_size_in_mb:
        names = ("auto_growth_chunk_size_in_mb",)
        reason = "is of one-pool mode, but there are two; set it to 0, or small_pool_size_in_mb"
    else:
        names = _OF_TWO_POOLS
        reason = (
            "is of two pools, but small_pool_size_in_mb=0 makes one; set "
            "auto_growth_chunk_size_in_mb or large_pool_pre_alloc_in_mb"
        )
    for name in names:
        if getattr(config, name) != _DEFAULTS[name]:
            warnings.warn(
                f"{name}={getattr(config, name)} is ignored: it {reason}",
                IgnoredSettingWarning,
                stacklevel=4,
            )


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; expected True or False")


def _require_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number")
    if not 0 <= value <= _MAX_MB:
        raise ConfigError(f"{name}={value} is out of range; expected 0 to {_MAX_MB}")


def _parse_value(key: str, value: str) -> int | bool:
    if key in _BOOL_NAMES:
        if value.lower() not in _BOOLS:
            raise ConfigError(f"{key}:{value} is not a truth value; write true or false")
        return _BOOLS[value.lower()]
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{key}:{value} is not a whole number; write digits only, without a unit")
    return int(value)
