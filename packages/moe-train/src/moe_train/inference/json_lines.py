"""Files of JSON lines that a command reads: an object in each line.

for number, record in read_records(Path("prompts.jsonl")):
    ...                                              # line numbers count from 1
"""

import json
from pathlib import Path
from typing import Any

from moe_train.errors import MissingFileError, TrainValueError

Record = dict[str, Any]


def read_records(path: Path) -> list[tuple[int, Record]]:
    """The objects of a file and the numbers of their lines; empty lines are passed over.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object, or there is none; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist; name a file of JSON lines") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TrainValueError(f"{path} cannot be read as UTF-8 text: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            records.append((number, _record(line, f"{path}, line {number}")))
    if not records:
        raise TrainValueError(f"{path} holds no records; expected a JSON object in each line")
    return records


def _record(line: str, where: str) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TrainValueError(f"{where}: not JSON ({error}); expected one object a line") from error
    if not isinstance(value, dict):
        raise TrainValueError(f"{where}: {type(value).__name__}; expected a JSON object")
    return value
