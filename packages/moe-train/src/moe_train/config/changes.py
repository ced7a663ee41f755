"""How one job differs from another, key by key: what `--resume` shows and checks.

for change in KeyChange.between(load_config(source / OWN_TOML), config):
    print(change)                       # optimizer.lr: 0.001 -> 0.0003
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_train.config.keys import OnResume, keys_of
from moe_train.config.tables import NAMED_TABLES, Config, all_keys
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """A key with another value than before; a value of None is an absent key."""

    name: str
    old: Any
    new: Any
    on_resume: OnResume

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}"

    @classmethod
    def between(cls, old: Config, new: Config) -> list["KeyChange"]:
        """Every key of the file that has another value, in the order of the file."""
        before, after = _values(old), _values(new)
        changes = []
        for name in dict.fromkeys((*after, *before)):
            (was, rule), (now, new_rule) = before.get(name, _NONE), after.get(name, _NONE)
            if was != now:
                changes.append(cls(name=name, old=was, new=now, on_resume=new_rule or rule))
        return changes

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """Check the keys that a person names.

        Raises:
            ValueError: there is no such key; those of config.json, `model.KEY`, are not looked up.
        """
        known = [key.full_name for key in all_keys()]
        for name in names:
            if name not in known and not name.startswith(
                ("model.", *(f"{table}." for table in NAMED_TABLES))
            ):
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                raise TrainValueError(
                    f"--allow-change {name}: no such key; did you mean {near[0]}? Keys of "
                    "config.json are written model.KEY"
                )


_NONE: Any = (None, None)


def _values(config: Config) -> dict[str, tuple[Any, Any]]:
    """Full name -> value and `on_resume` of every key; sources by their names."""
    return {
        f"{table.place}.{info.name}": (getattr(table, info.name), info.on_resume)
        for table in config.tables
        for info in keys_of(type(table))
    }


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    return str(list(value)) if isinstance(value, tuple) else str(value)
