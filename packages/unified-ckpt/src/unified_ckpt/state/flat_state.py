"""A state dict in pieces, as `flatten_state` gives it, and how they are put back.

`LoadHooks` is what a load tells it; a save has none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from unified_ckpt.geometry import Shard
from unified_ckpt.state.rebuilding import StoredState
from unified_ckpt.state.structure import Node, Stateful
from unified_ckpt.state.values import like_tuple


class LoadHooks(StoredState, Protocol):
    """What a load finds stored, and does to optimizers while its state dict is taken apart."""

    def prepare(
        self,
        optimizer: torch.optim.Optimizer,
        part: str,
        prefix: str,
        names: Sequence[Sequence[str]],
    ) -> None:
        """Change an optimizer before its state is read; `prefix` begins its keys in the part."""

    def group_number(
        self, where: str, names: Sequence[str], position: int, fields: Sequence[str]
    ) -> int:
        """Return the stored number of a group of these parameters, for these hyperparameters."""


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
        structure: nodes of states of objects and of collections with tensors, by dotted path.
        flat_keys: by part, keys that were given as flat ranges.
        optimized: by part, the stored keys of optimizers' parameters, and whether each has a state.
        stateful: objects, and a list of one: the state dict that they gave and will take back.
        more_values: as `values`, further places for values of the same path.
        tuples: where each tuple with tensors stands, and its items; outer ones first.
        remade: path and place of everything that was made again, and what was made.
        scalars: 0-dim tensors that are stored as values (a learning rate), and a list of the value.
        lost: (part, key) of tensors that the structure names, but that are not stored.
    """

    parts: dict[str, list[Shard]] = field(default_factory=dict)
    values: dict[str, ValueSlot] = field(default_factory=dict)
    empty: dict[str, ValueSlot] = field(default_factory=dict)
    structure: dict[str, Node] = field(default_factory=dict)
    flat_keys: dict[str, set[str]] = field(default_factory=dict)
    optimized: dict[str, dict[str, bool]] = field(default_factory=dict)
    stateful: list[tuple[Stateful, list[dict[str, Any]]]] = field(default_factory=list)
    more_values: list[tuple[str, ValueSlot]] = field(default_factory=list)
    tuples: list[tuple[ValueSlot, list[Any]]] = field(default_factory=list)
    remade: list[tuple[str, ValueSlot, Any]] = field(default_factory=list)
    scalars: list[tuple[torch.Tensor, list[Any]]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def all_values(self) -> Iterator[tuple[str, ValueSlot]]:
        """Yield every place of a value with its path; those of empty collections come first."""
        yield from {**self.empty, **self.values}.items()
        yield from self.more_values

    def rebuild(self) -> None:
        """Put what has been made and replaced into its collections, tuples and tensors."""
        for tensor, value in self.scalars:
            tensor.detach().fill_(value[0])
        for _, slot, made in self.remade:
            slot.put(made)
        for slot, items in reversed(self.tuples):
            old = slot.get()
            if any(a is not b for a, b in zip(old, items, strict=True)):
                slot.put(like_tuple(old, items))
