"""An import of a sibling that is not declared must fail, in the source and in the wheel."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from check_install import problems
from workspace import ROOT, read_packages

PACKAGES = [p.import_name for p in read_packages()]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
# Of each package with a contract of floors: its name and its floors, from the top down.
FLOORS = {
    contract["containers"][0]: [re.split(r"[\s|:()]+", floor.strip("() "))[0] for floor in floors]
    for contract in SETTINGS["contracts"]
    if (floors := contract.get("layers")) and "containers" in contract
}


def lint_imports(folder: Path, imports: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run our contracts over packages of empty rooms with the imports given (module -> text)."""
    rooms = [
        f"{contract['containers'][0]}.{room}"
        for contract in SETTINGS["contracts"]
        if "containers" in contract
        for room in re.findall(r"\w+", " ".join(contract["layers"]))
    ]
    for name in (*PACKAGES, *rooms):
        (folder / name.replace(".", "/")).mkdir(exist_ok=True)
        (folder / name.replace(".", "/") / "__init__.py").write_text("")
    for module, statement in imports.items():
        file = (folder / module.replace(".", "/")).with_suffix(".py")
        if file.with_suffix("").is_dir():
            file = file.with_suffix("") / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(statement)
    contracts = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(contracts[contracts.index("[tool.importlinter]") :])
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_declared_edges_keep_the_contracts(tmp_path: Path) -> None:
    done = lint_imports(
        tmp_path,
        {
            "moe_pipeline.layer.moe_layer": "import comm_collectives",
            "moe_train.training.build": "import mesh_spmd, gpu_alloc, moe_pipeline, unified_ckpt",
            "gpu_alloc.sources.cuda": "import cupy",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("mesh_spmd.mesh", "import comm_collectives"),
        ("unified_ckpt.plan", "def f():\n    from mesh_spmd import Box"),
        ("weight_convert.rules", "import unified_ckpt"),
        ("moe_pipeline.layer.moe_layer", "import unified_ckpt"),
        ("moe_pipeline.schedules", "import moe_train"),
        ("weight_convert.stream", "import torch"),
        ("gpu_alloc.core.pool", "import cupy"),
        ("moe_train.memory", "import cupy"),
        ("mesh_spmd.rules", "import transformers"),
    ],
)
def test_an_edge_that_is_not_allowed_breaks_a_contract(
    tmp_path: Path, module: str, statement: str
) -> None:
    done = lint_imports(tmp_path, {module: statement})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_an_import_from_a_floor_above_breaks_a_contract(tmp_path: Path, package: str) -> None:
    top, *_, base = FLOORS[package]
    reaching_up = {f"{package}.{base}": f"def f():\n    from {package}.{top} import x\n"}
    done = lint_imports(tmp_path, reaching_up)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"of {package} BROKEN" in done.stdout


def test_the_contracts_name_every_package() -> None:
    assert sorted(SETTINGS["root_packages"]) == PACKAGES
    assert set(FLOORS) <= set(PACKAGES)


def test_a_package_from_a_source_tree_is_not_taken_for_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from_source.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (message,) = problems(["from_source"], [])
    assert "not from a wheel" in message


def test_an_importable_sibling_that_is_not_declared_is_found() -> None:
    (message,) = problems(["pytest"], ["numpy"])
    assert "numpy is importable" in message and "without being declared" in message


def test_a_package_that_is_not_installed_is_found() -> None:
    assert problems(["no_such_package"], []) == ["no_such_package is not installed"]


def test_an_installed_package_alone_is_accepted() -> None:
    assert Path(sysconfig.get_path("purelib"), "pytest").is_dir()
    assert problems(["pytest"], ["no_such_package"]) == []
