"""Token ids on disk: raw little-endian numbers, and beside them a small JSON that says which.

Invariant: a file whose size does not fit its JSON is refused, so that a torn copy is never read.

    write_tokens(Path("train.bin"), [ids], vocab_size=4096)
    tokens = open_tokens(Path("train.bin"))
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.errors import TrainValueError

_FORMAT = 1
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def write_tokens(path: Path, parts: Iterable[NDArray[np.int64]], *, vocab_size: int) -> None:
    """Write one token file; the JSON is written last, when nothing has failed.

    Args:
        parts: token ids, int64 [N], each below the vocabulary size.
    """
    dtype_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    num_tokens = 0
    with path.open("wb") as stream:
        for ids in parts:
            stream.write(ids.astype(_DTYPES[dtype_name]).tobytes())
            num_tokens += len(ids)
    facts = {"format": _FORMAT, "dtype": dtype_name, "num_tokens": num_tokens}
    path.with_suffix(".json").write_text(json.dumps(facts) + "\n")


def open_tokens(path: Path) -> NDArray[Any]:
    """The token ids of a file, [N] of uint16 or uint32, mapped and read only where touched.

    Raises:
        ValueError: the description is missing or unreadable, or the file's size does not fit it.
    """
    facts_file = path.with_suffix(".json")
    try:
        facts = json.loads(facts_file.read_bytes())
        dtype, num_tokens = _DTYPES[facts["dtype"]], int(facts["num_tokens"])
        size_bytes = path.stat().st_size
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TrainValueError(
            f"{path} cannot be opened as a token file: {type(error).__name__}: {error}"
        ) from error
    if facts.get("format") != _FORMAT or size_bytes != num_tokens * dtype.itemsize:
        raise TrainValueError(
            f"{path} has {size_bytes} bytes, but {facts_file.name} describes {num_tokens} tokens "
            f"of {dtype.itemsize} bytes; delete both files, they are made again"
        )
    if num_tokens == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,))
