import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unified_ckpt


def test_the_stub_names_what_the_package_offers() -> None:
    stub = ast.parse(Path(unified_ckpt.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    listed: list[str] = []
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    expected = {name: f"unified_ckpt.{module}" for name, module in unified_ckpt._MODULE_OF.items()}
    assert imported == expected
    assert sorted(listed) == sorted(unified_ckpt.__all__) == sorted(expected)


@pytest.mark.parametrize("name", unified_ckpt.__all__)
def test_each_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(unified_ckpt, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'unified_ckpt' has no attribute 'saev'"):
        unified_ckpt.saev  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, unified_ckpt; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
