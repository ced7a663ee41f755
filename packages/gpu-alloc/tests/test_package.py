import re
from dataclasses import fields
from pathlib import Path

import gpu_alloc
from package_facts import check_import_is_cheap, check_names, run_examples

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(gpu_alloc)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(gpu_alloc, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_the_configuration_table_names_every_key() -> None:
    text = README.read_text(encoding="utf-8")
    rows = dict(re.findall(r"\| `(\w+)` \| (\w+) \|", text))
    defaults = {f.name: str(f.default).lower() for f in fields(gpu_alloc.AllocatorConfig)}
    assert {key: rows.get(key) for key in defaults} == defaults
