"""Dtypes under torch's names, as users give them and `config.json` has them; what takes fp8.

stored_dtype("bfloat16")      # "BF16", as safetensors calls it
"""

from collections.abc import Mapping, Sequence

from weight_convert._checks import check_kind
from weight_convert.errors import WeightConvertError

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_STORED: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
TORCH_NAMES = tuple(_STORED)
MAMBA = ".mamba."  # reads its matrices itself, not by linear layers, so that it cannot know scales
_LEFT_PLAIN = (".eh_proj.weight", "bias")  # as DeepSeek leaves them


def stored_dtype(name: str) -> str:
    """The safetensors name of a dtype.

    Raises:
        WeightConvertError: weights are not kept in it.
    """
    check_kind(name, str, "a dtype must be a string such as 'bfloat16'")
    if name not in _STORED:
        raise WeightConvertError(f"dtype {name!r}; expected one of {', '.join(_STORED)}")
    return _STORED[name]


def takes_fp8(name: str, role: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix that is stored in fp8: of a layer, but no router and no bias.

    Args:
        name: its name in memory, or the template of that.
        role: by the family's spec; of "norm" some are matrices.
        shape: of it.
    """
    is_matrix = len(shape) > 1 and role in ("column", "row", "kv", "norm")
    return is_matrix and MAMBA not in name and not name.endswith(_LEFT_PLAIN)
