"""How models are merged, as data: made in Python, or read from a TOML file.

method = "ties"
base = "Qwen3-30B-A3B-Base"
remove_keys = ["model.mtp.*"]

[[models]]
path = "code"
weight = 0.6
density = 0.5

[[models]]
path = "math"
weight = [0.2, 0.8]                               # from the first layer to the last one
density = { "*.mlp.experts.*" = 0.3, "*" = 0.6 }  # by pattern, the first that matches
"""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weight_convert._checks import Record, check_kind, checked_path
from weight_convert._dtypes import stored_dtype
from weight_convert.errors import WeightConvertError
from weight_convert.operations import Combine

PASSTHROUGH = "passthrough"
_SUMMED = frozenset(m for m, has_base in Combine.METHODS.items() if has_base) - {"model_stock"}
_DELLA = frozenset({"della_linear", "della"})
# The methods that read an option, of a merge or a model; the others are for all.
_READ_BY: Mapping[str, frozenset[str]] = {
    "t": frozenset({"slerp"}),
    "weight": _SUMMED | {"linear"},
    "normalize": _SUMMED | {"linear"},
    "scale": _SUMMED,
    "density": _SUMMED - {"task_arithmetic"},
    "gamma": frozenset({"breadcrumbs", "breadcrumbs_ties"}),
    "epsilon": _DELLA,
    "seed": _DELLA | {"dare_linear", "dare_ties"},
}
Amount = float | tuple[float, ...] | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeModel(Record):
    """One model of a merge.

    Attributes:
        path: its directory.
        weight: its share. A number; several, which are interpolated from the first layer to the
            last (what stands before the layers takes the first one, what stands behind them the
            last); or numbers by pattern of tensors' names.
        density: the part of its differences from the base that stays, given as `weight`.
    """

    path: str
    weight: float | tuple[float, ...] | Mapping[str, float] = 1.0
    density: float | tuple[float, ...] | Mapping[str, float] = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        for name in ("weight", "density"):
            _check_amount(getattr(self, name), f"{name} of {self.path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Record):
    """Layers `begin` to `end` - 1 of a model, for `passthrough`."""

    path: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        if not 0 <= self.begin < self.end:
            raise WeightConvertError(
                f"layers {self.begin} to {self.end} of {self.path}; expected 0 <= begin < end"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig(Record):
    """A merge.

    Attributes:
        method: "linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties",
            "breadcrumbs", "breadcrumbs_ties", "della_linear", "della", "model_stock", or
            "passthrough", which stacks `slices` and computes nothing.
        models: the models to merge; two for `slerp`.
        base: of methods that sum differences; the output has its other files, or the first model's.
        slices: of `passthrough`; what stands outside of layers comes from the first.
        t: of `slerp`, how far from the first model to the second, given as a weight.
        normalize: divide weights by their sum; None does so for `linear` and `ties` methods.
        scale: of the sum of differences ("lambda" elsewhere).
        gamma: part of the largest differences that `breadcrumbs` drops.
        epsilon: by how much `della` keeps large differences of a row more often, and small less;
            at most the density and 1 - density, so that a density of 1 keeps all as they are.
        seed: of `dare` and `della`.
        dtype: of the output's parameters, such as "bfloat16"; None keeps that of the base or
            first model. Buffers keep theirs.
        remove_keys: patterns of tensors to leave out; each must match one.
    """

    method: str
    models: tuple[MergeModel, ...] = ()
    base: str | None = None
    slices: tuple[Slice, ...] = ()
    t: float | tuple[float, ...] | Mapping[str, float] = 0.5
    normalize: bool | None = None
    scale: float = 1.0
    gamma: float = 0.01
    epsilon: float = 0.1
    seed: int = 0
    dtype: str | None = None
    remove_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        for name, kind in (("models", MergeModel), ("slices", Slice), ("remove_keys", str)):
            for item in getattr(self, name):
                check_kind(item, kind, f"{name} must hold values of type {kind.__name__}")
        if self.method not in (*Combine.METHODS, PASSTHROUGH):
            known = ", ".join((*Combine.METHODS, PASSTHROUGH))
            raise WeightConvertError(f"method={self.method!r}; expected one of {known}")
        for name in ("t", "scale", "gamma", "epsilon"):
            _check_amount(getattr(self, name), name)
        self._check_shares()
        needs_base = Combine.METHODS.get(self.method, False)
        if needs_base != (self.base is not None):
            wanted = "needs a base" if needs_base else "takes no base"
            raise WeightConvertError(f"{self.method} {wanted}; got base={self.base!r}")
        least = {"slerp": 2, "model_stock": 2, PASSTHROUGH: 0}.get(self.method, 1)
        most = {"slerp": 2, PASSTHROUGH: 0}.get(self.method, len(self.models))
        if not least <= len(self.models) <= most:
            raise WeightConvertError(
                f"{self.method} takes {least}{'' if most == least else ' or more'} models, got "
                f"{len(self.models)}"
            )
        if (self.method == PASSTHROUGH) != bool(self.slices):
            raise WeightConvertError("slices belong to the method passthrough, which needs some")
        if self.dtype is not None:
            stored_dtype(self.dtype)
        self._check_read()

    def _check_shares(self) -> None:
        for name in ("gamma", "epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise WeightConvertError(f"{name} is {getattr(self, name)!r}; expected 0 to 1")

    def _check_read(self) -> None:
        """Raise where an option is given that the method does not read."""
        records: tuple[MergeConfig | MergeModel, ...] = (self, *self.models)
        for record, item in ((of, item) for of in records for item in fields(of)):
            value, methods = getattr(record, item.name), _READ_BY.get(item.name, {self.method})
            if self.method not in methods and value != item.default:
                raise WeightConvertError(
                    f"{item.name}={value!r} has no effect on {self.method}; leave it out, or "
                    f"choose one of {', '.join(sorted(methods))}"
                )

    @property
    def normalizes(self) -> bool:
        """Whether weights are divided by their sum."""
        if self.normalize is not None:
            return self.normalize
        return self.method in ("linear", "ties")


def amount_at(amount: Amount, key: str, place: float, what: str) -> float:
    """An amount for the tensor `key`, `place` of the way from the first layer to the last.

    Raises:
        WeightConvertError: no pattern matches the name.
    """
    if isinstance(amount, Mapping):
        for pattern, value in amount.items():
            if fnmatchcase(key, pattern):
                return float(value)
        raise WeightConvertError(
            f'no pattern of {what} matches {key}; end with "*" for all other tensors'
        )
    if isinstance(amount, tuple):
        at = place * (len(amount) - 1)
        left = min(int(at), len(amount) - 1)
        right = min(left + 1, len(amount) - 1)
        return amount[left] + (amount[right] - amount[left]) * (at - left)
    return float(amount)


def _check_amount(amount: Any, what: str) -> None:
    values = amount.values() if isinstance(amount, Mapping) else amount
    numbers = [amount] if isinstance(amount, int | float) else list(values)
    if not numbers or not all(
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
        for value in numbers
    ):
        raise WeightConvertError(
            f"{what} is {amount!r}; expected a finite number, several, or a mapping"
        )


def read_config(path: Path | str) -> MergeConfig:
    """Read a merge from a TOML file; paths in it are relative to it.

    Raises:
        WeightConvertError: no such file, no TOML, or a key that is unknown or of another type.
        OSError: the file cannot be read.
    """
    path = checked_path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightConvertError(
            f"{path} does not exist; give the TOML file that describes the merge"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WeightConvertError(f"{path} is not TOML ({error})") from error
    try:
        if "base" in table:
            table["base"] = str(path.parent / table["base"])
        for name, kind in (("models", MergeModel), ("slices", Slice)):
            table[name] = [_placed(kind, entry, path) for entry in table.get(name, ())]
        return MergeConfig(**_values(MergeConfig, table))
    except (TypeError, AttributeError, WeightConvertError) as error:
        raise WeightConvertError(f"{path}: {error}") from error


def _placed(kind: type, table: Mapping[str, Any], path: Path) -> Any:
    """A record whose path is relative to the file's folder."""
    values = _values(kind, table)
    if "path" in values:
        values["path"] = str(path.parent / values["path"])
    return kind(**values)


def _values(kind: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record; lists become tuples."""
    known = {field.name for field in fields(kind)}
    unknown = sorted(table.keys() - known)
    if unknown:
        raise WeightConvertError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
