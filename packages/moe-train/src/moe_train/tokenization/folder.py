"""The files of a tokenizer as a folder or a checkpoint carries them.

Invariant: the files are kept as bytes, so that a checkpoint carries what was given, byte for byte,
where nothing was changed.

    files = read_files(Path("Qwen3-30B-A3B"))
    files["tokenizer.json"], files["generation_config.json"]
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_train.errors import MissingFileError, TrainValueError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_NAMED_TEMPLATES = "additional_chat_templates"
# Files of the slow tokenizer, which say the same as tokenizer.json while that is unchanged.
SLOW_FILES = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.model")
_CARRIED = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
    *SLOW_FILES,
)


def read_files(path: Path) -> dict[str, bytes]:
    """File name -> content of the tokenizer in a folder, or of one tokenizer.json.

    Raises:
        FileNotFoundError: there is no such path, or the folder has no tokenizer.json.
    """
    if not path.exists():
        raise MissingFileError(
            f"tokenizer {path} does not exist; name a folder or a tokenizer.json"
        )
    if not path.is_dir():
        return {TOKENIZER: path.read_bytes()}
    files = {name: (path / name).read_bytes() for name in _CARRIED if (path / name).is_file()}
    if TOKENIZER not in files:
        raise MissingFileError(_without_tokenizer(path, files))
    named = sorted((path / _NAMED_TEMPLATES).glob("*.jinja"))
    if named:
        # A checkpoint has no folders; transformers reads the same templates from this list.
        templates = {file.stem: file.read_text(encoding="utf-8") for file in named}
        if CHAT_TEMPLATE in files:
            templates["default"] = files.pop(CHAT_TEMPLATE).decode()
        listed = [{"name": name, "template": text} for name, text in sorted(templates.items())]
        values = {**read_json(files, TOKENIZER_CONFIG), "chat_template": listed}
        files[TOKENIZER_CONFIG] = to_json(values)
    return files


def _without_tokenizer(path: Path, files: Mapping[str, bytes]) -> str:
    others = [name for name in SLOW_FILES if name in files]
    if others:
        return (
            f"{path} has {', '.join(others)} but no {TOKENIZER}; write one with "
            f'AutoTokenizer.from_pretrained("{path}").save_pretrained("{path}")'
        )
    return (
        f"{path} has no {TOKENIZER}; name the tokenizer that its model was trained with by "
        "tokenizer.file (a folder or a tokenizer.json)"
    )


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in one of the files; empty where there is no such file.

    Raises:
        ValueError: the file is no JSON object.
    """
    try:
        values = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise TrainValueError(f"{name} of the tokenizer is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise TrainValueError(f"{name} of the tokenizer is not a JSON object")
    return values


def to_json(values: Mapping[str, Any]) -> bytes:
    """The text of a JSON file as transformers writes it."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
