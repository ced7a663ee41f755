"""The face: what every public name promises, and what the README shows."""

from pathlib import Path

import comm_collectives
from package_facts import (
    Wrong,
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)
from ranktest import run_ranks

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(comm_collectives)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(comm_collectives, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_the_readme_has_a_line_for_each_room_and_each_public_name() -> None:
    check_tour(comm_collectives, README)
    check_name_table(comm_collectives, README)


def test_wrong_types_are_errors_of_this_package_with_a_group_and_without() -> None:
    def fn(rank: int, world_size: int) -> int:
        # A Handle is made by the calls; the three errors are not called either.
        return check_wrong_types(
            comm_collectives,
            comm_collectives.CommError,
            given={"AgreementPolicy": {"every": Wrong()}, "MoeOptions": {"route": Wrong()}},
            not_called=["Handle"],
        )

    assert run_ranks(fn, 1) == [len(comm_collectives.__all__) - 4]
    assert fn(0, 1) == len(comm_collectives.__all__) - 4
