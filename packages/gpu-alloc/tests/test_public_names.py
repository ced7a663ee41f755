import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_alloc


def test_the_stub_names_what_the_package_offers() -> None:
    stub = ast.parse(Path(gpu_alloc.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    listed: list[str] = []
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    expected = {name: f"gpu_alloc.{module}" for name, module in gpu_alloc._MODULE_OF.items()}
    assert imported == expected
    assert sorted(listed) == sorted(gpu_alloc.__all__) == sorted(expected)


@pytest.mark.parametrize("name", gpu_alloc.__all__)
def test_each_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(gpu_alloc, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'gpu_alloc' has no attribute 'AllocatorConfigs'"):
        gpu_alloc.AllocatorConfigs  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, gpu_alloc; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
