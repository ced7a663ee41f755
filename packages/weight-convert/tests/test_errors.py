import pytest

from weight_convert import errors


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_is_caught_by_the_base_class_and_as_a_value_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.WeightConvertError)
    assert issubclass(getattr(errors, name), ValueError)


def test_a_wrong_type_is_a_type_error_as_well() -> None:
    assert issubclass(errors.WeightConvertTypeError, TypeError)
