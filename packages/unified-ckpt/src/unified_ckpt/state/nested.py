"""A nested state dict as shards by part and plain values by path, and the way back.

The keys at the top are parts: `{"model": model, "optimizer": optimizer, "scheduler": {...}}`.
Tensors inside become stored tensors under their dotted keys, optimizer states under their
parameter's key, and Python values (bool, int, float, str, None, lists and dicts of them) JSON.
A tensor at the top belongs to the part `model`; a sequence of `Shard`s at the top is a part.

    flat = flatten_state({"model": model, "epoch": 3})
    flat.parts["model"], flat.values["epoch"].get()
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.geometry import Box, Shard
from unified_ckpt.geometry.layouts import Layout, dtensor_shards, is_dtensor
from unified_ckpt.options import MASTER_WEIGHTS, MODEL, matcher
from unified_ckpt.state.optimizer import (
    MASTER_FIELD,
    MASTER_NAMES,
    MOMENTS,
    PARAMS,
    hyperparameters,
    is_optimizer_state,
    optimizer_entries,
    parameter_names,
)
from unified_ckpt.state.values import like_tuple

StateDict = Mapping[str, Any]


class LoadHooks(Protocol):
    """What a load does to optimizers while its state dict is taken apart."""

    def prepare(self, optimizer: torch.optim.Optimizer, part: str, prefix: str) -> None:
        """Change an optimizer before its state is read; `prefix` begins its keys in the part."""

    def group_number(
        self, where: str, names: Sequence[str], position: int, fields: Sequence[str]
    ) -> int:
        """Return the stored number of a group of these parameters, for these hyperparameters."""


@runtime_checkable
class Stateful(Protocol):
    """An object that keeps its own state: modules, schedulers, data loaders; torch's protocol."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state."""


@dataclass(frozen=True, slots=True)
class ValueSlot:
    """Where a Python value stands in a state dict."""

    container: Any
    key: Any

    def get(self) -> Any:
        """Return the value that stands there."""
        return self.container[self.key]

    def put(self, value: Any) -> None:
        """Replace the value."""
        self.container[self.key] = value


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state dict in pieces.

    Attributes:
        parts: shards by part, in boxes (no flat ranges).
        values: where each Python value stands, by dotted path.
        empty: likewise, empty collections at the top: parts without tensors, or values.
        flat_keys: by part, keys that were given as flat ranges.
        stateless: (part, parameter) pairs of which an optimizer has no state yet.
        stateful: objects, and a list of one: the state dict that they gave and will take back.
        more_values: as `values`, further places for values of the same path.
        tuples: where each tuple with tensors stands, and its items; outer ones first.
        scalars: 0-dim tensors that are stored as values (a learning rate), and a list of the value.
    """

    parts: dict[str, list[Shard]] = field(default_factory=dict)
    values: dict[str, ValueSlot] = field(default_factory=dict)
    empty: dict[str, ValueSlot] = field(default_factory=dict)
    flat_keys: dict[str, set[str]] = field(default_factory=dict)
    stateless: list[tuple[str, str]] = field(default_factory=list)
    stateful: list[tuple[Stateful, list[dict[str, Any]]]] = field(default_factory=list)
    more_values: list[tuple[str, ValueSlot]] = field(default_factory=list)
    tuples: list[tuple[ValueSlot, list[Any]]] = field(default_factory=list)
    scalars: list[tuple[torch.Tensor, list[Any]]] = field(default_factory=list)

    def all_values(self) -> Iterator[tuple[str, ValueSlot]]:
        """Yield every place of a value with its path; those of empty collections come first."""
        yield from {**self.empty, **self.values}.items()
        yield from self.more_values

    def rebuild(self) -> None:
        """Put items and values that have been replaced into their tuples and tensors."""
        for tensor, value in self.scalars:
            tensor.detach().fill_(value[0])
        for slot, items in reversed(self.tuples):
            old = slot.get()
            if any(a is not b for a, b in zip(old, items, strict=True)):
                slot.put(like_tuple(old, items))


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
        hooks: what a load does to optimizers; None for a save.

    Raises:
        CheckpointTypeError: a leaf is neither a tensor nor JSON; the message names its path.
        CheckpointValueError: a tensor does not fit its box, a DTensor is `Partial`, or two leaves
            have one dotted path.
    """
    check_type("state_dict", state_dict, Mapping)
    walker = _Walker(layout, ignored_keys, hooks)
    for name, value in state_dict.items():
        walker.visit_top(name, state_dict, value)
    return walker.flat


def find_tied_keys(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return alias -> first key of plain tensors that are the same memory, for `tied` options.

    The first of them in the order of `state_dict` is the stored key, as in transformers, whose
    models name the embedding before the head. Under pipeline parallelism the two may be on
    different ranks, which only the caller knows.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for key, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor) or is_dtensor(tensor) or not tensor.numel():
            continue
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if first.setdefault(memory, key) != key:
            tied[key] = first[memory]
    return tied


class _Walker:
    """Goes through a nested state dict once; see `flatten_state`."""

    def __init__(
        self, layout: Layout | None, ignored_keys: Sequence[str], hooks: LoadHooks | None
    ) -> None:
        self.flat = FlatState()
        self._layout = layout
        self._ignores = bool(ignored_keys)
        self._is_ignored = matcher(ignored_keys)
        self._hooks = hooks
        self._tensor_keys: set[tuple[str, str]] = set()

    def visit_top(self, name: str, container: StateDict, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(MODEL, name, value)
        elif isinstance(value, Shard):
            self._add_shards(MODEL, [value])
        elif isinstance(value, list | tuple) and _holds_tensors(value):
            self._add_shards(name, value)
        elif isinstance(value, Mapping | list | tuple) and not value:
            self.flat.parts.setdefault(name, [])
            self.flat.empty[name] = ValueSlot(container, name)
        else:
            self._visit(name, "", container, name, value)

    def _visit(self, part: str, key: str, container: Any, place: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(part, key, value)
        elif isinstance(value, Shard):
            self._add_shards(part, [value])
        elif is_optimizer_state(value):
            self._visit_optimizer(part, key, value)
        elif isinstance(value, Stateful):
            holder = [value.state_dict()]
            self.flat.stateful.append((value, holder))
            self._visit(part, key, holder, 0, holder[0])
        elif isinstance(value, Mapping) and (
            _holds_tensors(value) or self._ignores_inside(f"{part}.{key}" if key else part, value)
        ):
            for name, item in value.items():
                self._visit(part, f"{key}.{name}" if key else str(name), value, name, item)
        elif _are_shards(value):
            self._add_shards(part, value)
        elif isinstance(value, list | tuple) and _holds_tensors(value):
            self._visit_items(part, key, ValueSlot(container, place), value)
        else:
            self._add_value(f"{part}.{key}" if key else part, container, place)

    def _visit_items(self, part: str, key: str, slot: ValueSlot, value: Sequence[Any]) -> None:
        items = value
        if isinstance(value, tuple):
            items = list(value)
            self.flat.tuples.append((slot, items))
        for number, item in enumerate(items):
            self._visit(part, f"{key}.{number}", items, number, item)

    def _visit_optimizer(self, part: str, key: str, value: Any) -> None:
        prefix = f"{key}." if key else ""
        if isinstance(value, torch.optim.Optimizer) and self._hooks is not None:
            self._hooks.prepare(value, part, prefix)
        entries, groups = optimizer_entries(value, part)
        for name, state in entries:
            if not state:
                self.flat.stateless.append((part, f"{prefix}{name}"))
            for state_name, item in state.items():
                self._visit_state((part, prefix, name), state_name, state, item)
        for position, group in enumerate(groups):
            self._visit_group(part, f"{prefix}param_groups", position, group)

    def _visit_state(
        self,
        parameter: tuple[str, str, str],
        state_name: str,
        state: MutableMapping[str, Any],
        item: Any,
    ) -> None:
        part, prefix, name = parameter
        stored = f"{name}/{MOMENTS.get(state_name, state_name)}"
        if not isinstance(item, torch.Tensor):
            self._visit(part, f"{prefix}{stored}", state, state_name, item)
        elif state_name in MASTER_NAMES:
            self._add_shards(MASTER_WEIGHTS, place_tensor(name, item, self._layout))
            if self._hooks is None:
                field_path = f"{part}.{prefix}{MASTER_FIELD}"
                self.flat.values.setdefault(field_path, ValueSlot([state_name], 0))
        else:
            placed = place_tensor(stored, item, self._layout)
            if prefix:  # the layout knows the parameter by its own name
                placed = [_renamed(shard, f"{prefix}{shard.key}") for shard in placed]
            self._add_shards(part, placed)

    def _visit_group(
        self, part: str, key: str, position: int, group: MutableMapping[str, Any]
    ) -> None:
        names = parameter_names(group, part)
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
                holder = [value.item()]  # as a value it takes part in telling groups apart
                self.flat.scalars.append((value, holder))
                self._add_value(f"{where}.{number}.{name}", holder, 0)
            else:
                self._visit(part, f"{key}.{number}.{name}", group, name, value)

    def _add_value(self, path: str, container: Any, place: Any) -> None:
        if self._is_ignored(path):
            return
        slot = ValueSlot(container, place)
        if path not in self.flat.values:
            self.flat.values[path] = slot
        elif self._hooks is not None and "param_groups." in path:  # two groups, one stored
            self.flat.more_values.append((path, slot))
        else:
            raise CheckpointValueError(f"two values have the path {path!r}; rename one")

    def _add_tensor(self, part: str, key: str, tensor: torch.Tensor) -> None:
        if (part, key) in self._tensor_keys and "param_groups." not in key:
            raise CheckpointValueError(f"two tensors of part {part!r} have the key {key!r}")
        self._tensor_keys.add((part, key))
        self._add_shards(part, place_tensor(key, tensor, self._layout))

    def _add_shards(self, part: str, shards: Sequence[Shard]) -> None:
        held = self.flat.parts.setdefault(part, [])
        for shard in shards:
            check_type(f"part {part!r}: a shard", shard, Shard)
            if self._ignores and self._is_ignored(shard.key):
                continue
            if shard.box.flattened_range is None:
                held.append(shard)
            else:
                self.flat.flat_keys.setdefault(part, set()).add(shard.key)
                held += shard.boxes()

    def _ignores_inside(self, path: str, value: Mapping[Any, Any]) -> bool:
        return self._ignores and any(
            self._is_ignored(f"{path}.{name}")
            or (isinstance(item, Mapping) and self._ignores_inside(f"{path}.{name}", item))
            for name, item in value.items()
        )


def place_tensor(key: str, tensor: torch.Tensor, layout: Layout | None) -> Sequence[Shard]:
    """Return what a tensor is of which stored tensors: its placements or the layout say it."""
    if is_dtensor(tensor):
        return dtensor_shards(key, tensor)
    box = _ask(layout, key, tensor)
    parameter, slash, state = key.partition("/")
    if box is None and slash and tensor.dim():
        box = _ask(layout, parameter, tensor)
        if isinstance(box, Box):
            box = box if tuple(tensor.shape) == box.memory_shape else None
        elif box is not None:
            box = [_renamed(shard, f"{shard.key}/{state}") for shard in box]
    if box is None:
        box = Box.whole(tensor.shape)
    return [Shard(key=key, tensor=tensor, box=box)] if isinstance(box, Box) else box


def _ask(layout: Layout | None, key: str, tensor: torch.Tensor) -> Box | Sequence[Shard] | None:
    if layout is None:
        return None
    return layout.get(key) if isinstance(layout, Mapping) else layout(key, tensor)


def _renamed(shard: Shard, key: str) -> Shard:
    return Shard(key=key, tensor=shard.tensor, box=shard.box)


def _are_shards(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Shard)


def _holds_tensors(value: object) -> bool:
    """Whether anything in a value is not for JSON; what holds none is stored as one value."""
    if isinstance(value, torch.Tensor | Shard | torch.optim.Optimizer | Stateful):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensors(item) for item in value)
