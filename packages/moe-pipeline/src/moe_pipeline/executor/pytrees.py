"""Pytrees of tensors, flattened to a list of tensors and a structure that JSON can write.

What a stage hands to the next may be a tuple of tensors or anything built of dicts, lists, tuples,
namedtuples, tensors, None and plain numbers and strings. Only the tensors travel as tensors; the
structure says where they belong. A namedtuple is found again by name among the modules that are
already imported, so that receiving one imports and runs nothing.

    structure, tensors = flatten(({"x": x}, None))
    assert unflatten(structure, tensors) == ({"x": x}, None)
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from moe_pipeline.errors import MoETypeError

# A tensor is its number, None stands for itself, all else is a list that begins with what it is.
Structure = int | None | list[Any]
_PLAIN = (bool, int, float, str)


def flatten(tree: object) -> tuple[Structure, list[Tensor]]:
    """The structure of a tree and its tensors, in order."""
    tensors: list[Tensor] = []
    return _structure(tree, tensors, ""), tensors


def unflatten(structure: Structure, tensors: Sequence[Any]) -> Any:
    """The tree of a structure, with `tensors` in the places that `flatten` found them in."""
    if structure is None or isinstance(structure, int):
        return None if structure is None else tensors[structure]
    kind = structure[0]
    if kind == "v":
        return structure[1]
    if kind == "d":
        keys, values = structure[1], structure[2:]
        return {k: unflatten(v, tensors) for k, v in zip(keys, values, strict=True)}
    if kind == "n":
        return _named_tuple(structure[1], structure[2])(
            *(unflatten(v, tensors) for v in structure[3:])
        )
    items = [unflatten(item, tensors) for item in structure[1:]]
    return items if kind == "l" else tuple(items)


def map_tensors(function: Callable[[Tensor], object], tree: object) -> Any:
    """The same tree with `function` of each tensor."""
    structure, tensors = flatten(tree)
    return unflatten(structure, [function(tensor) for tensor in tensors])


def _structure(tree: object, tensors: list[Tensor], path: str) -> Structure:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return len(tensors) - 1
    if tree is None:
        return None
    if type(tree) in _PLAIN:
        return ["v", tree]
    if type(tree) is dict:
        if not all(type(key) in (str, int) for key in tree):
            raise MoETypeError(f"the dict at {path or 'the top'} has keys that are not str or int")
        values = [_structure(value, tensors, f"{path}[{key!r}]") for key, value in tree.items()]
        return ["d", list(tree), *values]
    if isinstance(tree, (list, tuple)):
        items = [_structure(item, tensors, f"{path}[{i}]") for i, item in enumerate(tree)]
        if type(tree) in (list, tuple):
            return ["l" if type(tree) is list else "t", *items]
        if isinstance(tree, tuple) and hasattr(type(tree), "_fields"):
            return ["n", type(tree).__module__, type(tree).__qualname__, *items]
    raise MoETypeError(
        f"{type(tree).__name__} at {path or 'the top'} cannot go from stage to stage; expected "
        "tensors, None, numbers and strings, in tuples, lists, dicts or namedtuples"
    )


@functools.cache
def _named_tuple(module: str, name: str) -> Callable[..., object]:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise MoETypeError(
            f"a stage sent a namedtuple {module}.{name}, which is not known in this process; "
            "define it at the top of a module that every rank imports"
        )
    return found
