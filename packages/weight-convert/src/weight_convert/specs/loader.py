"""Families from TOML files: those of the package, and a user's own.

    spec = read_spec(Path("mine.toml"))
    get_spec("mixtral").formats["transformers"].proof

A file names the family's tensors in memory with role and dims, and for each format its rules; the
files in `families/` are the examples. A mistake is named by file and key.
"""

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from weight_convert._checks import check_kind, checked_path
from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.specs.family import FUSED, ROLES, FamilySpec, Format, TensorNote
from weight_convert.specs.rules import Rule

_FOLDER = Path(__file__).parent / "families"


_MEMORY = Format(
    name=FUSED,
    rules=(),
    order="modules",
    proof="names as in memory: transformers' save_pretrained(save_original_format=False)",
)


def family_names() -> tuple[str, ...]:
    """The `model_type` of every family of the package, in order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def get_spec(model_type: str) -> FamilySpec:
    """Return the spec of a family by the `model_type` of its `config.json`.

    Raises:
        UnknownFamilyError: no such family; the message names the nearest one and lists all.
    """
    check_kind(model_type, str, "model_type must be a string")
    known = family_names()
    if model_type in known:
        return _packaged(model_type)
    near = get_close_matches(model_type, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownFamilyError(
        f"no family spec for model_type {model_type!r}{hint} (known: {', '.join(known)}); "
        f"--spec FILE.toml reads your own"
    )


@cache
def _packaged(model_type: str) -> FamilySpec:
    return read_spec(_FOLDER / f"{model_type}.toml")


def spec_text(model_type: str) -> str:
    """The TOML of a family of the package, to print or to begin an own one with.

    Raises:
        UnknownFamilyError: no such family.
    """
    return (_FOLDER / f"{get_spec(model_type).model_type}.toml").read_text(encoding="utf-8")


def read_spec(path: Path | str) -> FamilySpec:
    """Read a family from a TOML file.

    Raises:
        WeightConvertError: no TOML, a key that is missing, unknown or of another type, or a rule
            that could not be read in both directions; the file and the key are named.
        OSError: the file cannot be read.
    """
    path = checked_path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WeightConvertError(f"{path} is not TOML ({error})") from error
    return _Reader(path).family(table)


class _Reader:
    """Reads one file; every method raises with the file and key that are wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def family(self, table: Mapping[str, Any]) -> FamilySpec:
        required = ("model_type", "architecture", "experts", "router", "num_experts_keys")
        self._check_keys(table, "the file", required, ("companions", "tensors", "formats"))
        tensors = self._mapping(table.get("tensors", {}), "tensors")
        formats = self._mapping(table.get("formats", {}), "formats")
        if FUSED in formats:
            raise WeightConvertError(f"{self._path}: {FUSED!r} is memory's own format")
        read = {name: self._format(name, value) for name, value in formats.items()}
        return FamilySpec(
            model_type=self._text(table["model_type"], "model_type"),
            architecture=self._text(table["architecture"], "architecture"),
            experts=self._texts(table["experts"], "experts"),
            router=self._text(table["router"], "router"),
            num_experts_keys=self._texts(table["num_experts_keys"], "num_experts_keys"),
            companions=self._texts(table.get("companions", []), "companions"),
            tensors={name: self._note(name, text) for name, text in tensors.items()},
            formats=read | {FUSED: _MEMORY},
        )

    def _format(self, name: str, table: Any) -> Format:
        where = f"formats.{name}"
        self._check_keys(self._mapping(table, where), where, (), ("proof", "order", "rules"))
        rules = table.get("rules", [])
        self._expect(rules, lambda value: isinstance(value, list), f"{where}.rules", "a list")
        return Format(
            name=name,
            rules=tuple(
                self._rule(rule, f"{where}.rules[{number}]") for number, rule in enumerate(rules)
            ),
            order=self._order(table.get("order", "names"), f"{where}.order"),
            proof=self._text(table.get("proof", ""), f"{where}.proof"),
        )

    def _rule(self, table: Any, where: str) -> Rule:
        self._check_keys(self._mapping(table, where), where, ("stored", "memory"), ("dims",))
        stored, memory = (self._texts(table[key], f"{where}.{key}") for key in ("stored", "memory"))
        dims = self._text(table.get("dims", ""), f"{where}.dims")
        try:
            return Rule.parse(stored=stored, memory=memory, dims=dims)
        except WeightConvertError as error:
            raise WeightConvertError(f"{self._path}: {where}: {error}") from error

    def _order(self, value: Any, where: str) -> Literal["names", "modules"]:
        self._expect(value, lambda found: found in ("names", "modules"), where, "names or modules")
        return "names" if value == "names" else "modules"

    def _note(self, name: str, text: Any) -> TensorNote:
        where = f"tensors.{name}"
        role, colon, dims = self._text(text, where).partition(":")
        self._expect(
            role, lambda value: value in ROLES and bool(colon), where, f"'role: dims', of {ROLES}"
        )
        return TensorNote(role=role, dims=tuple(dims.split()))

    def _check_keys(
        self, table: Mapping[str, Any], where: str, needed: tuple[str, ...], more: tuple[str, ...]
    ) -> None:
        missing = [key for key in needed if key not in table]
        unknown = sorted(table.keys() - {*needed, *more})
        if missing or unknown:
            raise WeightConvertError(
                f"{self._path}: {where} lacks {', '.join(missing) or 'nothing'} and has the "
                f"unknown {', '.join(unknown) or 'nothing'}; it has {', '.join((*needed, *more))}"
            )

    def _mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        self._expect(value, lambda found: isinstance(found, dict), where, "a table")
        return dict(value)

    def _text(self, value: Any, where: str) -> str:
        self._expect(value, lambda found: isinstance(found, str), where, "a string")
        return str(value)

    def _texts(self, value: Any, where: str) -> tuple[str, ...]:
        self._expect(
            value,
            lambda found: isinstance(found, list) and all(isinstance(one, str) for one in found),
            where,
            "a list of strings",
        )
        return tuple(value)

    def _expect(
        self, value: Any, is_right: Callable[[Any], bool], where: str, expected: str
    ) -> None:
        if not is_right(value):
            raise WeightConvertError(f"{self._path}: {where} is {value!r}; expected {expected}")
