from pathlib import Path

import moe_pipeline
from moe_pipeline import MoEPipelineError
from moe_pipeline.scoring import SCORE_FUNCTIONS
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
ARCHITECTURE = README.with_name("ARCHITECTURE.md")
# All of these have a default for every argument.
ONE_WRONG = {
    "ExecutorOptions": {"timeout_s": Wrong()},
    "ExpertsOptions": {"hidden_act": Wrong()},
    "MoEGroups": {"ep": Wrong()},
    "RouterLosses": {"router_aux_loss_coef": Wrong()},
    "RouterOptions": {"moe_input_jitter_eps": Wrong()},
    "StageOutput": {"tensors": Wrong()},
}


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(moe_pipeline)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(moe_pipeline, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_readme_run() -> None:
    assert run_examples(README) > 0


def test_the_examples_of_the_architecture_page_add_a_schedule_and_a_scoring_rule() -> None:
    try:
        assert run_examples(ARCHITECTURE) == 2
    finally:
        SCORE_FUNCTIONS.pop("exp", None)


def test_the_readme_has_a_line_for_each_room_and_names_what_is_public() -> None:
    check_tour(moe_pipeline, README)
    check_name_table(moe_pipeline, README)


def test_wrong_types_are_errors_of_the_package() -> None:
    assert check_wrong_types(moe_pipeline, MoEPipelineError, given=ONE_WRONG) == 22
