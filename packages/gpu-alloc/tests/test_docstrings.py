import doctest
import pkgutil
from importlib import import_module
from importlib.util import find_spec

import pytest

import gpu_alloc

# The rooms of libraries that are not there; the seams run these tests where all are.
ABSENT = {room for room in ("cupy", "torch") if find_spec(room) is None}
FOUND = pkgutil.walk_packages(gpu_alloc.__path__, "gpu_alloc.")
MODULES = [module.name for module in FOUND if module.name.split(".")[1] not in ABSENT]


@pytest.mark.parametrize("name", ["gpu_alloc", *MODULES])
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
