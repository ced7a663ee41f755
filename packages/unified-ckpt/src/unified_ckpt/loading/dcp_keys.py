"""How torch DCP's flat names become parts and keys of a checkpoint, and back.

DCP joins the keys of a nested state dict with dots. A prefix names the part: with the prefix
`model.`, `model.wq.weight` is the tensor `wq.weight` of part `model`. What has no known prefix is
in part `model` under its whole name. Names and DCP's Python objects stand in `dcp.json`.

    Prefixes({"model.": "model"}).split("model.wq.weight")  # ("model", "wq.weight")
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.saving import STATE_VERSION
from unified_ckpt.state.optimizer import MOMENTS, PARAMS

DCP_NAME = "dcp.json"
_STATE = re.compile(r"(?P<prefix>(?:.+\.)?)state\.(?P<name>.+)\.(?P<state>[^.]+)\Z")
_FLAT_GROUP = re.compile(r"(?P<where>(?:.+\.)?param_groups)\.(?P<name>.*\D.*)\.(?P<field>[^.]+)\Z")
DEFAULT_PREFIXES = {
    "model.": "model",
    "optimizer.": "optimizer",
    "optim.": "optim",
    "master_weights.": "master_weights",
    "ema.": "ema",
}


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefix of DCP's names -> part; no two prefixes have one part, so that names come back."""

    part_of: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_PREFIXES))

    def __post_init__(self) -> None:
        if len(set(self.part_of.values())) != len(self.part_of):
            raise CheckpointValueError(f"prefixes {dict(self.part_of)}: two of them have one part")

    def split(self, name: str) -> tuple[str, str]:
        """Return the part and the key of a DCP name."""
        for prefix in sorted(self.part_of, key=len, reverse=True):
            if prefix and name.startswith(prefix):
                return self.part_of[prefix], name.removeprefix(prefix)
        return "model", name


@dataclass(frozen=True, slots=True)
class DcpRecord:
    """What `dcp.json` says.

    Attributes:
        names: DCP name -> (part, key) of every tensor.
        objects: DCP name -> value of everything else.
        paths: DCP name -> where it stood in the nested state dict.
        typed: whether objects say their types; those of earlier versions do not.
    """

    names: Mapping[str, tuple[str, str]]
    objects: Mapping[str, Any]
    paths: Mapping[str, list[str | int]]
    typed: bool = True

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        content = {
            "version": STATE_VERSION,
            "names": self.names,
            "objects": self.objects,
            "paths": self.paths,
        }
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> "DcpRecord":
        """Undo `to_bytes`."""
        try:
            content = json.loads(raw)
            names = {name: (str(part), str(key)) for name, (part, key) in content["names"].items()}
            typed = content.get("version", 2) >= STATE_VERSION
            return cls(names, dict(content["objects"]), dict(content["paths"]), typed)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointValueError(f"{DCP_NAME} is malformed: {error!r}") from error

    def optimizer_keys(self) -> dict[str, dict[str, str]]:
        """Return, by part, this package's keys of optimizer states (`w/moment1`) and DCP's."""
        found: dict[str, dict[str, str]] = {}
        for name, (part, key) in self.names.items():
            own = self._state_key(name, key)
            if own is not None:
                found.setdefault(part, {})[own] = key
        return found

    def values(self, prefixes: Prefixes) -> dict[str, Any]:
        """Return the objects by this package's paths, those of optimizers as it has them."""
        values = dict(self.objects)
        groups: dict[str, dict[str, dict[str, Any]]] = {}
        for name, value in self.objects.items():
            part, key = prefixes.split(name)
            own = self._state_key(name, key)
            match = _FLAT_GROUP.match(name)
            if own is not None:
                values[f"{part}.{own}"] = value
            elif name.endswith("param_groups") and isinstance(value, list):
                for number, group in enumerate(value):
                    values |= {f"{name}.{number}.{field}": item for field, item in group.items()}
            elif match is not None:
                groups.setdefault(match["where"], {}).setdefault(match["name"], {})[
                    match["field"]
                ] = value
        for where, fields_of in groups.items():
            values |= _groups_of(where, fields_of)
        return values

    def _state_key(self, name: str, key: str) -> str | None:
        """Return `NAME/STATE` of DCP's `state.NAME.STATE`, None of what is no optimizer's state."""
        path = [str(step) for step in self.paths.get(name, ())]
        if "state" in path[1:-2]:
            at = path.index("state", 1)
            parameter, state = path[at + 1], ".".join(path[at + 2 :])
            prefix = "".join(f"{step}." for step in path[1:at])
        else:
            match = _STATE.match(key)
            if match is None:
                return None
            prefix, parameter, state = match["prefix"], match["name"], match["state"]
        return f"{prefix}{parameter}/{MOMENTS.get(state, state)}"


def _groups_of(where: str, fields_of: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return groups of the parameters that have the same hyperparameters."""
    groups: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for name, fields in fields_of.items():
        groups.setdefault(json.dumps(fields, sort_keys=True), (fields, []))[1].append(name)
    values: dict[str, Any] = {}
    for number, (fields, names) in enumerate(groups.values()):
        values |= {f"{where}.{number}.{field}": item for field, item in fields.items()}
        values[f"{where}.{number}.{PARAMS}"] = names
    return values
