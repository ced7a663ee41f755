"""Read and write the TOML file of a training job, so that a mistake in it is one clear message.

Unknown tables and keys are refused with the nearest valid name, wrong types with what was got and
what was expected. Relative paths in a file start at the file's folder, and relative paths in an
override start at the current folder; a loaded `Config` holds absolute paths only, so that
`load_config(write(dump_toml(config))) == config` wherever the copy is put.

    config = load_config(Path("job.toml"), ["parallel.pp=2", "train.max_steps=50"])
"""

import difflib
import glob
import json
import os
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_train.config.data_tables import PYTHON_STDLIB
from moe_train.config.keys import KeyInfo, Table, keys_of
from moe_train.config.renames import RENAMED_KEYS, refuse_former_values, renewed
from moe_train.config.tables import CORPUS_TWICE, NAMED_TABLES, TABLES, Config, all_keys
from moe_train.errors import MissingFileError, TrainTypeError, TrainValueError, check_type

OWN_TOML = "moe_train.toml"
"""The file in which a checkpoint keeps the configuration that it was made with."""

STATE_FILE = "trainer_state.json"
"""The file of a checkpoint that says where the run stood."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides of the form `table.key=value`.

    Args:
        path: the file.
        overrides: later ones win. A value is written as in TOML; quotes around text may be left
            out, and one name stands for a list of one. `table.key=` takes the key out. A source's
            table is `sources.NAME`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: bad TOML, an unknown table or key, a former key, a missing key or a
            value out of range.
        TypeError: a value or an argument of the wrong type.
    """
    check_type("path", path, str, Path)
    tables = _read_tables(Path(path))
    base_dir = Path(path).resolve().parent
    for table, values in tables.items():
        for name, value in values.items():
            values[name] = _absolute(_info(table, name), value, base_dir)
    for override in overrides:
        info, value = _parse_override(override)
        values = tables.setdefault(info.table, {})
        if value is None:
            values.pop(info.name, None)
        else:
            values[info.name] = _absolute(info, value, Path.cwd())
    for table, values in tables.items():
        refuse_former_values(table, values)
    _check_required(tables, path)
    made: dict[str, Any] = {
        name: table_type(**tables.get(name, {})) for name, table_type in TABLES.items()
    }
    for place, named_type in NAMED_TABLES.items():
        named = [table.partition(".")[::2] for table in tables if table.startswith(f"{place}.")]
        made[place] = tuple(named_type(name=n, **tables[f"{place}.{n}"]) for _, n in named)
    if made["sources"] and "corpus" in tables.get("data", {}):
        raise TrainValueError(CORPUS_TWICE)
    return Config(**made)


def dump_toml(config: Config) -> str:
    """`config` as TOML text with every key that has a value; it is read back as an equal `Config`.

    Raises:
        TypeError: `config` is no `Config`.
    """
    check_type("config", config, Config)
    blocks = []
    for table in config.tables:
        lines = [f"{name} = {text}" for name, text in _set_keys(config, table)]
        blocks.append("\n".join([f"[{table.place}]", *lines]) + "\n")
    return "\n".join(blocks)


def format_compact(config: Config) -> str:
    """`config` in one line a table, for the terminal; every key that has a value is there."""
    tables = list(config.tables)
    width = max(len(table.place) for table in tables) + 2
    lines = []
    for table in tables:
        pairs = (f"{name}={text}" for name, text in _set_keys(config, table))
        lines.append(f"{'[' + table.place + ']':<{width}} {' '.join(pairs)}")
    return "\n".join(lines)


def keys_help() -> str:
    """Every key with its type, default, unit and meaning, for `moe-train train --help`."""
    lines: list[str] = []
    for table, table_type in {**TABLES, **_named_types()}.items():
        lines.append(f"[{table}]  {(table_type.__doc__ or '').splitlines()[0]}")
        for key in keys_of(table_type):
            default = "required" if key.required else "optional"
            if not key.required and key.default is not None:
                default = f"default {_toml(key.default)}"
            unit = f", in {key.unit}" if key.unit and not key.is_path else ""
            lines.append(f"  {key.full_name}  ({key.type_name}{unit}; {default})")
            lines += textwrap.wrap(key.help, 94, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines)


def _set_keys(config: Config, table: Table) -> Iterator[tuple[str, str]]:
    """Name and TOML text of each key of a table that has a value and is used."""
    for key in keys_of(type(table)):
        value = getattr(table, key.name)
        unused = table is config.data and key.name == "corpus" and config.sources
        if value is not None and not unused:
            yield key.name, _toml(value)


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        raise MissingFileError(f"config file {path} does not exist")
    try:
        parsed = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainValueError(f"config file {path} is not valid TOML: {error}") from error
    if path.name == OWN_TOML and (path.parent / STATE_FILE).exists():
        parsed = renewed(parsed)
    parsed = _flattened(parsed)
    for table, values in parsed.items():
        known = table in TABLES or _named_type(table) is not None
        if not isinstance(values, dict):
            raise TrainValueError(
                f"{table} must be a table, got {values!r}; write [{table}] above its keys"
                if known
                else f"{table} stands outside of a table; {_hint_of_key('', table)}"
            )
        if not known:
            raise TrainValueError(f"unknown table [{table}] in {path}; {_nearest_table(table)}")
        for name in values:
            _info(table, name)
    return parsed


def _flattened(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with each `[sources.NAME]` under that name."""
    tables = {name: values for name, values in parsed.items() if name not in NAMED_TABLES}
    for place in NAMED_TABLES:
        named = parsed.get(place, {})
        if not isinstance(named, dict):
            raise TrainValueError(
                f"{place} must be tables; write [{place}.NAME] above the keys of one"
            )
        for name, values in named.items():
            if not isinstance(values, dict):
                raise TrainValueError(
                    f"{place}.{name} is no table; write [{place}.NAME] above its keys"
                )
            tables[f"{place}.{name}"] = values
    return tables


def _named_types() -> dict[str, type[Table]]:
    return {table_type.table: table_type for table_type in NAMED_TABLES.values()}


def _named_type(table: str) -> type[Table] | None:
    """The class of `sources.NAME` and the like; None: it is no such name."""
    place, dot, name = table.partition(".")
    return NAMED_TABLES.get(place) if dot and name and "." not in name else None


def _keys_in(table: str) -> tuple[KeyInfo, ...]:
    return keys_of(TABLES.get(table) or NAMED_TABLES[table.partition(".")[0]], table)


def _nearest_table(name: str) -> str:
    return _nearest(name, [*TABLES, *_named_types()])


def _info(table: str, name: str) -> KeyInfo:
    for key in _keys_in(table):
        if key.name == name:
            return key
    if f"{table}.{name}" in RENAMED_KEYS:
        raise TrainValueError(f"{table}.{name} was renamed to {RENAMED_KEYS[f'{table}.{name}']}")
    raise TrainValueError(f"unknown key {table}.{name}; {_hint_of_key(table, name)}")


def _hint_of_key(table: str, name: str) -> str:
    """Which key was meant: the same name in another table, else the nearest name."""
    elsewhere = [key.full_name for key in all_keys() if key.name == name]
    if elsewhere:
        return "did you mean " + " or ".join(elsewhere) + "?"
    own = _keys_in(table) if table else all_keys()
    names = {key.name: key.full_name for key in own}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        everywhere = {key.name: key.full_name for key in all_keys()}
        close = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.75)
        names = everywhere if close else names
    if close:
        return f"did you mean {names[close[0]]}?"
    return _nearest(f"{table}.{name}" if table else name, names.values())


def _nearest(name: str, valid: Iterable[str]) -> str:
    options = list(valid)
    best = max(options, key=lambda option: difflib.SequenceMatcher(a=name, b=option).ratio())
    return f"did you mean {best}? Valid names: {', '.join(options)}"


def _parse_override(text: str) -> tuple[KeyInfo, Any]:
    """The key that an override names, and its value before checks; None takes the key out."""
    name, equals, value = text.partition("=")
    table, dot, key = name.strip().rpartition(".")
    if not equals:
        raise TrainValueError(f"override {text!r} is not of the form table.key=value")
    if not dot:
        raise TrainValueError(f"override {text!r} names no table; {_hint_of_key('', key)}")
    if table not in TABLES and _named_type(table) is None:
        raise TrainValueError(f"unknown table {table} in {text!r}; {_nearest_table(table)}")
    info = _info(table, key)
    return info, _override_value(info, value.strip()) if value.strip() else None


def _override_value(info: KeyInfo, text: str) -> Any:
    quoted = text[:1] in ('"', "'")
    if info.kind is str and not quoted:
        return text
    if info.kind is tuple and not quoted and not text.startswith("["):
        return [text]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise TrainTypeError(f"{info.full_name} must be {info.type_name}, got {text!r}") from None
    return [value] if info.kind is tuple and isinstance(value, str) else value


def _check_required(tables: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    needed = [key for table in {**TABLES, **tables} for key in _keys_in(table) if key.required]
    missing = [key for key in needed if key.name not in tables.get(key.table, {})]
    if missing:
        listed = ", ".join(f"{key.full_name} ({key.help})" for key in missing)
        raise TrainValueError(f"config file {path} lacks {listed}")


def _absolute(info: KeyInfo, value: Any, base_dir: Path) -> Any:
    """Text of a path key made absolute; a URL and anything else is left to the checks."""
    if info.is_path and isinstance(value, list):
        return [_absolute(info, item, base_dir) for item in value]
    is_built_in = info.kind is tuple and value == PYTHON_STDLIB
    if not info.is_path or not isinstance(value, str) or not value or is_built_in:
        return value
    if "://" in value:
        return value
    expanded = os.path.expanduser(value)
    # A folder's own name may hold the signs of a glob; only the user's part is a pattern.
    base = glob.escape(str(base_dir)) if glob.has_magic(expanded) else str(base_dir)
    return os.path.normpath(os.path.join(base, expanded))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
