"""A `config.json` that changes with the tensors beside it.

carried, written = with_config(catalog, {"dtype": "bfloat16", "quantization_config": None})
"""

import json
from collections.abc import Mapping
from typing import Any

from weight_convert.files import CONFIG_NAME, Catalog

_FORMER_NAMES = {"dtype": "torch_dtype"}


def with_config(
    catalog: Catalog, changes: Mapping[str, Any]
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, bytes], ...]]:
    """The files to carry and to write when entries of `config.json` change.

    Args:
        catalog: the source; without a `config.json` it gets none.
        changes: new values by name; None removes the entry. `dtype` replaces `torch_dtype`, its
            former name, also where an entry for a part of the model has its own.
    """
    if not catalog.config or not changes:
        return catalog.carried, ()
    gone = {name for name, value in changes.items() if value is None}
    gone |= {old for name, old in _FORMER_NAMES.items() if name in changes}
    config = {name: value for name, value in catalog.config.items() if name not in gone}
    config |= {name: value for name, value in changes.items() if value is not None}
    if changes.get("dtype") is not None:
        config = {name: _in_dtype(value, changes["dtype"]) for name, value in config.items()}
    content = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    carried = tuple(entry for entry in catalog.carried if entry[0] != CONFIG_NAME)
    return carried, ((CONFIG_NAME, content),)


def _in_dtype(value: Any, dtype: str) -> Any:
    """An entry for a part of the model, such as `text_config`, with its dtype changed too."""
    if not isinstance(value, dict) or not {"dtype", "torch_dtype"} & value.keys():
        return value
    return {k: v for k, v in value.items() if k != "torch_dtype"} | {"dtype": dtype}
