import re
from dataclasses import fields
from pathlib import Path

import pytest

import gpu_alloc
from gpu_alloc import AddressSource, AllocatorConfig, AllocError, Snapshot, TwoPoolAllocator
from gpu_alloc.errors import AllocTypeError
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


def test_the_readme_has_a_line_for_each_file_and_a_row_for_each_name() -> None:
    check_tour(gpu_alloc, README)
    check_name_table(gpu_alloc, README)


@pytest.mark.parametrize("config", [Wrong(), AllocatorConfig()], ids=["all wrong", "config right"])
def test_arguments_of_a_wrong_type_are_named_by_an_error_of_the_package(config: object) -> None:
    called = check_wrong_types(
        gpu_alloc,
        AllocError,
        given={
            "AddressSource": {"capacity_bytes": Wrong()},
            "AllocatorConfig": {"alignment_size": Wrong()},
            "HostSource": {"capacity_bytes": Wrong()},
            "minimal_capacity": {"config": config},
            "replay": {"config": config},
        },
        not_called=["ChunkSource"],  # a base class, whose constructor takes nothing
    )
    assert called == 14


@pytest.mark.parametrize(
    "call",
    [
        lambda: TwoPoolAllocator(AddressSource(), Wrong()),
        lambda: TwoPoolAllocator(AddressSource()).malloc(Wrong()),
        lambda: TwoPoolAllocator(AddressSource()).free(Wrong()),
        lambda: TwoPoolAllocator(AddressSource()).set_limit(Wrong()),
        lambda: AddressSource(granularity_bytes=Wrong()),
        lambda: Snapshot(alignment_size=512, chunks=(), free_entries=Wrong()),
        lambda: gpu_alloc.replay([Wrong()], AllocatorConfig()),
        lambda: gpu_alloc.replay([], AllocatorConfig(), Wrong()),
        lambda: gpu_alloc.minimal_capacity([], AllocatorConfig(), resolution_bytes=Wrong()),
        lambda: gpu_alloc.save_trace([], Wrong()),
    ],
)
def test_each_argument_of_a_wrong_type_is_named(call) -> None:
    with pytest.raises(AllocTypeError, match="Wrong"):
        call()


def test_a_trace_with_something_else_in_it_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AllocTypeError, match="TraceEvents"):
        gpu_alloc.save_trace([Wrong()], tmp_path / "trace.jsonl")
    assert list(tmp_path.iterdir()) == []
