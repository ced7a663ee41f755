from pathlib import Path

import moe_pipeline
from package_facts import check_import_is_cheap, check_names, run_examples

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(moe_pipeline)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(moe_pipeline, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0
