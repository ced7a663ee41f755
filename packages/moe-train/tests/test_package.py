from pathlib import Path

import moe_train
from moe_train import MoeTrainError
from package_facts import (
    Wrong,
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(moe_train)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(moe_train, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_the_readme_has_a_line_for_each_room_and_a_row_for_each_name() -> None:
    check_tour(moe_train, README)
    check_name_table(moe_train, README)


def test_arguments_of_a_wrong_type_are_named_by_an_error_of_the_package() -> None:
    given = {"GenerationOptions": {"temperature": Wrong()}}
    assert check_wrong_types(moe_train, MoeTrainError, given=given) == 16
