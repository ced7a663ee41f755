"""The errors of this package: one `except AllocError` catches whatever it raises on purpose.

Invariant: a wrong argument is also a `ValueError` or a `TypeError`, a call at the wrong time also a
`RuntimeError`, and running out of memory (`oom.py`) also a `MemoryError`. So code that knows
nothing of this package handles them as usual.

>>> issubclass(ConfigError, ValueError)
True
"""

import operator
from typing import NoReturn, final


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


def whole_number(value: object, rule: str) -> int:
    """`value` as an integer. Raises AllocTypeError with the `rule` for what is none."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # which is what is asked
    except TypeError:
        raise AllocTypeError(f"{rule}, got {value!r}") from None


def stream_number(stream: object) -> int:
    """The integer that names a stream. Raises AllocTypeError for what is none."""
    return whole_number(stream, "a stream is named by a whole number")


def check_limit(limit_bytes: int) -> None:
    """Raise AllocTypeError or AllocValueError unless this is a number of bytes, 0 or more."""
    check_kind(limit_bytes, int, "limit_bytes must be a whole number")
    if limit_bytes < 0:
        raise AllocValueError(
            f"limit_bytes={limit_bytes} is negative; give bytes, or 0 for no limit"
        )


@final
class ConfigError(AllocValueError):
    """A configuration value, or the text of `GPU_ALLOC_CONF`, cannot be used."""


@final
class InvalidFreeError(AllocValueError):
    """A pointer was freed that this allocator did not hand out, or that was freed before."""


def refuse_free(ptr: object) -> NoReturn:
    """Raise InvalidFreeError for an address that is not allocated, AllocTypeError for none."""
    check_kind(ptr, int, "free takes the address that malloc returned")
    raise InvalidFreeError(
        f"free of {ptr:#x}, which is not allocated here; it was freed before, or belongs to "
        "another allocator"
    )


@final
class ReentrantMallocError(AllocError, RuntimeError):
    """A finalizer or hook asked for memory while the same thread was inside the allocator."""


def refuse_reentry() -> NoReturn:
    """Raise ReentrantMallocError."""
    raise ReentrantMallocError(
        "the allocator was called from a finalizer or hook that runs inside it; only free() may "
        "be called there"
    )


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
