"""A change of layout that somebody asks of a running job: a file that rank 0 looks for.

`moe-train relayout` writes it into the run's folder; after the next step all ranks hear of it in
the figures of the step, and then what it says.

    LayoutRequests(Path("runs/job")).ask((2, 1, 4, 1, 1, 1), "load")    # `SIZES`, experts
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from moe_train.cache import write_atomic
from moe_train.parallel import SIZES, Sizes

_FILE = "relayout.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayoutRequests:
    """The requests of one run; `is_first` in the process that looks for them."""

    folder: Path
    is_first: bool = True

    def ask(self, sizes: Sizes, experts: str = "") -> None:
        """Ask the job in the folder for a layout, from any process; the newest request counts.

        Args:
            sizes: pp, dp, ep, cp, tp and etp.
            experts: their parts along ep, as in `parallel.relayout`; "" for equal ones.
        """
        asked = {**dict(zip(SIZES, sizes, strict=True)), "experts": experts}
        write_atomic(self.folder / _FILE, json.dumps(asked))

    def is_waiting(self) -> bool:
        """Whether there is one; only the first rank knows."""
        return self.is_first and (self.folder / _FILE).exists()

    def forget(self) -> None:
        """Remove what was asked of an earlier job."""
        if self.is_waiting():
            (self.folder / _FILE).unlink(missing_ok=True)
            logger.warning("warning: %s was asked of an earlier job; it is removed", _FILE)

    def take(self) -> tuple[Sizes, str] | None:
        """Return the sizes and the experts that are asked for, and remove the file. Collective.

        None where the file says nothing that could be a layout; that is one line.
        """
        found: list[tuple[Sizes, str] | None] = [self._read() if self.is_first else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _read(self) -> tuple[Sizes, str] | None:
        file = self.folder / _FILE
        try:
            text = file.read_text(encoding="utf-8")
            file.unlink(missing_ok=True)
            asked = json.loads(text)
            pp, dp, ep, cp, tp, etp = (asked[name] for name in SIZES)
            experts = asked.get("experts", "")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("warning: %s cannot be read: %r; the layout stays", file, error)
            return None
        sizes_fit = all(type(size) is int and size > 0 for size in (pp, dp, ep, cp, tp, etp))
        if not sizes_fit or not isinstance(experts, str):
            logger.warning("warning: %s says %s; the layout stays", file, text)
            return None
        return (pp, dp, ep, cp, tp, etp), experts
