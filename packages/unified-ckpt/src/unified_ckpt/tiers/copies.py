"""What lies in a node's folder: one copy for each save and node, told apart by rank and token.

`FOLDER/ranks-00004/step-20-TOKEN` is a checkpoint of what the ranks of one node held, the lowest of
them rank 4; its file `node_copy.json` says the rest. A name is never used twice, so no copy is ever
replaced, and one that is not complete has no name.

    for copy in held_copies(Path("/dev/shm/my-run")):
        print(copy.step, copy.ranks)
"""

import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unified_ckpt.errors import DamagedCheckpointWarning, LoadError, StoreError
from unified_ckpt.files import remove_tree
from unified_ckpt.files.format import MANIFEST_NAME, check_sizes
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint
from unified_ckpt.saving.commit import clean_leftovers

COPY_FILE = "node_copy.json"
_FOLDER, _COPY = re.compile(r"ranks-\d{5,}\Z"), re.compile(r"step-\d+-[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCopy:
    """What the ranks of one node held when a state was saved; hashable, and plain data.

    Attributes:
        step: finished steps of the state.
        token: of the save; copies of one state have the same.
        ranks: whose state it is.
        world_size: ranks of the job.
        files: name and size of each of its files, once it is written.
    """

    step: int
    token: str
    ranks: tuple[int, ...]
    world_size: int
    files: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """The copy's name in the folder of any node."""
        return f"ranks-{self.ranks[0]:05d}/step-{self.step}-{self.token}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(num_bytes for _, num_bytes in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the copy as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "NodeCopy":
        """Undo `to_json`."""
        return cls(
            step=int(fields["step"]),
            token=str(fields["token"]),
            ranks=tuple(int(rank) for rank in fields["ranks"]),
            world_size=int(fields["world_size"]),
            files=tuple((str(name), int(size)) for name, size in fields["files"]),
        )


def held_copies(folder: Path) -> list[NodeCopy]:
    """Return the copies in a node's folder that are whole: manifest, and the sizes of all files.

    Bytes are not compared. One that is damaged is passed over with a `DamagedCheckpointWarning`.

    Raises:
        StoreError: this process has no descriptors or memory left to look at them.
    """
    found = []
    for path in copy_folders(folder):
        try:
            copy = read_copy(path)
        except StoreError:
            raise
        except LoadError as error:
            warnings.warn(f"{path} is passed over: {error}", DamagedCheckpointWarning, stacklevel=2)
            continue
        if folder / copy.name == path:
            found.append(copy)
    return found


def read_copy(path: Path) -> NodeCopy:
    """Return what a copy says of itself, with its files.

    Raises:
        LoadError: it is no complete copy.
    """
    return read_checkpoint(path, _copy_of)


def _copy_of(checkpoint: Checkpoint) -> NodeCopy:
    manifest = checkpoint.manifest
    problems = [] if manifest is None else check_sizes(checkpoint.opened, manifest)
    if manifest is None or problems:
        raise LoadError(next(iter(problems), "it has no manifest"))
    try:
        told = json.loads(checkpoint.read_file(COPY_FILE))
        sizes = [*manifest.sizes.items()]
        sizes.append((MANIFEST_NAME, checkpoint.opened.size(MANIFEST_NAME) or 0))
        return NodeCopy.from_json({**told, "files": sizes})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LoadError(f"{checkpoint.folder / COPY_FILE} is malformed: {error!r}") from error


def copy_folders(folder: Path) -> list[Path]:
    """Return the path of every copy in a node's folder, complete or not."""
    return [
        path
        for parent in _parents(folder)
        for path in sorted(parent.iterdir())
        if _COPY.match(path.name)
    ]


def _parents(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if _FOLDER.match(path.name) and path.is_dir()]


def free_copies(folder: Path, *, keep: Collection[str]) -> int:
    """Remove all copies but those of these tokens, and what killed saves left; return how many.

    What was left may be of ranks that no save here is of any more, since nodes change places.
    """
    old = [path for path in copy_folders(folder) if path.name.rpartition("-")[2] not in keep]
    for path in old:
        remove_tree(path)
    left = 0
    for parent in _parents(folder):
        left += len(clean_leftovers(parent))
        if not any(parent.iterdir()):
            remove_tree(parent)
    return len(old) + left
