import pytest

import gpu_alloc.errors
from gpu_alloc import AllocError


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("AllocValueError", ValueError),
        ("AllocTypeError", TypeError),
        ("ConfigError", ValueError),
        ("InvalidFreeError", ValueError),
        ("TraceError", ValueError),
        ("OutOfMemoryError", MemoryError),
        ("ReentrantMallocError", RuntimeError),
        ("ClosedError", RuntimeError),
    ],
)
def test_each_error_is_ours_and_a_builtin_one(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(gpu_alloc.errors, name), (AllocError,))
    assert issubclass(getattr(gpu_alloc.errors, name), builtin)
