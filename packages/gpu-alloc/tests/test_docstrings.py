import doctest
import pkgutil
from importlib import import_module

import pytest

import gpu_alloc

MODULES = [f"gpu_alloc.{module.name}" for module in pkgutil.iter_modules(gpu_alloc.__path__)]


@pytest.mark.parametrize("name", ["gpu_alloc", *MODULES])
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
