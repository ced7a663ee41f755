"""Nested Python values as JSON plus lists of tensors and bytes, so that nothing is ever unpickled.

Strings, None, bools, floats and ordinary ints stand for themselves; all else is a JSON list whose
first item says what it is:

    [i]                     tensor number i       ["l", item, ...]            list
    ["b", i]                bytes number i        ["t", item, ...]            tuple
    ["r", i]                container number i    ["d", key, value, ...]      dict
    ["i", hex]              huge int              ["o", attributes, key, value, ...]  OrderedDict
    ["z", real, imaginary]  complex               ["n", class, item, ...]     namedtuple
    ["s", code point, ...]  str with surrogates   ["c", class, field, ...]    dataclass
    ["y", "float32"]        torch.dtype           ["e", class, member]        enum
    ["v", "cuda:0"]         torch.device          ["x", size, ...]            torch.Size
    ["#", dtype, hex]       numpy scalar          ["{", item, ...]            set
    ["p", i, needs grad]    Parameter             ["}", item, ...]            frozenset

Invariant: one object that occurs twice stays one. Containers count in the order in which they are
complete, tensors and bytes in that of their first occurrence. A class is looked up by name among
the modules that the receiver has already imported, and has to be a namedtuple, a dataclass or an
enum with the same fields: receiving imports nothing, and runs no constructor of the class.

    packed = encode({"step": 3, "w": torch.ones(2)})
    value = decode(packed.text, packed.tensors, packed.blobs)
"""

import dataclasses
import enum
import functools
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise
from typing import Any, final

import torch

from comm_collectives.base import is_dense
from comm_collectives.errors import CommTypeError, CommValueError

_AS_THEY_ARE = (type(None), bool, float)
_ITERABLES: dict[str, Any] = {
    "l": list, "t": tuple, "{": set, "}": frozenset, "x": torch.Size
}  # fmt: skip
_TAG_OF_ITERABLE = {kind: tag for tag, kind in _ITERABLES.items()}
_NUMPY_KINDS = "biufcSUmM"  # of numpy's dtypes: those whose bytes are all that there is
_TAG_OF_MAPPING: dict[type, str] = {dict: "d", OrderedDict: "o"}
_MAX_DEPTH = 100
_LONG_BITS = 64  # Python refuses to print or read ints of more than 4300 digits
_OPEN = -1  # number of a container that is not complete yet
_UNSET: Any = ["u"]  # a field without a value
# Not escaped, since UTF-8 is shorter; no search for cycles, since the encoder made it.
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A value taken apart: UTF-8 JSON, and the tensors and bytes that it refers to by number."""

    text: bytes
    tensors: list[torch.Tensor]
    blobs: list[bytes]


def encode(value: object) -> Packed:
    """Take a value apart; tensors, bytes and containers that occur twice are carried once.

    Raises:
        TypeError: a part has a type that is not supported; the message holds the path to it.
        ValueError: a part contains itself, or is nested too deeply; so does this one.
    """
    encoder = _Encoder()
    tree = encoder.node(value)
    text = _JSON.encode([encoder.classes, tree]).encode()
    return Packed(text=text, tensors=encoder.tensors, blobs=encoder.blobs)


def decode(text: bytes, tensors: Sequence[torch.Tensor], blobs: Sequence[bytes]) -> object:
    """Rebuild what `encode` took apart.

    Raises:
        TypeError: a class is not known here (its module is not imported), or has other fields.
    """
    classes, tree = json.loads(text)
    return _Decoder([_find_same(*c) for c in classes], tensors, blobs).build(tree)


@final
class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.blobs: list[bytes] = []
        self.classes: list[list[Any]] = []
        self._number_of: dict[int, int] = {}
        self._number_of_class: dict[type, int] = {}
        self._kept: list[Any] = []  # keeps each complete container alive, so its id stays its own
        self._open: list[Any] = []  # the containers around the present node, outermost first

    def node(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return [self._carry(value, self.tensors)]
        if kind is str:
            return value if value.isascii() else _text(value)
        if kind is int:
            return value if value.bit_length() <= _LONG_BITS else ["i", hex(value)]
        if kind in _AS_THEY_ARE:
            return value
        if kind is bytes:
            return ["b", self._carry(value, self.blobs)]
        return _scalar_node(value, kind) or self._container(value, kind)

    def _carry(self, leaf: Any, leaves: list[Any]) -> int:
        number = self._number_of.get(id(leaf))
        if number is None:
            if leaves is self.tensors and not is_dense(leaf):
                raise CommTypeError(
                    f"{self._path(leaf)} has layout {leaf.layout}, dtype {leaf.dtype}, device "
                    f"{leaf.device}; give a dense tensor with data, of a plain dtype"
                )
            number = self._number_of[id(leaf)] = len(leaves)
            leaves.append(leaf)
        return number

    def _container(self, value: Any, kind: Any) -> list[Any]:
        number = self._number_of.get(id(value))
        if number is None:
            self._number_of[id(value)] = _OPEN
            self._open.append(value)
            if len(self._open) > _MAX_DEPTH:
                raise CommValueError(
                    f"{self._path()[:80]}... is nested more than {_MAX_DEPTH} levels deep; "
                    "flatten it"
                )
            node = self._parts(value, kind)
            self._open.pop()
            self._number_of[id(value)] = len(self._kept)
            self._kept.append(value)
            return node
        if number == _OPEN:
            outer = next(i for i, container in enumerate(self._open) if container is value)
            raise CommValueError(
                f"{self._path(value)} is {self._path(upto=outer)} itself, which contains it; "
                "replace it by something that the receiver can put back, such as a name"
            )
        return ["r", number]

    def _parts(self, value: Any, kind: Any) -> list[Any]:
        if kind in _TAG_OF_ITERABLE:
            return [_TAG_OF_ITERABLE[kind], *map(self.node, value)]
        if kind is torch.nn.Parameter:
            return ["p", self._carry(value.data, self.tensors), value.requires_grad]
        if issubclass(kind, enum.Enum):
            member = value.name if value.name in kind.__members__ else value.value
            return ["e", self._class(value, kind), self.node(member)]
        if kind in _TAG_OF_MAPPING:
            head = ["d"] if kind is dict else ["o", self.node(vars(value))]
            return [*head, *map(self.node, chain.from_iterable(value.items()))]
        if _is_namedtuple(kind):
            return ["n", self._class(value, kind), *map(self.node, value)]
        if dataclasses.is_dataclass(kind):
            number = self._class(value, kind)
            values = (getattr(value, name, _UNSET) for name in self.classes[number][2])
            return ["c", number, *(v if v is _UNSET else self.node(v) for v in values)]
        if isinstance(value, torch.Tensor):
            raise CommTypeError(
                f"{self._path()} is a {kind.__name__}; give a plain torch.Tensor, such as the "
                "local part of a distributed one"
            )
        raise CommTypeError(
            f"{self._path()} is a {kind.__name__}; supported are None, bool, int, float, complex, "
            "str, bytes, enums, numpy scalars, torch.dtype, torch.device, plain tensors and "
            "Parameters, and lists, tuples, torch.Size, sets, frozensets, dicts, OrderedDicts, "
            "namedtuples and dataclasses of them"
        )

    def _class(self, value: Any, kind: Any) -> int:
        number = self._number_of_class.get(kind)
        if number is None:
            problem = _problem_of(kind)
            if problem is not None:
                raise CommTypeError(f"{self._path()}: {problem}")
            number = self._number_of_class[kind] = len(self.classes)
            self.classes.append([kind.__module__, kind.__qualname__, _fields_of(kind)])
        if issubclass(kind, enum.Enum):
            return number
        others = getattr(value, "__dict__", {}).keys() - self.classes[number][2]
        for name in others:
            if not isinstance(getattr(kind, name, None), functools.cached_property):
                raise CommTypeError(
                    f"{self._path()} has the attribute {name}, which is no field of "
                    f"{kind.__qualname__} and would be lost; make it a field or send it beside"
                )
        return number

    def _path(self, *last: object, upto: int | None = None) -> str:
        steps = pairwise([*self._open, *last] if upto is None else self._open[: upto + 1])
        return "obj" + "".join(_step(parent, child) for parent, child in steps)


@final
class _Decoder:
    def __init__(
        self, classes: Sequence[Any], tensors: Sequence[torch.Tensor], blobs: Sequence[bytes]
    ) -> None:
        self._classes = classes
        self._tensors = tensors
        self._blobs = blobs
        self._built: list[Any] = []

    def build(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        tag = node[0]
        if type(tag) is int:
            return self._tensors[tag]
        if tag == "r":
            return self._built[node[1]]
        if tag == "b":
            return self._blobs[node[1]]
        if tag in _SCALARS:
            return _SCALARS[tag](*node[1:])
        built = self._container(tag, node)
        self._built.append(built)
        return built

    def _container(self, tag: str, node: list[Any]) -> Any:
        if tag in _ITERABLES:
            return _ITERABLES[tag]([self.build(item) for item in islice(node, 1, None)])
        if tag == "p":
            return torch.nn.Parameter(self._tensors[node[1]], requires_grad=node[2])
        if tag == "d":
            return dict(self._pairs(islice(node, 1, None)))
        if tag == "o":
            attributes = self.build(node[1])
            ordered = OrderedDict(self._pairs(islice(node, 2, None)))
            vars(ordered).update(attributes)
            return ordered
        cls = self._classes[node[1]]
        if tag == "n":
            return tuple.__new__(cls, [self.build(item) for item in islice(node, 2, None)])
        if tag == "e":
            member = self.build(node[2])
            return cls[member] if member in cls.__members__ else cls(member)
        instance = object.__new__(cls)
        for name, item in zip(_fields_of(cls), islice(node, 2, None), strict=True):
            if item != _UNSET:
                # gate: setattr - the values were checked when the source made its instance
                object.__setattr__(instance, name, self.build(item))
        return instance

    def _pairs(self, nodes: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        built = map(self.build, nodes)
        return zip(built, built, strict=True)


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["s", *map(ord, value)]  # JSON would join two halves of a pair
    return value


def _scalar_node(value: Any, kind: Any) -> list[Any] | None:
    """Return the node of a value without parts; None for any other."""
    if kind is complex:
        return ["z", value.real, value.imag]
    if kind is torch.dtype:
        return ["y", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["v", str(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
        return ["#", value.dtype.str, value.tobytes().hex()]
    return None


def _numpy_scalar(dtype: str, data: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise CommTypeError(
            f"a numpy scalar of dtype {dtype} came, and numpy is not imported on this rank; import "
            "it on every rank, or send .item()"
        )
    kind, raw = numpy.dtype(dtype), bytes.fromhex(data)
    if kind.kind == "S":  # of strings numpy drops zeros at the end, and reads none without bytes
        return numpy.bytes_(raw[: kind.itemsize])
    if kind.kind == "U":
        return numpy.str_(
            raw[: kind.itemsize].decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
        )
    return numpy.frombuffer(raw, dtype=kind)[0]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CommTypeError(
            f"torch.{name} came and is no dtype on this rank; run the same torch on every rank"
        )
    return found


_SCALARS: dict[str, Any] = {
    "i": lambda digits: int(digits, 16),
    "s": lambda *points: "".join(map(chr, points)),
    "z": complex,
    "y": _dtype,
    "v": torch.device,
    "#": _numpy_scalar,
}


def _step(parent: Any, child: object) -> str:
    if isinstance(parent, torch.Tensor):
        return ".data"  # of a Parameter
    if isinstance(parent, dict):
        for key, value in parent.items():
            if value is child:
                return f"[{key!r}]"
        attributes = isinstance(parent, OrderedDict) and vars(parent) is child
        return " attributes" if attributes else " key"
    if _is_namedtuple(type(parent)) or dataclasses.is_dataclass(parent):
        for name in _fields_of(type(parent)):
            if getattr(parent, name, None) is child:
                return f".{name}"
    return f"[{next((i for i, item in enumerate(parent) if item is child), '?')}]"


def _is_namedtuple(kind: Any) -> bool:
    fields = getattr(kind, "_fields", None)
    return isinstance(kind, type) and issubclass(kind, tuple) and isinstance(fields, tuple)


def _fields_of(kind: Any) -> list[str]:
    if issubclass(kind, enum.Enum):
        return list(kind.__members__)
    return (
        list(kind._fields) if _is_namedtuple(kind) else [f.name for f in dataclasses.fields(kind)]
    )


def _problem_of(kind: type) -> str | None:
    """Say why instances of a class cannot be rebuilt from its name and fields; None if they can."""
    try:
        found = _find_class(kind.__module__, kind.__qualname__)
        if dataclasses.is_dataclass(kind):
            object.__new__(kind)
            slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
            named = {name for part in slots for name in ([part] if type(part) is str else part)}
            lost = named - {"__dict__", "__weakref__", *_fields_of(kind)}
            if lost:
                return (
                    f"slots of {kind.__qualname__} are no fields and would be lost: {sorted(lost)}"
                )
    except TypeError as error:
        return str(error)
    return None if found is kind else f"another class bears the name {kind.__qualname__}"


def _find_same(module: str, name: str, fields: list[str]) -> Any:
    cls = _find_class(module, name)
    if _fields_of(cls) != fields:
        raise CommTypeError(
            f"{module}.{name} has the fields {_fields_of(cls)} here and {fields} on the source; "
            "run the same version on every rank"
        )
    return cls


def _find_class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    known = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or _is_namedtuple(found)
    )
    if not known:
        raise CommTypeError(
            f"{module}.{name} is not a namedtuple, dataclass or enum that this name finds; "
            "define it at the top of a module that every rank has imported"
        )
    return found
