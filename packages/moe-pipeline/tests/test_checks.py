import pytest

from moe_pipeline._checks import check_count, check_finite, check_type
from moe_pipeline.errors import MoEPipelineError, MoETypeError, MoEValueError


def test_each_check_names_the_argument_and_what_it_got():
    with pytest.raises(MoETypeError, match=r"x must be a tuple or list \(of y\), got a str"):
        check_type("x", "y", tuple, list, hint=" (of y)")
    for wrong in (True, 1.0, "1"):
        with pytest.raises(MoETypeError, match="n must be an int, got"):
            check_count("n", wrong)
    with pytest.raises(MoEValueError, match="n must be at least 0, got -1"):
        check_count("n", -1, 0)
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(MoEValueError, match="s must be finite and not negative"):
            check_finite("s", wrong)


def test_what_is_right_passes():
    check_type("x", (), tuple)
    check_count("n", 0, 0)
    check_finite("s", 0)


@pytest.mark.parametrize(
    ("error", "kind"), [(MoEValueError, ValueError), (MoETypeError, TypeError)]
)
def test_mistakes_of_a_user_are_errors_of_python_too(error, kind):
    assert issubclass(error, kind) and issubclass(error, MoEPipelineError)
