"""What each option may be; messages name it, what was given and what is expected."""

import math
from typing import Any

import pytest

from moe_train.generation.options import GenerationOptions


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_new_tokens", 0, ValueError),
        ("max_new_tokens", 1.5, TypeError),
        ("temperature", -1.0, ValueError),
        ("temperature", math.inf, ValueError),
        ("temperature", 1e-40, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", "hot", TypeError),
        ("top_k", -1, ValueError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("min_p", -0.1, ValueError),
        ("repetition_penalty", 0, ValueError),
        ("repetition_penalty", 1e-40, ValueError),
        ("repetition_penalty", 1e40, ValueError),
        ("seed", -1, ValueError),
        ("seed", True, TypeError),
        ("num_return_sequences", 0, ValueError),
        ("stop", "ab", ValueError),
        ("stop", ("a", ""), ValueError),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"^{name}=.*; expected "):
        GenerationOptions(**{name: value})


def test_limits_themselves_are_taken_and_lists_become_tuples() -> None:
    options = GenerationOptions(top_p=1, min_p=1, temperature=0, stop=["a", "b"])  # type: ignore[arg-type]
    assert options.stop == ("a", "b")
