"""Python values as JSON, and back with their types.

What JSON does not know is an object of one key that begins with `@` and says what it is: tuples,
sets, dicts whose keys are no strings, bytes, `BytesIO`, enums, numpy's scalars. Classes are named
`module:name`, and looked up among the modules that are imported, so that a file imports nothing.
Files of earlier versions tell only dicts of other keys; the state that is filled gives the types.

    decode_value(encode_value({(1, 2): {3}}, "grid"))  # {(1, 2): {3}}
"""

import base64
import binascii
import copy
import enum
import importlib
import io
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from unified_ckpt.errors import CheckpointTypeError, LoadError
from unified_ckpt.state.naming import Names

_ITEMS = "@items"
_PLAIN = (bool, int, float)
_SEQUENCES: dict[type, str] = {list: "@list", tuple: "@tuple", torch.Size: "@size"}
_SETS: dict[type, str] = {set: "@set", frozenset: "@frozenset"}
_DICTS: dict[type, str] = {dict: _ITEMS, OrderedDict: "@ordered", Counter: "@counter"}
_CLASS_OF = {mark: kind for kinds in (_SEQUENCES, _SETS, _DICTS) for kind, mark in kinds.items()}
_REMEDY = "convert it or leave it out (ignored_keys)"

Kind = tuple[str, Any]  # a container's mark, and what else its class needs


def is_array(value: object) -> bool:
    """Whether a value is numpy's array or scalar; there is none before numpy was imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def kind_of(value: object, path: str) -> Kind | None:
    """Return what a list, tuple, set or dict is made again from, None for what is none of them.

    Raises:
        CheckpointTypeError: of a class that cannot be made again.
    """
    kind = type(value)
    for known in (_SEQUENCES, _SETS, _DICTS):
        if kind in known:
            return known[kind], None
    if isinstance(value, deque) and kind is deque:
        return "@deque", value.maxlen
    if isinstance(value, defaultdict) and kind is defaultdict:
        factory = value.default_factory
        return "@defaultdict", None if factory is None else reference(factory, path)
    if isinstance(value, tuple) and hasattr(value, "_make") and hasattr(value, "_fields"):
        return "@namedtuple", reference(kind, path)
    if isinstance(value, list | tuple | Mapping | set | frozenset | deque):
        raise CheckpointTypeError(
            f"{path}: a {kind.__name__} cannot be made again by a load; {_REMEDY}"
        )
    return None


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a container by their key, or their place."""
    return list(value.items() if isinstance(value, Mapping) else enumerate(value))


def build(kind: Kind, items: Sequence[tuple[Any, Any]]) -> Any:
    """Undo `kind_of` and `items_of`."""
    mark, argument = kind
    if mark == "@deque":
        return deque((item for _, item in items), argument)
    if mark == "@defaultdict":
        factory: Any = None if argument is None else resolve(argument)
        return defaultdict(factory, items)
    if mark == "@namedtuple":
        made: Any = resolve(argument)
        if not issubclass(made, tuple) or made is tuple:
            raise LoadError(f"a value was saved as {argument}, which is no named tuple")
        return made._make(item for _, item in items)
    make: Any = _CLASS_OF.get(mark)
    if make is None:
        raise LoadError(f"a stored value is a {mark!r}, which this version does not know")
    return make(dict(items) if make in _DICTS else [item for _, item in items])


def reference(kind: Any, path: str) -> str:
    """Name a class as `module:name`, which `resolve` finds.

    Raises:
        CheckpointTypeError: it is not found there, because it was made in a function.
    """
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__qualname__", "")
    named = f"{module}:{name}"
    if _lookup(named) is not kind:
        raise CheckpointTypeError(
            f"{path}: {kind!r} is not found as {named}, so no load could make it again; move it "
            "to the top of its module, or convert it"
        )
    return named


def resolve(named: str) -> type[Any]:
    """Return the class that `reference` named.

    Raises:
        LoadError: its module is not imported, or has no such class.
    """
    found = _lookup(named)
    if not isinstance(found, type):
        raise LoadError(f"a value was saved as {named}, which is no class here; import its module")
    return found


def _lookup(named: str) -> Any:
    module, _, name = named.partition(":")
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, step, None)
    return found


def encode_value(value: Any, path: str) -> Any:
    """Return a value as JSON types.

    Raises:
        CheckpointTypeError: it cannot be made again; the message says what it is, and where.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) is str:
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise CheckpointTypeError(f"{path}: half a character, which is no text; {_REMEDY}")
        return value
    kind = kind_of(value, path)
    if kind is not None:
        return _encode_container(value, kind, path)
    for mark, classes, encode, _ in _ATOMS:
        if isinstance(value, classes):
            return {mark: encode(value, path)}
    if is_array(value):
        return {"@numpy": _encode_array(value, path)}
    raise CheckpointTypeError(
        f"{path}: a {type(value).__name__} is neither a tensor nor a value that a load can make "
        f"again (numbers, text, bytes, enums, numpy's, and collections of them); {_REMEDY}"
    )


def _encode_container(value: Any, kind: Kind, path: str) -> Any:
    mark, argument = kind
    items = [(name, encode_value(item, f"{path}.{name}")) for name, item in items_of(value)]
    if mark == "@list":
        return [item for _, item in items]
    if mark == _ITEMS and all(type(name) is str and name[:1] != "@" for name, _ in items):
        return dict(items)
    if isinstance(value, Mapping):
        content: list[Any] = [[encode_value(n, f"{path} key"), item] for n, item in items]
    else:
        content = [item for _, item in items]
    if isinstance(value, set | frozenset):  # in an order that all ranks have
        content.sort(key=json.dumps)
    return {mark: content if mark in _CLASS_OF else [argument, content]}


def decode_value(encoded: Any) -> Any:
    """Undo `encode_value`."""
    if isinstance(encoded, list):
        return [decode_value(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    mark = mark_of(encoded)
    if mark is None:
        return {name: decode_value(item) for name, item in encoded.items()}
    content = encoded[mark]
    for known, _, _, decode in _ATOMS:
        if mark == known:
            return decode(content)
    if mark == "@numpy":
        return _decode_array(content)
    argument, items = (None, content) if mark in _CLASS_OF else content
    if _CLASS_OF.get(mark) in _DICTS or mark == "@defaultdict":
        pairs = [(decode_value(name), decode_value(item)) for name, item in items]
    else:
        pairs = [(number, decode_value(item)) for number, item in enumerate(items)]
    return build((mark, argument), pairs)


def mark_of(encoded: Mapping[str, Any]) -> str | None:
    """Return which mark makes a JSON object stand for something else, None for a dict."""
    name = next(iter(encoded), "") if len(encoded) == 1 else ""
    return name if name.startswith("@") else None


def _encode_enum(value: enum.Enum, path: str) -> list[Any]:
    """A flag may be several members at once, which have a value but no name."""
    named = reference(type(value), path)
    return [named, value.value if isinstance(value, enum.Flag) else value.name]


def _decode_enum(content: Sequence[Any]) -> Any:
    kind: Any = resolve(content[0])
    if not issubclass(kind, enum.Enum):
        raise LoadError(f"a value was saved as a member of {content[0]}, which is no enum")
    try:
        return kind(content[1]) if issubclass(kind, enum.Flag) else kind[content[1]]
    except (KeyError, ValueError) as error:
        raise LoadError(f"{content[0]} has no member {content[1]!r}, which was saved") from error


def _encode_array(value: Any, path: str) -> list[Any]:
    odd = type(value) is not sys.modules["numpy"].ndarray and type(value) is not value.dtype.type
    if value.dtype.hasobject or value.dtype.kind == "V" or odd:
        raise CheckpointTypeError(
            f"{path}: a {type(value).__name__} of {value.dtype} cannot be made again; {_REMEDY}"
        )
    scalar = isinstance(value, sys.modules["numpy"].generic)
    return [value.dtype.str, None if scalar else list(value.shape), _to_text(value.tobytes())]


def _decode_array(content: Sequence[Any]) -> Any:
    dtype, shape, text = content
    numpy: Any = import_numpy()
    array = numpy.ndarray(shape or (), dtype, _from_text(text)).copy()
    return array[()] if shape is None else array


def import_numpy() -> Any:
    """Return numpy.

    Raises:
        LoadError: it is not installed.
    """
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise LoadError("the checkpoint holds values of numpy; install it") from error


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _from_text(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise LoadError(f"stored bytes are malformed: {error}") from error


def _decode_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LoadError(f"torch has no dtype {name!r}, which was saved")
    return found


def _encode_scalar(value: torch.Tensor, path: str) -> list[Any]:
    if value.dim():
        raise CheckpointTypeError(f"{path}: a tensor in a set, or as a key; {_REMEDY}")
    return [str(value.dtype).removeprefix("torch."), encode_value(value.item(), path)]


def _decode_scalar(content: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(decode_value(content[1]), dtype=_decode_dtype(content[0]))


def _decode_file(content: Sequence[Any]) -> io.BytesIO:
    file = io.BytesIO(_from_text(content[1]))
    file.seek(content[0])
    return file


# mark, classes, how to encode, how to decode
_ATOMS: tuple[tuple[str, Any, Callable[[Any, str], Any], Callable[[Any], Any]], ...] = (
    ("@enum", enum.Enum, _encode_enum, _decode_enum),
    ("@bytes", bytes, lambda value, path: _to_text(value), _from_text),
    ("@bytearray", bytearray, lambda v, path: _to_text(v), lambda t: bytearray(_from_text(t))),
    ("@bytesio", io.BytesIO, lambda v, path: [v.tell(), _to_text(v.getvalue())], _decode_file),
    ("@dtype", torch.dtype, lambda v, path: str(v).removeprefix("torch."), _decode_dtype),
    ("@device", torch.device, lambda value, path: str(value), torch.device),
    ("@complex", complex, lambda v, path: [v.real, v.imag], lambda parts: complex(*parts)),
    # a learning rate of a parameter group, which counts as a value
    ("@scalar", torch.Tensor, _encode_scalar, _decode_scalar),
)


class StoredValues:
    """The values of a checkpoint by dotted path.

    Args:
        encoded: as they stand in the file.
        typed: whether they say their types; those of earlier versions take the template's.
    """

    def __init__(self, encoded: Mapping[str, Any], *, typed: bool) -> None:
        self.encoded = encoded
        self.typed = typed
        self._names: Names | None = None

    def holds(self, path: str) -> bool:
        """Whether there is a value of this path, or values inside of it."""
        return self._find(path)[0]

    def get(self, path: str, template: Any = None) -> tuple[bool, Any]:
        """Return whether there is a value of this path, and the value."""
        found, encoded = self._find(path)
        return found, restore_value(encoded, template, typed=self.typed) if found else None

    def leaves(self) -> dict[str, Any]:
        """Return all values, those in dicts one by one, as they stand in the file."""
        found: dict[str, Any] = {}
        todo = list(self.encoded.items())
        while todo:
            path, value = todo.pop()
            if isinstance(value, dict) and value and mark_of(value) is None:
                todo += [(f"{path}.{name}", item) for name, item in value.items()]
            else:
                found[path] = value
        return found

    def _find(self, path: str) -> tuple[bool, Any]:
        found, encoded = find_value(self.encoded, path)
        if not found and "/" in path:  # a parameter's, whose name may have been another wrapper's
            if self._names is None:
                self._names = Names(name for name in self.encoded if "/" in name)
            known = self._names.find(path)
            return known is not None, None if known is None else self.encoded[known]
        return found, encoded


def restore_value(encoded: Any, template: Any, *, typed: bool = True) -> Any:
    """Return a value; with `typed` of what it says it is, else like the template where it fits."""
    return decode_value(encoded) if typed else _like_template(encoded, template)


def _like_template(encoded: Any, template: Any) -> Any:
    if isinstance(encoded, list):
        items: list[Any] = [None] * len(encoded)
        if isinstance(template, list | tuple) and len(template) == len(encoded):
            items = list(template)
        restored = [_like_template(e, t) for e, t in zip(encoded, items, strict=True)]
        return like_tuple(template, restored) if isinstance(template, tuple) else restored
    if isinstance(encoded, dict):
        pairs: Iterable[Any] = encoded.items()
        if encoded.keys() == {_ITEMS}:  # a tuple that was a key had become a list
            pairs = [(tuple(n) if isinstance(n, list) else n, i) for n, i in encoded[_ITEMS]]
        known = template if isinstance(template, Mapping) else {}
        values = {name: _like_template(item, known.get(name)) for name, item in pairs}
        if not isinstance(template, dict):
            return values
        like = copy.copy(template)  # a defaultdict keeps its factory
        like.clear()
        like.update(values)
        return like
    return encoded


def like_tuple(template: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """Return items as a tuple, as a named one where the template is one of that many fields."""
    make = getattr(type(template), "_make", None)
    return make(items) if make is not None and len(template) == len(items) else tuple(items)


def find_value(values: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Look a dotted path up among saved values; return whether it is there, and the value.

    A dict is saved as one value, or item by item where it holds tensors too or something of it is
    ignored; what was saved in the one way is found in the other.
    """
    if path in values:
        return True, values[path]
    head, dot, tail = path.rpartition(".")
    while dot:
        if isinstance(values.get(head), dict) and head in values:
            found, value = find_value(values[head], tail)
            if found:
                return True, value
        head, dot, more = head.rpartition(".")
        tail = f"{more}.{tail}"
    prefix = f"{path}."
    items = {
        name.removeprefix(prefix): item for name, item in values.items() if name.startswith(prefix)
    }
    nested: dict[str, Any] = {}
    for name, item in items.items():
        *outer, last = name.split(".")
        place = nested
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = item
    return bool(nested), nested
