import subprocess
import sys
from pathlib import Path

import pytest

import weight_convert
from package_facts import (
    Wrong,
    check_import_is_cheap,
    check_name_table,
    check_names,
    check_tour,
    check_wrong_types,
    run_examples,
)
from weight_convert import (
    ConversionOptions,
    StoredView,
    WeightConvertError,
    convert,
    get_spec,
    verify,
)
from weight_convert.errors import WeightConvertTypeError

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_resolves_and_is_documented() -> None:
    check_names(weight_convert)


def test_importing_the_package_imports_nothing_heavy() -> None:
    check_import_is_cheap(weight_convert, "torch", "numpy", "tokenizers", "rich", "matplotlib")


def test_the_examples_of_the_pages_run() -> None:
    assert run_examples(README) > 0
    assert run_examples(README.with_name("ARCHITECTURE.md")) > 0


def test_converting_imports_neither_torch_nor_safetensors_nor_numpy() -> None:
    code = (
        "import sys, weight_convert\n"
        "for name in weight_convert.__all__: getattr(weight_convert, name)\n"
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_readme_has_a_line_for_each_file_and_a_row_for_each_name() -> None:
    check_tour(weight_convert, README)
    check_name_table(weight_convert, README)


def test_arguments_of_a_wrong_type_are_named_by_an_error_of_the_package() -> None:
    assert (
        check_wrong_types(
            weight_convert,
            WeightConvertError,
            not_called={"ConversionOptions", "OutputOptions", "MergeConfig", "MergeModel"},
        )
        == 19
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda path: convert(path, Wrong(), spec=get_spec("qwen3_moe"), to="fused"),
        lambda path: convert(path, path / "b", spec=Wrong(), to="fused"),
        lambda path: ConversionOptions(max_shard_bytes=Wrong()),
        lambda path: verify(path, path, spec=Wrong()),
        lambda path: weight_convert.inspect(path, spec=Wrong()),
        lambda path: convert(path, path / "b", to="fused", options=Wrong()),
        lambda path: get_spec("qwen3_moe").stored_views("model.norm.weight", Wrong()),
        lambda path: get_spec("qwen3_moe").format(Wrong()),
    ],
)
def test_each_argument_of_a_wrong_type_is_named(call, tmp_path: Path) -> None:
    with pytest.raises(WeightConvertTypeError):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_names_the_field_that_has_a_wrong_type() -> None:
    with pytest.raises(WeightConvertTypeError, match="stored_shape has a wrong type, got the list"):
        StoredView(key="a", offset=(0,), shape=(1,), stored_shape=[1])
