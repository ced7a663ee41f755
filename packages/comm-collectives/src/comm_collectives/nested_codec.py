"""Nested Python values as JSON text plus a list of tensors, so that nothing is ever unpickled.

Scalars and strings stand for themselves; everything else is a JSON list whose first item is a tag:

    ["l", item, ...]          list        ["n", module, name, item, ...]            namedtuple
    ["t", item, ...]          tuple       ["c", module, name, [field, value], ...]  dataclass
    ["d", [key, value], ...]  dict        ["x", i]  tensor number i
    ["o", [key, value], ...]  OrderedDict ["b", i]  bytes, held by tensor number i

A class is looked up by name among the modules that the receiver has already imported, and has to be
a namedtuple or a dataclass: receiving imports nothing and calls nothing else.

    text, tensors = encode({"step": 3, "w": torch.ones(2)})
    value = decode(text, tensors)
"""

import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, final

import torch

from comm_collectives.wire import bytes_of, check_dense

_SCALARS = (type(None), bool, int, float, str)
_TAG_OF_SEQUENCE: dict[type, str] = {list: "l", tuple: "t"}
_TAG_OF_MAPPING: dict[type, str] = {dict: "d", OrderedDict: "o"}
_MAX_DEPTH = 100


def encode(value: object) -> tuple[str, list[torch.Tensor]]:
    """Return JSON text and the tensors that it refers to; a tensor that occurs twice is sent once.

    Raises:
        TypeError: a part has a type that is not supported; the message holds the path to it.
        ValueError: nested too deeply (or in itself).
    """
    encoder = _Encoder()
    tree = encoder.node(value, "obj", 0)
    return json.dumps(tree, separators=(",", ":")), encoder.tensors


def decode(text: str, tensors: Sequence[torch.Tensor]) -> object:
    """Rebuild what `encode` took apart.

    Raises:
        TypeError: a class is not known here (its module is not imported), or has changed.
    """
    return _build(json.loads(text), tensors)


@final
class _Encoder:
    __slots__ = ("_number_of", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}

    def node(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"{path[:80]}... is nested more than {_MAX_DEPTH} levels deep; flatten it"
            )
        if isinstance(value, torch.Tensor):
            check_dense(value, path)
            return ["x", self._add(value)]
        if kind is bytes:
            return ["b", self._add(_from_buffer(value))]
        if kind in _TAG_OF_MAPPING:
            pairs = [
                [self.node(k, f"{path} key", depth + 1), self.node(v, f"{path}[{k!r}]", depth + 1)]
                for k, v in value.items()
            ]
            return [_TAG_OF_MAPPING[kind], *pairs]
        if kind in _TAG_OF_SEQUENCE:
            return [_TAG_OF_SEQUENCE[kind], *self._items(value, path, depth)]
        return self._instance(value, path, depth)

    def _instance(self, value: Any, path: str, depth: int) -> list[Any]:
        kind = type(value)
        if _is_namedtuple(kind):
            head = ["n", *_name_of(kind, path)]
            return [*head, *self._items(value, path, depth)]
        if dataclasses.is_dataclass(kind):
            fields = dataclasses.fields(kind)
            if not all(f.init for f in fields):
                raise TypeError(f"{path} is a dataclass with a field of init=False; send a dict")
            head = ["c", *_name_of(kind, path)]
            return [
                *head,
                *(
                    [f.name, self.node(getattr(value, f.name), f"{path}.{f.name}", depth + 1)]
                    for f in fields
                ),
            ]
        raise TypeError(
            f"{path} is a {kind.__name__}; supported are None, bool, int, float, str, bytes, "
            "tensors and lists, tuples, dicts, OrderedDicts, namedtuples and dataclasses of them"
        )

    def _items(self, value: Sequence[Any], path: str, depth: int) -> list[Any]:
        return [self.node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]

    def _add(self, tensor: torch.Tensor) -> int:
        # `tensors` keeps each object alive, so its id stays its own.
        number = self._number_of.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number


def _build(node: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag == "x":
        return tensors[rest[0]]
    if tag == "b":
        return bytes_of(tensors[rest[0]])
    if tag in ("d", "o"):
        pairs = ((_build(k, tensors), _build(v, tensors)) for k, v in rest)
        return dict(pairs) if tag == "d" else OrderedDict(pairs)
    if tag in ("l", "t"):
        items = [_build(item, tensors) for item in rest]
        return items if tag == "l" else tuple(items)
    module, name, *parts = rest
    cls = _find_class(module, name)
    if tag == "n":
        return cls._make(_build(item, tensors) for item in parts)
    return cls(**{field: _build(value, tensors) for field, value in parts})


def _is_namedtuple(kind: Any) -> bool:
    fields = getattr(kind, "_fields", None)
    return isinstance(kind, type) and issubclass(kind, tuple) and isinstance(fields, tuple)


def _name_of(kind: type, path: str) -> tuple[str, str]:
    try:
        found = _find_class(kind.__module__, kind.__qualname__)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    if found is not kind:
        raise TypeError(f"{path}: another class bears the name {kind.__qualname__}; rename one")
    return kind.__module__, kind.__qualname__


def _find_class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (_is_namedtuple(found) or (isinstance(found, type) and dataclasses.is_dataclass(found))):
        raise TypeError(
            f"{module}.{name} is not a namedtuple or dataclass that can be found by this name; "
            "define it at the top of a module that every rank has imported"
        )
    return found


def _from_buffer(data: bytes) -> torch.Tensor:
    # frombuffer refuses an empty buffer and warns of a read-only one.
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
