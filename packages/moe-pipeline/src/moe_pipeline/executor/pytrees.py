"""Nests of tensors, taken apart into a list of tensors and a form that JSON can write.

What a stage hands to the next may be a tuple of tensors or anything built of dicts, lists, tuples,
namedtuples, tensors, None and plain numbers and strings. Only the tensors travel as tensors; the
form says where they belong. A namedtuple is found again by name among the modules that are already
imported, so that receiving one imports and runs nothing.

    form, tensors = take_apart(({"x": x}, None))
    assert put_together(form, tensors) == ({"x": x}, None)
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# A tensor is its number, None stands for itself, all else is a list that begins with what it is.
Form = int | None | list[Any]
_PLAIN = (bool, int, float, str)


def take_apart(nest: object) -> tuple[Form, list[Tensor]]:
    """The form of a nest and its tensors, in order.

    Raises:
        TypeError: something in it is neither a tensor, None, a plain value nor a container of such;
            the message says where.
    """
    tensors: list[Tensor] = []
    return _form(nest, tensors, ""), tensors


def put_together(form: Form, tensors: Sequence[Any]) -> Any:
    """The nest of a form, with `tensors` in the places that `take_apart` found them in.

    Raises:
        TypeError: a namedtuple's class is not known in this process.
    """
    if form is None or isinstance(form, int):
        return None if form is None else tensors[form]
    kind = form[0]
    if kind == "v":
        return form[1]
    if kind == "d":
        keys, values = form[1], form[2:]
        return {k: put_together(v, tensors) for k, v in zip(keys, values, strict=True)}
    if kind == "n":
        return _named_tuple(form[1], form[2])(*(put_together(v, tensors) for v in form[3:]))
    items = [put_together(item, tensors) for item in form[1:]]
    return items if kind == "l" else tuple(items)


def map_tensors(function: Callable[[Tensor], object], nest: object) -> Any:
    """The same nest with `function` of each tensor."""
    form, tensors = take_apart(nest)
    return put_together(form, [function(tensor) for tensor in tensors])


def _form(nest: object, tensors: list[Tensor], path: str) -> Form:
    if isinstance(nest, Tensor):
        tensors.append(nest)
        return len(tensors) - 1
    if nest is None:
        return None
    if type(nest) in _PLAIN:
        return ["v", nest]
    if type(nest) is dict:
        if not all(type(key) in (str, int) for key in nest):
            raise TypeError(f"the dict at {path or 'the top'} has keys that are not str or int")
        values = [_form(value, tensors, f"{path}[{key!r}]") for key, value in nest.items()]
        return ["d", list(nest), *values]
    if isinstance(nest, (list, tuple)):
        items = [_form(item, tensors, f"{path}[{i}]") for i, item in enumerate(nest)]
        if type(nest) in (list, tuple):
            return ["l" if type(nest) is list else "t", *items]
        if isinstance(nest, tuple) and hasattr(type(nest), "_fields"):
            return ["n", type(nest).__module__, type(nest).__qualname__, *items]
    raise TypeError(
        f"{type(nest).__name__} at {path or 'the top'} cannot go from stage to stage; expected "
        "tensors, None, numbers and strings, in tuples, lists, dicts or namedtuples"
    )


@functools.cache
def _named_tuple(module: str, name: str) -> Callable[..., object]:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise TypeError(
            f"a stage sent a namedtuple {module}.{name}, which is not known in this process; "
            "define it at the top of a module that every rank imports"
        )
    return found
