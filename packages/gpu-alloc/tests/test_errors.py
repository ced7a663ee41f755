import pytest

import gpu_alloc.errors
from gpu_alloc import AllocError, OutOfMemoryError


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("AllocValueError", ValueError),
        ("AllocTypeError", TypeError),
        ("ConfigError", ValueError),
        ("InvalidFreeError", ValueError),
        ("TraceError", ValueError),
        ("ReentrantMallocError", RuntimeError),
        ("ClosedError", RuntimeError),
    ],
)
def test_each_error_is_ours_and_a_builtin_one(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(gpu_alloc.errors, name), (AllocError,))
    assert issubclass(getattr(gpu_alloc.errors, name), builtin)


def test_running_out_of_memory_is_an_error_of_ours_and_a_memory_error() -> None:
    assert issubclass(OutOfMemoryError, AllocError)
    assert issubclass(OutOfMemoryError, MemoryError)
