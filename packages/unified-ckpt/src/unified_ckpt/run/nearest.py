"""Resume from the nearest copy of the newest state: the node itself, another node, or storage.

found = resume_nearest(manager, tier, load_one)  # (folder, what load_one returned), or None
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from unified_ckpt.files.storage import Location
from unified_ckpt.folders import get_last_checkpoint, step_of
from unified_ckpt.run.manager import CheckpointManager
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.tiers import NodeTier

_T = TypeVar("_T")


def resume_nearest(
    manager: CheckpointManager,
    tier: NodeTier,
    load_one: Callable[[Any], _T],
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Path | Location, _T] | None:
    """Load from the tier if it has a state as new as storage has, else as `manager.resume`.

    Collective. A state of the tier that cannot be loaded (another layout, damage of all copies) is
    passed over with a `DamagedCheckpointWarning`; if storage passed over a damaged checkpoint, the
    tier may have a newer one than it came to.

    Args:
        manager: of the run's folder in storage, a directory or in a store.
        tier: of the nodes.
        load_one: loads this rank's state from a folder or `Location`, for example with `load`.
        group: the ranks, as of the manager and the tier.

    Raises:
        SaveError, LoadError: as `CheckpointManager.resume` and `NodeTier.resume`.
    """
    subject = f"resume_nearest({str(manager.folder)!r})"
    agreement = Agreement(group, timeout_s=manager.options.timeout_s, subject=subject)
    with agreement.phase("newest") as phase:
        if agreement.rank == 0:
            last = get_last_checkpoint(manager.folder)
            phase.payload = 0 if last is None else step_of(last)
    newest = phase.results[0]
    found = tier.resume(load_one, at_least=newest)
    if found is not None:
        return found
    stored = manager.resume(load_one)
    step = 0 if stored is None else step_of(stored[0])
    if step >= newest:
        return stored
    tried: list[object] = []

    def load_again(place: Path) -> _T:
        tried.append(place)
        return load_one(place)

    found = tier.resume(load_again, at_least=step + 1)
    # What was begun has filled destinations, on all ranks.
    return found or (manager.resume(load_one) if tried else stored)
