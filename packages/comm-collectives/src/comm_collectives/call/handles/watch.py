"""Notice that a tensor was changed in place while a transfer still read it.

Torch counts changes made through its own operations, which costs nothing to look at. It has one
count for all views of a memory, so only tensors that fill theirs are watched by it. In debug mode
a copy is kept and compared, which also sees changes of a part, and those made behind torch's back
(numpy, another library, `.data`).

    watch = Watch([x])
    ...
    watch.changed()      # [0] if x was changed meanwhile
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import torch

from comm_collectives.base import as_bytes, dense

_DEBUG: ContextVar[bool] = ContextVar("comm_collectives_debug", default=False)


@contextmanager
def debug_mode() -> Iterator[None]:
    """Compare the inputs of asynchronous calls made inside, byte for byte, when they are waited on.

    Costs a copy of each input. Not collective.
    """
    token = _DEBUG.set(True)
    try:
        yield
    finally:
        _DEBUG.reset(token)


@final
class Watch:
    """Keeps tensors alive and knows which of them changed since."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._versions = [_version(x) for x in tensors]
        self._copies = [dense(x).clone() for x in tensors] if _DEBUG.get() else None

    def changed(self) -> list[int]:
        """Return the positions of the tensors that changed."""
        return [i for i, x in enumerate(self._tensors) if self._has_changed(i, x)]

    def _has_changed(self, i: int, x: torch.Tensor) -> bool:
        version = self._versions[i]
        if version is not None and x._version != version:
            return True
        if self._copies is None:
            return False
        return not torch.equal(as_bytes(dense(x)), as_bytes(self._copies[i]))


def _version(x: torch.Tensor) -> int | None:
    # Tensors made in inference mode have no count, and that of a part tells of the others as well.
    is_whole = x.nbytes == x.untyped_storage().nbytes()
    return x._version if is_whole and not x.is_inference() else None
