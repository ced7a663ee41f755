import subprocess
import sys
from pathlib import Path

import weight_convert
from package_facts import check_import_is_cheap, check_names, run_examples

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(weight_convert)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(weight_convert, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_converting_imports_neither_torch_nor_safetensors_nor_numpy() -> None:
    code = (
        "import sys, weight_convert\n"
        "for name in weight_convert.__all__: getattr(weight_convert, name)\n"
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
