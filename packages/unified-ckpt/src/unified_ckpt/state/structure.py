"""What collections a nested state is made of, as JSON, so that a load needs no template of it.

A node is `"tensor"`, `"array"` (numpy's, stored as a tensor), `"value"` (stored as a value of that
path), `"own"` (filled in place, in an object that the state to be loaded must have), or
`{mark: [what its class needs, [[key, node], ...]]}`; the items of sequences have no keys. Paths of
items are their keys joined with dots, as those of tensors and values.

    {"@items": [null, [["seen", "tensor"], ["epoch", "value"]]]}
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError, LoadError
from unified_ckpt.geometry.tensors import is_wrapper
from unified_ckpt.state.naming import Names
from unified_ckpt.state.values import (
    Kind,
    build,
    decode_value,
    encode_value,
    is_array,
    reference,
    resolve,
)

TENSOR, ARRAY, VALUE, OWN, ABSENT = "tensor", "array", "value", "own", "absent"
STATEFUL, SUBCLASS, TYPED, RANKS = "@stateful", "@subclass", "@typed", "@ranks"
_KEYED = frozenset({"@items", "@ordered", "@counter", "@defaultdict", SUBCLASS})

Node = Any  # JSON types, see above


@runtime_checkable
class Stateful(Protocol):
    """An object that keeps its own state: modules, schedulers, data loaders; torch's protocol."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether a value keeps its own state; most have no such method, which is quicker to ask."""
    return hasattr(value, "state_dict") and isinstance(value, Stateful)


def is_keyed(node: Node) -> bool:
    """Whether a node's items have keys."""
    return isinstance(node, dict) and next(iter(node)) in (*_KEYED, STATEFUL, RANKS)


def items_of_node(node: Mapping[str, Any]) -> list[tuple[Any, str, Node]]:
    """Return (key or place, its name in paths, node) of each item."""
    mark, (_, items) = next(iter(node.items()))
    if mark not in _KEYED:
        return [(number, str(number), item) for number, item in enumerate(items)]
    keys = [decode_value(key) for key, _ in items]
    return [(key, str(key), item) for key, (_, item) in zip(keys, items, strict=True)]


def container_node(kind: Kind, items: Sequence[tuple[Any, Node]], path: str) -> Node:
    """Return the node of a collection of a kind, with the nodes of its items."""
    mark, argument = kind
    if mark in _KEYED:
        return {mark: [argument, [[encode_value(k, f"{path} key"), node] for k, node in items]]}
    return {mark: [argument, [node for _, node in items]]}


def tensor_node(tensor: torch.Tensor, path: str) -> Node:
    """Return the node of a tensor; a class of the user's without a dispatch is named."""
    if type(tensor) is torch.Tensor or is_wrapper(tensor) or tensor.is_meta:
        return TENSOR
    return {TYPED: [reference(type(tensor), path), tensor.requires_grad]}


def as_typed(tensor: torch.Tensor, named: str, requires_grad: bool) -> torch.Tensor:
    """Undo `tensor_node` for a class that it names."""
    kind = resolve(named)
    if issubclass(kind, torch.nn.Parameter):
        return kind(tensor, requires_grad=requires_grad)
    if not issubclass(kind, torch.Tensor):
        raise LoadError(f"a tensor was saved as {named}, which is no tensor's class")
    return tensor.as_subclass(kind).requires_grad_(requires_grad)


def is_stored_array(value: object) -> bool:
    """Whether a value is a numpy array that can be stored as a tensor."""
    if not is_array(value):
        return False
    dtype: Any = value.dtype  # type: ignore[attr-defined]
    return bool(
        type(value).__name__ == "ndarray"
        and dtype.isnative
        and (dtype.kind in "biu" or dtype.name in _FLOATS)
    )


_FLOATS = ("float16", "float32", "float64", "complex64")


def array_memory(array: Any) -> torch.Tensor:
    """Return an array's memory as a tensor; a copy where torch cannot take it."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def wrapper_items(tensor: Any) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """Return the tensors that a wrapper is made of, and what else it is."""
    names, context = tensor.__tensor_flatten__()
    return [(name, getattr(tensor, name)) for name in names], context


def describe_wrapper(tensor: torch.Tensor, path: str, *, remade: bool) -> list[Any]:
    """Return what a wrapper's class needs, as JSON types.

    Args:
        remade: whether a load has to make it again; one of a module is filled in place.

    Raises:
        CheckpointTypeError: it cannot be made again.
    """
    _, context = wrapper_items(tensor)
    named = reference(type(tensor), path)
    try:
        described = encode_value(context, path)
    except CheckpointTypeError as error:
        if remade:
            raise CheckpointTypeError(
                f"{path}: a {type(tensor).__name__} whose __tensor_flatten__ gives {context!r} "
                f"cannot be made again ({error})"
            ) from error
        described = repr(context)
    return [named, described, list(tensor.shape), list(tensor.stride())]


def make_wrapper(described: Sequence[Any], inner: dict[str, torch.Tensor]) -> torch.Tensor:
    """Undo `describe_wrapper`."""
    named, context, shape, stride = described
    kind: Any = resolve(named)
    if not issubclass(kind, torch.Tensor) or not hasattr(kind, "__tensor_unflatten__"):
        raise LoadError(f"a tensor was saved as {named}, which is no tensor made of others")
    made: torch.Tensor = kind.__tensor_unflatten__(
        inner, decode_value(context), torch.Size(shape), tuple(stride)
    )
    return made


class Structures:
    """The stored structures by dotted path; also of what lies inside of others."""

    def __init__(self, stored: Mapping[str, Node]) -> None:
        self._nodes: dict[str, Node] = {}
        todo = list(stored.items())
        while todo:
            path, node = todo.pop()
            if node == ARRAY or isinstance(node, dict):
                self._nodes.setdefault(path, node)
            if not isinstance(node, dict) or TYPED in node:
                continue
            inner = node.get(RANKS, node)
            if STATEFUL in inner:
                todo.append((path, inner[STATEFUL][1][0]))
            else:
                todo += [(f"{path}.{name}", item) for _, name, item in items_of_node(inner)]
        self._names = Names(self._nodes)

    @staticmethod
    def merge(held: Sequence[Mapping[str, Node]]) -> dict[str, Node]:
        """Return what all ranks hold by path; what ranks hold different keys of is marked.

        Raises:
            CheckpointValueError: a collection has other items on one rank than on another.
        """
        merged: dict[str, Node] = {}
        for rank, structures in enumerate(held):
            for path, node in structures.items():
                merged[path] = _merge(merged.get(path, node), node, path, rank)
        return {
            path: {RANKS: node} if any(node != each.get(path, node) for each in held) else node
            for path, node in merged.items()
        }

    def find(self, path: str) -> Node | None:
        """Return the node of a collection, an object, an array or a tensor made of others."""
        known = self._names.find(path) if "/" in path else path
        return None if known is None else self._nodes.get(known)

    def has_inside(self, path: str) -> bool:
        """Return whether there are nodes inside of a path."""
        return any(each.startswith(f"{path}.") for each in self._nodes)

    def around(self) -> dict[str, list[str]]:
        """Return the paths of all nodes by each path that they are inside of."""
        inside: dict[str, list[str]] = {}
        for each in self._nodes:
            for at, letter in enumerate(each):
                if letter == ".":
                    inside.setdefault(each[:at], []).append(each)
        return inside


def make_container(node: Mapping[str, Any], items: Sequence[tuple[Any, Any]]) -> Any:
    """Return a collection of a node's class."""
    mark, (argument, _) = next(iter(node.items()))
    if mark == STATEFUL:  # the object may be gone; then its state stands there
        return items[0][1]
    return build((mark, argument), items)


def _merge(a: Node, b: Node, path: str, rank: int) -> Node:
    if a == b:
        return a
    mark = next(iter(a)) if isinstance(a, dict) else ""
    mergeable = isinstance(b, dict) and [*b] == [mark] and mark in (*_KEYED, STATEFUL)
    if not mergeable or mark == SUBCLASS or a[mark][0] != b[mark][0]:
        raise CheckpointValueError(
            f"{path!r} is {_shown(b)} on rank {rank}, {_shown(a)} on a rank before it; a "
            "collection must have as many items on all ranks that have it, or go into rank_files"
        )
    if mark == STATEFUL:
        return {mark: [None, [_merge(a[mark][1][0], b[mark][1][0], path, rank)]]}
    items = {str(key): [key, node] for key, node in a[mark][1]}
    for key, node in b[mark][1]:
        known = items.setdefault(str(key), [key, node])
        known[1] = _merge(known[1], node, f"{path}.{key}", rank)
    return {mark: [a[mark][0], list(items.values())]}


def _shown(node: Node) -> str:
    if not isinstance(node, dict):
        return f"a {node}"
    mark, (_, items) = next(iter(node.items()))
    return f"{mark.removeprefix('@')} of {len(items)}"
