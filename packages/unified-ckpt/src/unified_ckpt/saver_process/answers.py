"""What a saver process answers, as JSON types: the report of a save, or the error that it ended in.

report_from_json(report_to_json(report)) == report
raise error_from_json(error_to_json(error))  # of the same kind, with the same text
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unified_ckpt.errors import CheckpointError, SaveArgumentError, SaveError, SavePeerError
from unified_ckpt.files.storage import as_target
from unified_ckpt.saving import SaveReport

MAX_MESSAGE_BYTES = 128 * 1024  # below the default send buffer of a socket
_MAX_ERROR_CHARS = 16 * 1024  # a message has room for them when each is escaped
_KINDS = (SavePeerError, SaveArgumentError)


def report_to_json(report: SaveReport) -> dict[str, Any]:
    """Return a report as JSON types."""
    leftovers = [str(path) for path in report.removed_leftovers]
    known = {name: getattr(report, name) for name in SaveReport.__slots__}
    return {**known, "path": str(report.path), "removed_leftovers": leftovers}


def report_from_json(fields: Mapping[str, Any]) -> SaveReport:
    """Undo `report_to_json`."""
    leftovers = tuple(Path(name) for name in fields["removed_leftovers"])
    return SaveReport(
        **{**fields, "path": as_target("path", fields["path"]), "removed_leftovers": leftovers}
    )


def error_to_json(error: Exception) -> list[str]:
    """Return an error's kind, a `SaveError` whatever it was, and its text, cut if it is huge."""
    kind = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), SaveError.__name__)
    known = isinstance(error, CheckpointError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return [kind, text[:_MAX_ERROR_CHARS]]


def error_from_json(fields: Sequence[str]) -> SaveError:
    """Undo `error_to_json`."""
    name, text = fields
    return {kind.__name__: kind for kind in _KINDS}.get(name, SaveError)(text)
