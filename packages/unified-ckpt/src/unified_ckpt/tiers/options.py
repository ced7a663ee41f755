"""How a tier of the nodes works, checked once.

TierOptions(folder="/dev/shm/my-run", copies=1)
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_ckpt.errors import CheckpointValueError, as_path, check_type
from unified_ckpt.node import node_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """How a tier works; the same on every rank, but for `folder` and `node`.

    Attributes:
        folder: of this node, best on a tmpfs (`/dev/shm/my-run`) or a local disk, and of one run.
            It holds two generations: the last state, and during a save the next one, of this node
            and of those whose copies it keeps.
        copies: how many other nodes hold a copy of each node's state.
        node: the node's name, the same on all of its ranks; None for the environment variable
            UNIFIED_CKPT_NODE, else the host's name.
        max_bytes: most bytes of the folder; None for what its file system has.
        timeout_s: bound on each wait for other ranks.

    Raises:
        CheckpointTypeError, CheckpointValueError: a value cannot be used.
    """

    folder: Path | str
    copies: int = 1
    node: str | None = None
    max_bytes: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        as_path("folder", self.folder)
        check_type("copies", self.copies, int)
        check_type("node", self.node, str, type(None))
        check_type("max_bytes", self.max_bytes, int, type(None))
        check_type("timeout_s", self.timeout_s, int, float)
        if self.copies < 0:
            raise CheckpointValueError(f"copies={self.copies} must be 0 or more")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise CheckpointValueError(f"max_bytes={self.max_bytes} must be positive, or None")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise CheckpointValueError(f"timeout_s={self.timeout_s} must be a number of seconds")

    @property
    def path(self) -> Path:
        """The folder without links."""
        return Path(os.path.realpath(self.folder))

    @property
    def node_name(self) -> str:
        """The name of this process's node."""
        return self.node or node_name()

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON types, for another process of this node."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"folder": str(self.path), "node": self.node_name}
