import ast
import subprocess
import sys
from pathlib import Path

import moe_train


def test_stub_names_what_the_package_exports() -> None:
    stub = Path(str(moe_train.__file__)).with_suffix(".pyi")
    tree = ast.parse(stub.read_text())
    imported = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    expected = {name: f"moe_train.{module}" for name, module in moe_train._MODULE_OF.items()}
    assert imported == expected
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(assigned[0].value)) == sorted(moe_train.__all__)


def test_every_public_name_resolves() -> None:
    for name in moe_train.__all__:
        assert getattr(moe_train, name).__module__.startswith("moe_train."), name


def test_import_is_cheap() -> None:
    code = "import moe_train, sys; print([m for m in ('torch', 'numpy', 'tokenizers', 'rich', "
    code += "'matplotlib', 'tensorboard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
