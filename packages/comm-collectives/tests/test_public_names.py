"""The public names: lazy, complete, and the same for type checkers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import comm_collectives


def test_stub_and_package_list_the_same_names() -> None:
    stub = Path(comm_collectives.__file__).with_suffix(".pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imported = {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == set(comm_collectives.__all__)
    listed = next(n.value for n in tree.body if isinstance(n, ast.Assign))
    assert ast.literal_eval(listed) == comm_collectives.__all__


def test_every_name_resolves_and_says_what_it_is() -> None:
    for name in comm_collectives.__all__:
        assert getattr(comm_collectives, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        comm_collectives.nothing  # noqa: B018


def test_import_does_not_import_torch() -> None:
    code = "import comm_collectives, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
