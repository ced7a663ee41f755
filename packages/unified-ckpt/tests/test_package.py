from pathlib import Path

import unified_ckpt
from package_facts import (
    Wrong,
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)

FOLDER = Path(__file__).parents[1]
README = FOLDER / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(unified_ckpt)
    check_name_table(unified_ckpt, README)
    check_tour(unified_ckpt, README)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(unified_ckpt, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_pages_run() -> None:
    assert run_examples(README) > 0
    assert run_examples(FOLDER / "ARCHITECTURE.md") > 0


def test_a_wrong_type_is_an_error_of_this_package() -> None:
    given = {
        "AsyncSaver": {"config": Wrong()},
        "AsyncSaverConfig": {"num_buffers": Wrong()},
        "LoadOptions": {"ignored_keys": Wrong()},
        "ManagerOptions": {"save_steps": Wrong()},
        "SaveOptions": {"tied": Wrong()},
    }
    assert check_wrong_types(unified_ckpt, unified_ckpt.CheckpointError, given=given) == 23
