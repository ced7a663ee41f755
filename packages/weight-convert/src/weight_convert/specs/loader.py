"""Families from TOML files: those of the package, and a user's own.

    spec = read_spec(Path("mine.toml"))
    get_spec("mixtral").formats["transformers"].proof

A file names the family's tensors in memory with role and dims, and for each format its rules; the
files in `families/` are the examples. A mistake is named by file and key.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from weight_convert._checks import check_kind, checked_path
from weight_convert._kinds import FILES, FileKind
from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.specs.family import FUSED, ROLES, FamilySpec, Format, TensorNote
from weight_convert.specs.packed import PackedRule
from weight_convert.specs.rules import Rule

_BEHIND = ("layers", "names")
_FORMAT_TEXTS = ("proof", "order", "files", "file_name", "extends")
_FAMILY_MORE = ("companions", "decoder_config", "keep_dtype", "tensors", "formats")
_FOLDER = Path(__file__).parent / "families"


_MEMORY = Format(
    name=FUSED,
    rules=(),
    order="modules",
    files="safetensors",
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
        self._behind: dict[str, Any] = {}

    def family(self, table: Mapping[str, Any]) -> FamilySpec:
        required = ("model_type", "architecture", "experts", "router", "num_experts_keys")
        self._check_keys(table, "the file", required, _FAMILY_MORE)
        tensors = self._mapping(table.get("tensors", {}), "tensors")
        formats = self._mapping(table.get("formats", {}), "formats")
        if FUSED in formats:
            raise WeightConvertError(f"{self._path}: {FUSED!r} is memory's own format")
        read = self._formats(formats)
        return FamilySpec(
            model_type=self._text(table["model_type"], "model_type"),
            architecture=self._text(table["architecture"], "architecture"),
            experts=self._texts(table["experts"], "experts"),
            router=self._text(table["router"], "router"),
            num_experts_keys=self._texts(table["num_experts_keys"], "num_experts_keys"),
            companions=self._texts(table.get("companions", []), "companions"),
            tensors={name: self._note(name, text) for name, text in tensors.items()},
            formats=read | {FUSED: _MEMORY},
            decoder_config=self._text(table.get("decoder_config", ""), "decoder_config"),
            keep_dtype=self._named(table.get("keep_dtype", []), tensors, "keep_dtype"),
        )

    def _named(self, value: Any, tensors: Mapping[str, Any], where: str) -> tuple[str, ...]:
        names = self._texts(value, where)
        self._expect(names, lambda found: set(found) <= set(tensors), where, "names of tensors")
        return names

    def _formats(self, tables: Mapping[str, Any]) -> dict[str, Format]:
        formats: dict[str, Format] = {}
        for name, table in tables.items():
            formats[name] = self._format(name, table, formats)
        return formats

    def _format(self, name: str, table: Any, former: Mapping[str, Format]) -> Format:
        where = f"formats.{name}"
        more = (*_FORMAT_TEXTS, "companions", "names", "transposed", "rules", "behind")
        self._check_keys(self._mapping(table, where), where, (), more)
        rules = table.get("rules", [])
        self._expect(rules, lambda value: isinstance(value, list), f"{where}.rules", "a list")
        own = [self._rule(rule, f"{where}.rules[{n}]") for n, rule in enumerate(rules)]
        for key, transposed in (("names", False), ("transposed", True)):
            names = self._mapping(table.get(key, {}), f"{where}.{key}")
            own += [
                self._renamed(f"{where}.{key}", stored, memory, transposed)
                for stored, memory in names.items()
            ]
        own += self._of_companions(own, table.get("companions", {}), f"{where}.companions")
        base = table.get("extends")
        self._expect(
            base,
            lambda value: value is None or (isinstance(value, str) and value in former),
            f"{where}.extends",
            "a format above",
        )
        made = {name for rule in own for name in rule.target.names}
        rest = former[base].rules if base is not None else ()
        own += [rule for rule in rest if not rule.behind and not made & set(rule.target.names)]
        self._behind[name] = table.get("behind", self._behind.get(base or "", {}))
        return Format(
            name=name,
            rules=(*self._rules_behind(own, self._behind[name], f"{where}.behind"), *own),
            order=self._order(table.get("order", "names"), f"{where}.order"),
            files=self._files(table.get("files", FILES[0]), f"{where}.files"),
            proof=self._text(table.get("proof", ""), f"{where}.proof"),
            file_name=self._text(table.get("file_name", ""), f"{where}.file_name"),
        )

    def _rules_behind(self, rules: Sequence[Rule], table: Any, where: str) -> list[Rule]:
        """The rules for layers behind the others, where files count those from 0 again."""
        self._check_keys(self._mapping(table, where), where, (), _BEHIND)
        made = [
            replace(self._renamed(f"{where}.names", stored, memory, False), behind=1)
            for stored, memory in self._mapping(table.get("names", {}), f"{where}.names").items()
        ]
        for old, new in self._mapping(table.get("layers", {}), f"{where}.layers").items():
            for rule in rules:
                if all(name.startswith(f"{old}.") for name in rule.source.names):
                    names = tuple(new + name.removeprefix(old) for name in rule.source.names)
                    source = replace(rule.source, names=names)
                    made.append(replace(rule, source=source, behind=1))
        return made

    def _of_companions(self, rules: Sequence[Rule], table: Any, where: str) -> list[Rule]:
        """The rules of companions whose stored names end otherwise."""
        made: list[Rule] = []
        for suffix, ends in self._mapping(table, where).items():
            self._expect(
                self._texts(ends, where), lambda ends: len(ends) == 2, where, "two endings"
            )
            old, new = ends
            for rule in rules:
                if all(name.endswith(old) for name in rule.source.names):
                    stored = tuple(name.removesuffix(old) + new for name in rule.source.names)
                    memory = tuple(name + suffix for name in rule.target.names)
                    source = replace(rule.source, names=stored)
                    target = replace(rule.target, names=memory)
                    made.append(replace(rule, source=source, target=target))
        return made

    def _rule(self, table: Any, where: str) -> Rule:
        more = ("dims", "sizes", "transposed", "beside", "groups", "parts")
        self._check_keys(self._mapping(table, where), where, ("stored", "memory"), more)
        stored, memory = (self._texts(table[key], f"{where}.{key}") for key in ("stored", "memory"))
        if "groups" in table:
            return self._packed(table, where, stored, memory)
        try:
            return Rule.parse(
                stored=stored,
                memory=memory,
                dims=self._text(table.get("dims", ""), f"{where}.dims"),
                sizes_of=self._sizes(table.get("sizes", {}), f"{where}.sizes"),
                transposed=self._flag(table.get("transposed", False), f"{where}.transposed"),
                beside=self._text(table.get("beside", ""), f"{where}.beside"),
            )
        except WeightConvertError as error:
            raise WeightConvertError(f"{self._path}: {where}: {error}") from error

    def _packed(
        self, table: Mapping[str, Any], where: str, stored: Sequence[str], memory: Sequence[str]
    ) -> Rule:
        groups = self._text(table["groups"], f"{where}.groups")
        parts = self._texts(table.get("parts", []), f"{where}.parts")
        try:
            return PackedRule.of(stored=stored[0], memory=memory, groups=groups, parts=parts)
        except (WeightConvertError, IndexError) as error:
            raise WeightConvertError(f"{self._path}: {where}: {error}") from error

    def _renamed(self, where: str, stored: str, memory: Any, transposed: bool) -> Rule:
        try:
            return Rule.parse(
                stored=[stored], memory=[self._text(memory, where)], transposed=transposed
            )
        except WeightConvertError as error:
            raise WeightConvertError(f"{self._path}: {where}: {error}") from error

    def _files(self, value: Any, where: str) -> FileKind:
        self._expect(value, lambda found: found in FILES, where, f"one of {', '.join(FILES)}")
        return next(kind for kind in FILES if kind == value)

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

    def _sizes(self, value: Any, where: str) -> Mapping[str, int]:
        for axis, size in self._mapping(value, where).items():
            self._expect(
                size, lambda n: type(n) is int and n > 0, f"{where}.{axis}", "a number above 0"
            )
        return dict(value)

    def _flag(self, value: Any, where: str) -> bool:
        self._expect(value, lambda found: isinstance(found, bool), where, "true or false")
        return bool(value)

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
