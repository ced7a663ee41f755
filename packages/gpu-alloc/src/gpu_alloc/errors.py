"""The errors of this package: one `except AllocError` catches whatever it raises on purpose.

Invariant: a wrong argument is also a `ValueError` or a `TypeError`, a call at the wrong time also a
`RuntimeError`, and running out of memory (`oom.py`) also a `MemoryError`. So code that knows
nothing of this package handles them as usual.

>>> issubclass(ConfigError, ValueError)
True
"""

from typing import final


class AllocError(Exception):
    """Base of every error that this package raises on purpose."""


class AllocValueError(AllocError, ValueError):
    """A value does not fit, for example a negative size."""


@final
class AllocTypeError(AllocError, TypeError):
    """An argument has the wrong type."""


def check_kind(value: object, kind: type | tuple[type, ...], rule: str) -> None:
    """Raise AllocTypeError with the `rule` that is broken unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise AllocTypeError(f"{rule}, got the {type(value).__name__} {value!r}")


@final
class ConfigError(AllocValueError):
    """A configuration value, or the text of `GPU_ALLOC_CONF`, cannot be used."""


@final
class InvalidFreeError(AllocValueError):
    """A pointer was freed that this allocator did not hand out, or that was freed before."""


@final
class ReentrantMallocError(AllocError, RuntimeError):
    """A finalizer or hook asked for memory while the same thread was inside the allocator."""


@final
class ClosedError(AllocError, RuntimeError):
    """Memory was asked from an allocator after `close()`."""


@final
class TraceError(AllocValueError):
    """A trace file or a sequence of trace events contradicts itself or the format."""


@final
class CudaVersionWarning(UserWarning):
    """cupy and torch are built for different CUDA major versions."""


@final
class IgnoredSettingWarning(UserWarning):
    """A setting has no effect beside the others that were given."""
