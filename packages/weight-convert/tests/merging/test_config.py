from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import WeightConvertError, WeightConvertTypeError
from weight_convert.merging import MergeConfig, MergeModel, Slice, read_config
from weight_convert.merging.config import amount_at

TEXT = """
method = "ties"
base = "base"
remove_keys = ["model.mtp.*"]
scale = 0.7

[[models]]
path = "code"
weight = 0.6
density = 0.5

[[models]]
path = "/else/math"
weight = [0.2, 0.8]
density = { "*.mlp.*" = 0.3, "*" = 0.6 }
"""


def test_a_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "ties.toml").write_text(TEXT)
    config = read_config(tmp_path / "ties.toml")
    assert config == MergeConfig(
        method="ties",
        base=str(tmp_path / "base"),
        remove_keys=("model.mtp.*",),
        scale=0.7,
        models=(
            MergeModel(path=str(tmp_path / "code"), weight=0.6, density=0.5),
            MergeModel(path="/else/math", weight=(0.2, 0.8), density={"*.mlp.*": 0.3, "*": 0.6}),
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method = ", "is not TOML"),
        ("method = 'sum'", "method='sum'; expected one of linear"),
        ("method = 'linear'", "linear takes 1 or more models, got 0"),
        ("method = 'linear'\nbase = 'a'\n[[models]]\npath = 'b'", "linear takes no base"),
        ("method = 'ties'\n[[models]]\npath = 'b'", "ties needs a base"),
        ("method = 'slerp'\n[[models]]\npath = 'b'", "slerp takes 2 models, got 1"),
        ("method = 'passthrough'", "slices belong to the method passthrough"),
        ("method = 'linear'\nlambda = 1", "unknown key 'lambda'; known: base, dtype"),
        ("method = 'linear'\n[[models]]\nweight = 1", "missing 1 required keyword"),
        ("method = 'linear'\n[[models]]\npath = 'b'\nweight = 'x'", "weight has a wrong type"),
        ("method = 'linear'\ndtype = 'int8'\n[[models]]\npath = 'b'", "dtype 'int8'"),
        ("method = 'slerp'\nt = nan\n", "t is nan; expected a finite number"),
        ("method = 'breadcrumbs'\ngamma = 1.5", "gamma is 1.5; expected 0 to 1"),
        ("method = 'della'\nepsilon = -0.1", "epsilon is -0.1; expected 0 to 1"),
        ("method = 'linear'\n[[models]]\npath = 'b'\nweight = [1, inf]", "expected a finite"),
        ("method = 'linear'\nnormalize = 'no'\n[[models]]\npath = 'b'", "normalize has a wrong"),
        ("method = 'linear'\nseed = 1.5\n[[models]]\npath = 'b'", "seed has a wrong type"),
        ("method = 'linear'\nremove_keys = 'x'\n[[models]]\npath = 'b'", "remove_keys has a wr"),
        ("method = 'linear'\nremove_keys = [3]\n[[models]]\npath = 'b'", "values of type str"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(WeightConvertError, match=message) as caught:
        read_config(tmp_path / "x.toml")
    assert str(caught.value).count(str(tmp_path / "x.toml")) == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightConvertError, match=r"nope\.toml does not exist; give the TOML file"):
        read_config(tmp_path / "nope.toml")


def test_layers_of_a_slice_must_be_some() -> None:
    with pytest.raises(WeightConvertError, match="expected 0 <= begin < end"):
        Slice(path="a", begin=2, end=2)


def test_an_amount_is_interpolated_or_the_first_pattern_that_matches() -> None:
    assert [amount_at((0.0, 1.0, 5.0), "x", place, "t") for place in (0, 0.25, 0.75, 1)] == [
        0.0,
        0.5,
        3.0,
        5.0,
    ]
    assert amount_at({"a*": 1.0, "*": 2.0}, "ab", 0.5, "t") == 1.0
    assert amount_at(3, "x", 0.1, "t") == 3.0


def test_whole_numbers_are_amounts_and_a_value_of_another_type_is_named() -> None:
    models = (MergeModel(path="a", weight=1, density=1),)
    assert MergeConfig(method="ties", base="b", models=models, scale=2).scale == 2
    for wrong in ({"scale": "2"}, {"models": ("a",)}, {"epsilon": (0.1,)}, {"normalize": "no"}):
        with pytest.raises(WeightConvertTypeError, match=next(iter(wrong))):
            MergeConfig(**{"method": "ties", "base": "b", "models": models} | wrong)  # type: ignore[arg-type]
    with pytest.raises(WeightConvertTypeError, match="path has a wrong type"):
        MergeModel(path=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "options", "of_model"),
    [
        ("linear", {"scale": 2.0}, {}),
        ("linear", {"t": 0.1}, {}),
        ("ties", {"seed": 3}, {}),
        ("ties", {"gamma": 0.2}, {}),
        ("dare_ties", {"epsilon": 0.2}, {}),
        ("model_stock", {"scale": 0.5}, {}),
        ("model_stock", {"normalize": True}, {}),
        ("slerp", {}, {"weight": 0.3}),
        ("linear", {}, {"density": 0.3}),
        ("task_arithmetic", {}, {"density": {"*": 0.3}}),
    ],
)
def test_an_option_that_the_method_does_not_read_is_refused(
    method: str, options: Any, of_model: Any
) -> None:
    base = {} if method in ("linear", "slerp") else {"base": "b"}
    models = (MergeModel(path="a"), MergeModel(path="c", **of_model))
    (name,) = options or of_model
    with pytest.raises(WeightConvertError, match=f"^{name}=.* has no effect on {method}; leave it"):
        MergeConfig(method=method, models=models, **base, **options)
