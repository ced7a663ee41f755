"""A test file of a package as a module, for benchmarks that run its code with large counts.

damage = load_test("unified-ckpt", "test_damage")
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = Path(__file__).parents[1] / "packages"


def load_test(package: str, name: str) -> ModuleType:
    """Import a test file of a package by its path without `.py`, "schedules/test_planner"."""
    file = PACKAGES / package / "tests" / f"{name}.py"
    module_name = f"{package}_{name}".replace("-", "_").replace("/", "_")
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
