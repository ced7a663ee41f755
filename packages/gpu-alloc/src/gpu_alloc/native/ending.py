"""The end of a core, where blocks may be freed after their allocator has ended.

Arrays free their blocks in finalizers. Where they and the allocator are garbage together, Python
ends weak references first and finalizers later, so that the core has to outlive both.

Invariant: a core whose blocks finalizers free is deleted when none of them is in use any more.
What nobody uses is given back to the source at once, and the rest with its last block.
"""

from gpu_alloc.native.binding import Core
from gpu_alloc.native.callbacks import Callbacks

_OUTLIVING: list[tuple[Core, Callbacks | None]] = []


def end_core(core: Core, callbacks: Callbacks | None) -> None:
    """Nobody holds the allocator any more; the callbacks live as long as the core.

    Raises what the source raised when it was given its memory back.
    """
    core.call("ga_close")
    if core.is_freed_by_finalizers:
        _OUTLIVING.append((core, callbacks))
    else:
        core.delete()
    for entry in tuple(_OUTLIVING):
        if not entry[0].num_live_blocks():
            try:
                _OUTLIVING.remove(entry)
            except ValueError:
                continue  # deleted by another thread, or by a finalizer meanwhile
            entry[0].delete()
    if callbacks is not None:
        callbacks.kept.raise_kept()
