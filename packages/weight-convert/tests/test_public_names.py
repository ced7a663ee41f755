import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weight_convert


def test_the_stub_names_what_the_package_offers() -> None:
    stub = ast.parse(Path(weight_convert.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    listed: list[str] = []
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    expected = {
        name: f"weight_convert.{module}" for name, module in weight_convert._MODULE_OF.items()
    }
    assert imported == expected
    assert sorted(listed) == sorted(weight_convert.__all__) == sorted(expected)


@pytest.mark.parametrize("name", weight_convert.__all__)
def test_each_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(weight_convert, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'weight_convert' has no attribute 'convrt'"):
        weight_convert.convrt  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, weight_convert; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_converting_imports_neither_torch_nor_safetensors_nor_numpy() -> None:
    code = (
        "import sys, weight_convert\n"
        "for name in weight_convert.__all__: getattr(weight_convert, name)\n"
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
