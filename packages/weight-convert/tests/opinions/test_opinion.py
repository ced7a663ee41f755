from importlib.util import find_spec
from pathlib import Path

import pytest

from weight_convert import verify
from weight_convert.errors import WeightConvertError
from weight_convert.opinions.opinion import second_opinion


@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is here")
def test_without_transformers_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(WeightConvertError, match=r"pip install 'weight-convert\[logits\]'"):
        second_opinion(tmp_path, tmp_path, logits=True, quantised=False)


def test_another_level_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightConvertError, match="expected one of headers, bytes, values, logits"):
        verify(tmp_path, tmp_path, level="all")  # type: ignore[arg-type]
