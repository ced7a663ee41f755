"""Dtypes under torch's names, as users give them and `config.json` has them.

stored_dtype("bfloat16")      # "BF16", as safetensors calls it
"""

from collections.abc import Mapping

from weight_convert._checks import check_kind
from weight_convert.errors import WeightConvertError

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_STORED: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
TORCH_NAMES = tuple(_STORED)


def stored_dtype(name: str) -> str:
    """The safetensors name of a dtype.

    Raises:
        WeightConvertError: weights are not kept in it.
    """
    check_kind(name, str, "a dtype must be a string such as 'bfloat16'")
    if name not in _STORED:
        raise WeightConvertError(f"dtype {name!r}; expected one of {', '.join(_STORED)}")
    return _STORED[name]
