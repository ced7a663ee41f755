"""A nested state dict as shards by part and plain values by path, and the way back.

The keys at the top are parts: `{"model": model, "optimizer": optimizer, "scheduler": {...}}`.
Tensors inside become stored tensors under their dotted keys, optimizer states under their
parameter's key, and Python values JSON. What the state is made of besides (lists of tensors,
states of objects) is a structure, from which a load makes it again. A tensor at the top belongs to
the part `model`; a sequence of `Shard`s at the top is a part.

    flat = flatten_state({"model": model, "epoch": 3})
    flat.parts["model"], flat.values["epoch"].get()

Length: it is one walk, whose cases call each other.
"""

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError, LoadError, check_type
from unified_ckpt.geometry import Shard, check_plain
from unified_ckpt.geometry.layouts import Layout, is_dtensor
from unified_ckpt.geometry.tensors import is_wrapper
from unified_ckpt.options import MASTER_WEIGHTS, MODEL, OPTIMIZER, matcher
from unified_ckpt.state.flat_state import FlatState, LoadHooks, ValueSlot
from unified_ckpt.state.naming import ModuleNames, plain_key
from unified_ckpt.state.optimizer import (
    MASTER_FIELD,
    MASTER_NAMES,
    MOMENTS,
    PARAMS,
    Entry,
    group_names,
    hyperparameters,
    is_optimizer_state,
    optimizer_entries,
)
from unified_ckpt.state.placing import ask_layout, place_tensor, renamed
from unified_ckpt.state.rebuilding import MISSING, Rebuilder
from unified_ckpt.state.structure import (
    ABSENT,
    ARRAY,
    OWN,
    RANKS,
    STATEFUL,
    SUBCLASS,
    VALUE,
    Node,
    Stateful,
    array_memory,
    container_node,
    describe_wrapper,
    is_keyed,
    is_stateful,
    is_stored_array,
    tensor_node,
    wrapper_items,
)
from unified_ckpt.state.values import kind_of

StateDict = Mapping[str, Any]
_EXTRA_STATE = "_extra_state"  # what `nn.Module.get_extra_state` gives
_BY_TEMPLATE = (MODEL, OPTIMIZER, MASTER_WEIGHTS)  # of them a rank loads what it holds, not all


def flatten_state(
    state_dict: StateDict,
    *,
    layout: Layout | None = None,
    ignored_keys: Sequence[str] = (),
    hooks: LoadHooks | None = None,
) -> FlatState:
    """Take a state dict apart; nothing is copied.

    Args:
        layout: boxes of plain tensors; those that it does not know are whole.
        ignored_keys: regular expressions that leave out what they are found in.
        hooks: what a load finds stored, and does to optimizers; None for a save.

    Raises:
        CheckpointTypeError: a load could not make a leaf again; the message names its path.
        CheckpointValueError: a tensor does not fit its box, a DTensor is `Partial`, or two leaves
            have one dotted path.
    """
    check_type("state_dict", state_dict, Mapping)
    walker = _Walker(state_dict, layout, ignored_keys, hooks)
    try:
        for name, value in state_dict.items():
            walker.visit_top(name, state_dict, value)
    except RecursionError as error:
        raise CheckpointTypeError(
            f"{name!r} of the state dict nests too deep, or a collection in it holds itself"
        ) from error
    return walker.flat


class _Walker:
    """Goes through a nested state dict once; see `flatten_state`."""

    def __init__(
        self,
        state_dict: StateDict,
        layout: Layout | None,
        ignored_keys: Sequence[str],
        hooks: LoadHooks | None,
    ) -> None:
        self.flat = FlatState()
        self._layout = layout
        self._ignores = bool(ignored_keys)
        self._is_ignored = matcher(ignored_keys)
        self._hooks = hooks
        self._modules = ModuleNames(state_dict)
        self._tensor_keys: set[tuple[str, str]] = set()
        self._inside = 0  # structures that are being taken apart
        self._in_module = False
        self._rebuilder: Rebuilder | None = None
        if hooks is not None:
            self._rebuilder = Rebuilder(
                stored=hooks,
                place=lambda key, tensor: place_tensor(key, tensor, layout),
                add=self._add_shards,
                visit=lambda part, key, value: self._visit(part, key, [value], 0, value),
                is_ignored=self._is_ignored,
                lost=self._lose,
            )

    def visit_top(self, name: str, container: StateDict, value: Any) -> None:
        slot = ValueSlot(container, name)
        if isinstance(value, torch.Tensor):
            self._add_tensor(MODEL, name, value)
        elif isinstance(value, Shard):
            self._add_shards(MODEL, [value])
        elif isinstance(value, Mapping | list | tuple) and not value:
            if name in _BY_TEMPLATE or not self._remake(name, "", slot, value):
                self.flat.parts.setdefault(name, [])
                self.flat.empty[name] = slot
        elif name in _BY_TEMPLATE and isinstance(value, list | tuple):
            self._add_shards(name, value)
        else:
            self._visit(name, "", container, name, value)

    def _visit(self, part: str, key: str, container: Any, place: Any, value: Any) -> Node:
        if isinstance(place, str) and place.rpartition(".")[2] == _EXTRA_STATE:
            in_module, self._in_module = self._in_module, False
            node = self._visit_held(part, key, ValueSlot(container, place))
            self._in_module = in_module
            return node
        return self._visit_item(part, key, container, place, value)

    def _visit_item(self, part: str, key: str, container: Any, place: Any, value: Any) -> Node:
        if isinstance(value, torch.Tensor):
            return self._add_tensor(part, key or part, value)
        if isinstance(value, Shard) or _are_shards(value):
            self._add_shards(part, [value] if isinstance(value, Shard) else value)
            return OWN
        if is_optimizer_state(value):
            self._visit_optimizer(part, key, value)
            return OWN
        if is_stateful(value):
            return self._visit_stateful(part, key, value)
        slot = ValueSlot(container, place)
        if self._remake(part, key, slot, value):
            return OWN
        path = _join(part, key)
        if self._hooks is None and is_stored_array(value):
            node = self._add_tensor(part, key or part, array_memory(value))
            return self._rooted(path, node if node == ABSENT else ARRAY)
        if _holds_tensors(value) or (isinstance(value, Mapping) and self._is_open(path, value)):
            return self._visit_items(part, key, slot, value)
        return self._add_value(path, container, place)

    def _visit_items(self, part: str, key: str, slot: ValueSlot, value: Any) -> Node:
        path = _join(part, key)
        keyed = isinstance(value, Mapping)
        kind = kind_of(value, path) if self._hooks is None else None
        items: Any = value if isinstance(value, Mapping | list) else list(value)
        if isinstance(value, tuple | deque):
            self.flat.tuples.append((slot, items))
        self._inside += not keyed  # dicts of a load's template say which keys are wanted
        pairs = list(items.items() if keyed else enumerate(items))
        if self._hooks is None and "" in (name for name, _ in pairs):
            raise CheckpointValueError(f"{path!r} has an empty key, which no path can say; name it")
        nodes = [
            (name, self._visit(part, _join(key, str(name)), items, name, item))
            for name, item in pairs
        ]
        self._inside -= not keyed
        if kind is None or (keyed and not self._inside):
            return OWN
        return self._rooted(path, container_node(kind, nodes, path), is_root=not keyed)

    def _rooted(self, path: str, node: Node, *, is_root: bool = True) -> Node:
        """Keep a node that no other one contains."""
        if is_root and not self._inside and self._hooks is None and node != ABSENT:
            self.flat.structure[path] = node
        return node

    def _visit_stateful(self, part: str, key: str, value: Stateful) -> Node:
        holder = [value.state_dict()]
        self.flat.stateful.append((value, holder))
        if isinstance(value, nn.Module):
            self._in_module = True
            for name, item in list(holder[0].items()):
                place = _join(key, plain_key(value, name))
                self._visit(part, place, holder[0], name, item)
            self._in_module = False
            return OWN
        return self._visit_held(part, key, ValueSlot(holder, 0), by_template=part in _BY_TEMPLATE)

    def _visit_held(
        self, part: str, key: str, slot: ValueSlot, *, by_template: bool = False
    ) -> Node:
        """Take the state of an object, or a module's extra state, made again as it was saved.

        With `by_template`, or where ranks hold different keys, one with tensors says what it wants.
        """
        path, value = _join(part, key), slot.get()
        if self._hooks is None:
            self._inside += 1
            node = self._visit_item(part, key, slot.container, slot.key, value)
            self._inside -= 1
            node = {STATEFUL: [None, [node]]}
            return node if node[STATEFUL][1] == [VALUE] else self._rooted(path, node)
        stored = self._hooks.structure(path)
        by_template |= isinstance(stored, dict) and RANKS in stored
        if stored is None or (by_template and _holds_tensors(value)):
            self._visit_item(part, key, slot.container, slot.key, value)
        else:
            self._make(part, key, slot, _inner(stored))
        return OWN

    def _remake(self, part: str, key: str, slot: ValueSlot, value: Any) -> bool:
        """Make a collection again as it was saved, if the template is no dict of what is wanted."""
        path = _join(part, key)
        stored = None if self._hooks is None else self._hooks.structure(path)
        if stored is None or (isinstance(value, Mapping) and value and is_keyed(stored)):
            return False
        if stored == VALUE:
            if isinstance(value, Mapping) or not _holds_tensors(value):
                return False
            self._add_value(path, slot.container, slot.key)
        else:
            self._make(part, key, slot, stored)
        return True

    def _make(
        self,
        part: str,
        key: str,
        slot: ValueSlot,
        node: Node,
        device: torch.device | None = None,
    ) -> None:
        if self._rebuilder is None:
            return
        made = self._rebuilder.make(part, key, node, slot.get(), device)
        if made is not MISSING:
            self.flat.remade.append((_join(part, key), slot, made))

    def _lose(self, path: str, key: str) -> None:
        if key:
            self.flat.lost.append((path, key))
        else:
            self.flat.values.setdefault(path, ValueSlot([None], 0))

    def _visit_optimizer(self, part: str, key: str, value: Any) -> None:
        prefix = f"{key}." if key else ""
        names = group_names(value, part, self._modules)
        if isinstance(value, torch.optim.Optimizer) and self._hooks is not None:
            self._hooks.prepare(value, part, prefix, names)
        entries, groups = optimizer_entries(value, names)
        for entry in entries:
            for stored in self._keys_of(entry):
                self.flat.optimized.setdefault(part, {})[f"{prefix}{stored}"] = bool(entry.state)
            for state_name, item in entry.state.items():
                self._visit_state((part, prefix), entry, state_name, item)
        for position, (of_group, group) in enumerate(zip(names, groups, strict=True)):
            self._visit_group(part, f"{prefix}param_groups", position, of_group, group)

    def _keys_of(self, entry: Entry) -> list[str]:
        """Return the stored keys of a parameter."""
        placed = None
        if entry.parameter is not None and not is_wrapper(entry.parameter):
            placed = ask_layout(self._layout, entry.name, entry.parameter)
        return [s.key for s in placed] if isinstance(placed, list | tuple) else [entry.name]

    def _visit_state(
        self, where: tuple[str, str], entry: Entry, state_name: str, item: Any
    ) -> None:
        (part, prefix), name = where, entry.name
        stored = f"{name}/{MOMENTS.get(state_name, state_name)}"
        self._check_state(part, entry, state_name, item)
        if not isinstance(item, torch.Tensor):
            self._visit_collection(part, f"{prefix}{stored}", entry, state_name)
        elif is_wrapper(item):
            self._add_tensor(part, f"{prefix}{stored}", item)
        elif state_name in MASTER_NAMES:
            self._add_shards(MASTER_WEIGHTS, place_tensor(name, item, self._layout))
            if self._hooks is None:
                field_path = f"{part}.{prefix}{MASTER_FIELD}"
                self.flat.values.setdefault(field_path, ValueSlot([state_name], 0))
        else:
            placed = place_tensor(stored, item, self._layout)
            if prefix:  # the layout knows the parameter by its own name
                placed = [renamed(shard, f"{prefix}{shard.key}") for shard in placed]
            self._add_shards(part, placed)

    def _visit_collection(self, part: str, key: str, entry: Entry, state_name: str) -> None:
        """Take a state that is no tensor, all of which an optimizer that is loaded may lack."""
        path, item = f"{part}.{key}", entry.state[state_name]
        stored = None if self._hooks is None else self._hooks.structure(path)
        if stored not in (None, VALUE) and entry.parameter is not None:
            slot = ValueSlot(entry.state, state_name)
            self._make(part, key, slot, stored, entry.parameter.device)
            return
        self._inside += 1
        node = self._visit(part, key, entry.state, state_name, item)
        self._inside -= 1
        if node not in (VALUE, ABSENT):
            self._rooted(path, node)

    def _check_state(self, part: str, entry: Entry, state_name: str, item: Any) -> None:
        """Refuse what a rank keeps of a part of a parameter without saying of which part."""
        parameter = entry.parameter
        if parameter is None or not is_dtensor(parameter):
            return
        whole = all(placement.is_replicate() for placement in parameter.placements)
        if not whole and any(t.dim() and not is_dtensor(t) for t in _tensors_of(item)):
            raise CheckpointTypeError(
                f"{part}: the state {state_name!r} of {entry.name!r} is a plain tensor of this "
                f"rank, but the parameter is a DTensor with placements {parameter.placements}; "
                "no load could place it under another layout, so it cannot be saved"
            )

    def _visit_group(
        self,
        part: str,
        key: str,
        position: int,
        names: Sequence[str],
        group: MutableMapping[str, Any],
    ) -> None:
        where = f"{part}.{key}"
        fields = [
            name
            for name in hyperparameters(group)
            if not self._is_ignored(f"{where}.{position}.{name}")
        ]
        if self._hooks is None:
            number = position
            params = [{PARAMS: list(names)}, PARAMS]
            self._add_value(f"{where}.{number}.{PARAMS}", *params)
        else:
            number = self._hooks.group_number(where, names, position, fields)
        for name in fields:
            value = group[name]
            if isinstance(value, torch.Tensor) and not value.dim() and not is_dtensor(value):
                holder = [value.detach()]  # as a value it takes part in telling groups apart
                if self._hooks is not None:
                    self.flat.scalars.append((value, holder))
                self._add_value(f"{where}.{number}.{name}", holder, 0)
            else:
                self._visit(part, f"{key}.{number}.{name}", group, name, value)

    def _add_value(self, path: str, container: Any, place: Any) -> Node:
        if self._is_ignored(path):
            return ABSENT
        slot = ValueSlot(container, place)
        if path not in self.flat.values:
            self.flat.values[path] = slot
        elif self._hooks is not None and "param_groups." in path:  # two groups, one stored
            self.flat.more_values.append((path, slot))
        else:
            raise CheckpointValueError(f"two values have the path {path!r}; rename one")
        return VALUE

    def _add_tensor(self, part: str, key: str, tensor: torch.Tensor) -> Node:
        if (part, key) in self._tensor_keys and "param_groups." not in key:
            raise CheckpointValueError(f"two tensors of part {part!r} have the key {key!r}")
        self._tensor_keys.add((part, key))
        try:
            check_plain(key, tensor)
            if is_wrapper(tensor) and not is_dtensor(tensor):
                return self._add_wrapper(part, key, tensor)
            placed = place_tensor(key, tensor, self._layout)
        except CheckpointTypeError:
            if self._is_ignored(key):
                return ABSENT
            raise
        self._add_shards(part, placed)
        if not self._inside:
            return OWN
        if self._is_ignored(key):
            return ABSENT
        if any(shard.key != key for shard in placed):
            return OWN
        return tensor_node(tensor, f"{part}.{key}")

    def _add_wrapper(self, part: str, key: str, tensor: torch.Tensor) -> Node:
        """Take a tensor that is made of others as those: `KEY.NAME` for each."""
        path = f"{part}.{key}"
        if self._is_ignored(key):
            return ABSENT
        if ask_layout(self._layout, key.partition("/")[0], tensor) is not None:
            raise CheckpointTypeError(
                f"{path}: a {type(tensor).__name__} is whole on each rank, but the layout has a "
                "box for it"
            )
        described = describe_wrapper(tensor, path, remade=not self._in_module)
        if self._hooks is not None:
            known = self._hooks.structure(path)
            if isinstance(known, dict) and known.get(SUBCLASS, [described])[0] != described:
                raise LoadError(f"{path} was saved as {known[SUBCLASS][0]}, is {described}")
        self._inside += 1
        inner = [
            [name, self._add_tensor(part, f"{key}.{name}", held)]
            for name, held in wrapper_items(tensor)[0]
        ]
        self._inside -= 1
        return self._rooted(path, {SUBCLASS: [described, inner]})

    def _add_shards(self, part: str, shards: Sequence[Shard]) -> None:
        held = self.flat.parts.setdefault(part, [])
        for shard in shards:
            if not isinstance(shard, Shard):
                check_type(f"part {part!r}: a shard", shard, Shard)
            if self._ignores and self._is_ignored(shard.key):
                continue
            if shard.box.flattened_range is None:
                held.append(shard)
            else:
                self.flat.flat_keys.setdefault(part, set()).add(shard.key)
                held += shard.boxes()

    def _is_open(self, path: str, value: Mapping[Any, Any]) -> bool:
        """Whether a dict without tensors is taken item by item."""
        if self._hooks is not None and value and self._hooks.has_inside(path):
            return True
        return self._ignores_inside(path, value)

    def _ignores_inside(self, path: str, value: Mapping[Any, Any]) -> bool:
        return self._ignores and any(
            self._is_ignored(f"{path}.{name}")
            or (isinstance(item, Mapping) and self._ignores_inside(f"{path}.{name}", item))
            for name, item in value.items()
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _inner(node: Node) -> Node:
    """Return the state's node of an object's."""
    if isinstance(node, dict) and RANKS in node:
        node = node[RANKS]
    return node[STATEFUL][1][0] if isinstance(node, dict) and STATEFUL in node else node


def _are_shards(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Shard)


def _tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple | deque):
        return []
    return [tensor for item in items for tensor in _tensors_of(item)]  # type: ignore[attr-defined]


def _holds_tensors(value: object) -> bool:
    """Whether anything in a value is not for JSON; what holds none is stored as one value."""
    if isinstance(value, torch.Tensor | Shard | torch.optim.Optimizer) or is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, list | tuple | deque):
        return any(_holds_tensors(item) for item in value)
    return is_stored_array(value)
