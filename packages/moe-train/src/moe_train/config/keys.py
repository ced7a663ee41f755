"""How a key of the configuration is declared, described and checked.

A table is a frozen dataclass whose fields are made by `key`; each carries its help text, unit and
limits, and is checked when the table is made. Help texts and messages all come from here. A key
that may be left out without a default has the type `... | None`, and None when it is absent.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class LogConfig(Table):
        table: ClassVar[str] = "log"
        interval_steps: int = key("steps between lines", default=1, minimum=1, on_resume="free")
"""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from moe_train.errors import TrainTypeError, TrainValueError

PATH = "path"
"""The unit of keys that name files and folders; what they say is made absolute."""

OnResume = Literal["free", "compared", "asked", "never"]
"""What `--resume` does when a key differs from the checkpoint's own job.

free: it may change. compared: the model, text or tokenizer that it leads to is compared instead.
asked: refused without `--allow-change KEY`. never: refused, for the weights would mean nothing.
"""


def key(
    help: str,
    *,
    on_resume: OnResume,
    unit: str = "",
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare a key: its help, its unit (PATH for paths), default and limits, and `OnResume`."""
    limits = {"minimum": minimum, "maximum": maximum, "above": above}
    told = {"help": help, "on_resume": on_resume, "unit": unit}
    return field(default=default, metadata={**told, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """What is known of one key: all that its declaration says, and its type."""

    table: str
    name: str
    kind: type
    choices: tuple[str, ...]
    default: Any
    unit: str
    help: str
    on_resume: OnResume
    minimum: float | None
    maximum: float | None
    above: float | None

    @property
    def is_path(self) -> bool:
        """Whether the key names files or folders."""
        return self.unit == PATH

    @property
    def required(self) -> bool:
        """Whether every job has to give the key."""
        return self.default is dataclasses.MISSING

    @property
    def type_name(self) -> str:
        """How the key's type is written for people, for example `int` or `list of str`."""
        if self.choices:
            one_of = "one of " if len(self.choices) > 1 else ""
            return one_of + ", ".join(f'"{choice}"' for choice in self.choices)
        return "list of str" if self.kind is tuple else self.kind.__name__

    @property
    def full_name(self) -> str:
        """`table.key`, as an override on the command line names it."""
        return f"{self.table}.{self.name}"


_KEYS: dict[tuple[type[Any], str | None], tuple[KeyInfo, ...]] = {}


def keys_of(table_type: type[Any], place: str | None = None) -> tuple[KeyInfo, ...]:
    """The keys of a table's dataclass, in the order of declaration.

    Args:
        place: the table's name in the file; None: that of the class.
    """
    found = _KEYS.get((table_type, place))
    if found is not None:  # every table that is made asks
        return found
    hints = get_type_hints(table_type)
    infos = []
    for item in dataclasses.fields(table_type):
        if not item.metadata:  # not a key
            continue
        hint = hints[item.name]
        if NoneType in get_args(hint):
            hint = get_args(hint)[0]
        choices = tuple(get_args(hint)) if get_origin(hint) is Literal else ()
        infos.append(
            KeyInfo(
                table=place or table_type.table,
                name=item.name,
                kind=str if choices else (get_origin(hint) or hint),
                choices=choices,
                default=item.default,
                **item.metadata,
            )
        )
    return _KEYS.setdefault((table_type, place), tuple(infos))


def _is_of_kind(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is tuple:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return isinstance(value, int | float if kind is float else kind)


def _checked(info: KeyInfo, value: Any) -> Any:
    """`value` in the key's type."""
    if value is None and info.default is None:
        return None
    if not _is_of_kind(value, info.kind):
        raise TrainTypeError(
            f"{info.full_name} must be {info.type_name}, got {type(value).__name__} {value!r}"
        )
    if info.kind is tuple:
        return tuple(value)
    if info.choices and value not in info.choices:
        raise TrainValueError(f"{info.full_name} must be {info.type_name}, got {value!r}")
    if value == "":
        remedy = "give a value" if info.required else "give a value, or leave the key out"
        raise TrainValueError(f"{info.full_name} is empty; {remedy}")
    if info.kind is float and abs(value) <= sys.float_info.max:
        value = float(value)
    if info.kind in (int, float):
        _check_range(info, value)
    return value


def _check_range(info: KeyInfo, value: float) -> None:
    fault = ""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        fault = "is too large for a number"
    elif not math.isfinite(value) and value != info.maximum:
        fault = "is not a finite number"
    elif info.minimum is not None and value < info.minimum:
        fault = f"is too small; it must be at least {info.minimum}"
    elif info.above is not None and value <= info.above:
        fault = f"is too small; it must be above {info.above}"
    elif info.maximum is not None and value > info.maximum:
        fault = f"is too large; it must be at most {info.maximum}"
    if fault:
        raise TrainValueError(f"{info.full_name}={value} {fault}")


class Table:
    """Base of the tables: checks each key against its declaration when the table is made."""

    __slots__ = ()
    table: ClassVar[str]

    @property
    def place(self) -> str:
        """The table's name in the file."""
        return self.table

    def __post_init__(self) -> None:
        for info in keys_of(type(self), self.place):
            object.__setattr__(self, info.name, _checked(info, getattr(self, info.name)))
        self._check()

    def _check(self) -> None:
        """Checks that concern several keys of this table."""
