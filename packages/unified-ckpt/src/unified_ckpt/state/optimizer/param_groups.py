"""Hyperparameters of parameter groups over ranks that do not have the same groups.

An optimizer numbers its groups, and under pipeline or expert parallelism a rank may have none of
another's. So a save gives equal groups of all ranks one number and, where there are several, says
which parameters each has; a load gives every group the hyperparameters that its parameters had.

    merge_groups([{"optimizer.param_groups.0.lr": 0.1, "optimizer.param_groups.0.params": ["w"]}])
"""

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.errors import CheckpointValueError, LoadError
from unified_ckpt.state.naming import Names

PARAMS = "params"
_FIELD = re.compile(r"(?P<where>(?:.+\.)?param_groups)\.(?P<number>\d+)\.(?P<field>.+)\Z")

Values = dict[str, Any]


@dataclass(slots=True)
class _Numbering:
    """The groups of one optimizer over all ranks; equal ones have one number."""

    contents: list[str] = field(default_factory=list)
    numbers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    group_of: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> number, rank

    def add(self, rank: int, groups: Mapping[int, Values], where: str) -> dict[int, int]:
        """Number the groups of a rank; return rank's number -> number."""
        number_of, used = {}, Counter[str]()
        for number, fields in sorted(groups.items()):
            content = json.dumps({k: v for k, v in fields.items() if k != PARAMS}, sort_keys=True)
            known = self.numbers[content]
            if used[content] == len(known):
                known.append(len(self.contents))
                self.contents.append(content)
            number_of[number] = known[used[content]]
            used[content] += 1
            for name in fields[PARAMS]:
                other, other_rank = self.group_of.setdefault(name, (number_of[number], rank))
                if self.contents[other] != content:
                    raise CheckpointValueError(
                        f"{where}: the group of {name!r} has {self.contents[other]} on rank "
                        f"{other_rank}, {content} on rank {rank}; a parameter's hyperparameters "
                        "must be equal on all ranks that hold it"
                    )
        return number_of

    def names(self) -> dict[int, list[str]]:
        """Return the parameters of each number."""
        names: dict[int, list[str]] = {number: [] for number in range(len(self.contents))}
        for name, (number, _) in sorted(self.group_of.items()):
            names[number].append(name)
        return names


def merge_groups(held: Sequence[Mapping[str, Any]]) -> tuple[list[Values], Values]:
    """Renumber the groups in the values of all ranks, so that one number is one group.

    Args:
        held: by rank, values by path; groups are those with `...param_groups.N.params`.

    Returns:
        The values by rank, without `params`; and the `params` of optimizers of several groups.
    """
    numberings: dict[str, _Numbering] = defaultdict(_Numbering)
    renumbered = []
    for rank, values in enumerate(held):
        groups: dict[str, dict[int, Values]] = defaultdict(dict)
        others: Values = {}
        for path, value in values.items():
            match = _FIELD.match(path) if "param_groups." in path else None
            if match is None or f"{match['where']}.{match['number']}.{PARAMS}" not in values:
                others[path] = value
            else:
                fields = groups[match["where"]].setdefault(int(match["number"]), {})
                fields[match["field"]] = value
        for where, by_number in groups.items():
            number_of = numberings[where].add(rank, by_number, where)
            for number, fields in by_number.items():
                for name, value in fields.items():
                    if name != PARAMS:
                        others[f"{where}.{number_of[number]}.{name}"] = value
        renumbered.append(others)
    params = {
        f"{where}.{number}.{PARAMS}": names
        for where, numbering in numberings.items()
        if len(numbering.contents) > 1
        for number, names in numbering.names().items()
    }
    return renumbered, params


class StoredGroups:
    """Tells which stored group the hyperparameters of a group are read from."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._number_of: dict[str, dict[str, int]] = {}
        self._names: dict[str, Names] = {}

    def number(self, where: str, names: Sequence[str], position: int, fields: Sequence[str]) -> int:
        """Return the stored number of the group of these parameters; `position` if unknown."""
        number_of = self._numbers(where)
        stored = self._names.setdefault(where, Names(number_of))
        found = {
            number_of[known]: name for name in names if (known := stored.find(name)) is not None
        }
        numbers = sorted(found)
        if not numbers:
            return position
        for name, other in itertools.product(fields, numbers[1:]):
            paths = [f"{where}.{number}.{name}" for number in (numbers[0], other)]
            a, b = (json.dumps(self._values.get(path)) for path in paths)
            if a != b:
                raise LoadError(
                    f"{where}.{position} holds {found[numbers[0]]!r} and {found[other]!r}, which "
                    f"were saved with {name} {a} and {b}; make the groups as they were saved, or "
                    f"keep the optimizer's own with ignored_keys=('param_groups.*{name}',)"
                )
        return numbers[0]

    def _numbers(self, where: str) -> dict[str, int]:
        if where not in self._number_of:
            number_of: dict[str, int] = {}
            number = 0
            while (names := self._values.get(f"{where}.{number}.{PARAMS}")) is not None:
                number_of |= dict.fromkeys(names, number)
                number += 1
            self._number_of[where] = number_of
        return self._number_of[where]
