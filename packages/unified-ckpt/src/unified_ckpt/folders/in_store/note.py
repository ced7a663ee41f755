"""What only a job can say of a run in a store: who saves there, and which checkpoints it began.

One small object, `unified_ckpt_run.json`, beside the checkpoints. Listings may be old, so a job
that manages the folder notes a checkpoint before it saves it, and whoever looks for the newest one
asks for those of both. A name stands there whether its save succeeded or not; its manifest tells.

    note = read_note(Location(store=store, key="run"))
"""

import json
from dataclasses import asdict, dataclass

from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files.storage import Fetched, Location

_NAME = "unified_ckpt_run.json"
_FORMAT = "unified-ckpt-run"
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The job that manages a folder: `token` is its own, the rest says which process it is."""

    token: str
    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNote:
    """The note: its holder (None: nobody), how often it was written, and names of checkpoints."""

    holder: Holder | None
    number: int
    names: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the object's contents."""
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode()


def note_place(folder: Location) -> Location:
    """Return where the note of a folder lies."""
    return folder / _NAME


def read_note(folder: Location) -> tuple[RunNote, Fetched] | None:
    """Return the note of a folder, and the object as it was; None if there is none.

    Raises:
        CorruptCheckpointError: the object is something else.
        OSError: the store does not answer.
    """
    place = note_place(folder)
    found = place.store.fetch(place.key)
    if found is None:
        return None
    try:
        table = json.loads(found.data)
        if table["format"] != _FORMAT:
            raise CorruptCheckpointError(f"{place}: its format is {table['format']!r}")
        holder = None if table["holder"] is None else Holder(**table["holder"])
        names = tuple(str(name) for name in table["names"])
        return RunNote(holder=holder, number=int(table["number"]), names=names), found
    except _MALFORMED as error:
        raise CorruptCheckpointError(
            f"{place} is no note of a run: {error!r}; remove it, then the checkpoints are listed"
        ) from error
