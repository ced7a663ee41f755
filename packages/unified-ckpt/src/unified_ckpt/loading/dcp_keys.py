"""How torch DCP's flat names become parts and keys of a checkpoint, and back.

DCP joins the keys of a nested state dict with dots. A prefix names the part: with the prefix
`model.`, `model.wq.weight` is the tensor `wq.weight` of part `model`. What has no known prefix is
in part `model` under its whole name. Names and DCP's Python objects stand in `dcp.json`.

    Prefixes({"model.": "model"}).split("model.wq.weight")  # ("model", "wq.weight")
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.errors import CheckpointValueError

DCP_NAME = "dcp.json"
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
    """

    names: Mapping[str, tuple[str, str]]
    objects: Mapping[str, Any]
    paths: Mapping[str, list[str | int]]

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        content = {"names": self.names, "objects": self.objects, "paths": self.paths}
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> "DcpRecord":
        """Undo `to_bytes`."""
        try:
            content = json.loads(raw)
            names = {name: (str(part), str(key)) for name, (part, key) in content["names"].items()}
            return cls(names, dict(content["objects"]), dict(content["paths"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointValueError(f"{DCP_NAME} is malformed: {error!r}") from error
