import ast
from pathlib import Path

from gates.source import Problem
from run_gates import only
from workspace import ROOT, Package


def test_every_gate_is_run() -> None:
    gates = {
        node.name
        for file in (ROOT / "scripts" / "gates").glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    }
    program = ast.parse((ROOT / "scripts" / "run_gates.py").read_text())
    calls = [node.func for node in ast.walk(program) if isinstance(node, ast.Call)]
    run = {function.id for function in calls if isinstance(function, ast.Name)}
    assert len(gates) > 15
    assert gates - run == set()


def test_one_package_is_told_what_stands_in_its_files_or_names_them() -> None:
    package = Package(name="a-b", version="0.1.0", folder=Path("r/packages/a-b"), siblings=())
    own = Problem(path="packages/a-b/src/a_b/m.py", line=1, message="too long")
    named = Problem(path="pyproject.toml", line=1, message="no floors (packages/a-b/)")
    other = Problem(path="packages/a/src/a/m.py", line=1, message="too long")
    found = only({"x": [own, other], "y": [named]}, package, root=Path("r"))
    assert found == {"x": [own], "y": [named]}
