"""The errors of this package: every one names the rank, key or file, what was found, and a remedy.

A user's mistake is a ValueError or a TypeError as well, so that callers can catch either.

try:
    save(parts, checkpoint_id="run/checkpoint-10")
except CheckpointError as error:
    print(error)  # rank 3 failed in 'write': OSError: [Errno 28] No space left on device: ...
"""

import os
import re
from pathlib import Path
from typing import Any

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_AS_PATH = re.compile(r"(?:s3a?|gs|az|abfss?|file|fsspec\+[A-Za-z0-9.+-]+):(?=/(?!/))")
_PLAIN = {"SupportsFloat": "a number", "SupportsIndex": "a whole number"}

# What reading a table raises that is not what was written there.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class CheckpointError(RuntimeError):
    """Base of all errors of this package."""


class CheckpointValueError(CheckpointError, ValueError):
    """An argument has a value that cannot be used."""


class CheckpointTypeError(CheckpointError, TypeError):
    """An argument has a type that cannot be used."""


class SaveError(CheckpointError):
    """A save failed on at least one rank; raised on every rank that still runs."""


class SaveArgumentError(SaveError, ValueError):
    """The arguments of a save are wrong; raised on every rank before anything is written."""


class SavePeerError(SaveError):
    """A peer did not arrive at an agreement of a save: it died, is stuck, or is too slow."""


class LoadError(CheckpointError):
    """A checkpoint does not hold what was asked for (missing key, other shape, other dtype)."""


class CorruptCheckpointError(LoadError):
    """Bytes of a checkpoint are missing, malformed, or differ from their checksum."""


class ReplacedCheckpointError(LoadError):
    """A checkpoint was replaced, removed or written to while it was read; it is not damaged."""


class StoreError(LoadError):
    """A store did not answer or refuses: nothing is known of what it holds, nor of damage.

    So is a local directory for a process that has no descriptors or memory left.
    """


class DamagedCheckpointWarning(UserWarning):
    """A newer checkpoint is damaged or incomplete and was passed over for an older one."""


class KeptFilesWarning(UserWarning):
    """A checkpoint was replaced that held files of others; the new one holds them as well."""


class LeftoverFilesWarning(UserWarning):
    """A store did not delete what no checkpoint names any more; the next save of that name does."""


class UnpinnedMemoryWarning(UserWarning):
    """Host memory could not be page-locked; copies between it and devices stop the host."""


def check_type(name: str, value: object, *kinds: type[Any]) -> None:
    """Raise CheckpointTypeError if an argument is none of these kinds."""
    if not isinstance(value, kinds):
        wanted = " or ".join(_PLAIN.get(kind.__name__, kind.__name__) for kind in kinds)
        raise CheckpointTypeError(f"{name} is a {type(value).__name__}; expected {wanted}")


def is_url(text: str) -> bool:
    """Whether a name begins with a scheme, such as `s3://`."""
    return _URL.match(text) is not None


def as_path(name: str, value: object) -> Path:
    """Return an argument that names a file or folder as a path; refuse any other."""
    check_type(name, value, str, os.PathLike)
    text = os.fsdecode(value)  # type: ignore[arg-type]
    if not text or "\0" in text:
        raise CheckpointValueError(f"{name} is {text!r}; expected the name of a file or folder")
    if scheme := _URL_AS_PATH.match(text):
        raise CheckpointValueError(
            f"{name} is {text!r}, a URL that has lost a slash, as in Path('s3://bucket/run'); give "
            f"{scheme[0]}//... as text, or an absolute path to a folder of that name"
        )
    if is_url(text):  # as a path it would be a folder here of that name
        raise CheckpointValueError(
            f"{name} is a {text.partition(':')[0]}:// URL, but this works on directories only"
        )
    return Path(text)
