"""The kinds of weight files, and the names that one file and an index of several have.

INDEX_NAMES["bin"]      # "pytorch_model.bin.index.json"
"""

from collections.abc import Mapping
from typing import Literal

FileKind = Literal["safetensors", "bin", "pdparams", "dcp"]
FILES: tuple[FileKind, ...] = ("safetensors", "bin", "pdparams", "dcp")
SINGLE_NAMES: Mapping[FileKind, str] = {
    "safetensors": "model.safetensors",
    "bin": "pytorch_model.bin",
    "pdparams": "model_state.pdparams",
}
INDEX_NAMES: Mapping[FileKind, str] = {
    kind: f"{name}.index.json" for kind, name in SINGLE_NAMES.items()
}
