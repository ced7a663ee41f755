"""The errors of this package, so that one `except AllocError` catches whatever it raises on
purpose.

Invariant: an error that a user's mistake causes is also a `ValueError` or `RuntimeError`, and
running out of memory is also a `MemoryError`, so code that knows nothing of this package handles
them as usual.

>>> issubclass(OutOfMemoryError, MemoryError)
True
"""

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from gpu_alloc.oom import OomReport


class AllocError(Exception):
    """Base of every error that this package raises on purpose."""


@final
class ConfigError(AllocError, ValueError):
    """A configuration value, or the text of `GPU_ALLOC_CONF`, cannot be used."""


@final
class InvalidFreeError(AllocError, ValueError):
    """A pointer was freed that this allocator did not hand out, or that was freed before."""


@final
class ReentrantMallocError(AllocError, RuntimeError):
    """A finalizer or hook asked for memory while the same thread was inside the allocator."""


@final
class ClosedError(AllocError, RuntimeError):
    """Memory was asked from an allocator after `close()`."""


@final
class TraceError(AllocError, ValueError):
    """A trace file or a sequence of trace events contradicts itself or the format."""


class OutOfMemoryError(AllocError, MemoryError):
    """No placement was found; `report` holds the numbers and the message a remedy."""

    def __init__(self, report: "OomReport") -> None:
        # Not super(): the CuPy adapter's subclass also has CuPy's error as a base, whose own
        # constructor takes other arguments.
        MemoryError.__init__(self, report.message())
        self.report = report

    def __reduce__(self) -> tuple[type["OutOfMemoryError"], tuple["OomReport"]]:
        return OutOfMemoryError, (self.report,)


@final
class CudaVersionWarning(UserWarning):
    """cupy and torch are built for different CUDA major versions."""
