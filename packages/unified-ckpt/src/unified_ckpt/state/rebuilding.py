"""Makes a nested state again from its stored structure, whatever the state that is filled holds.

Tensors of the template that have the stored shape and dtype are used, and so are DTensors and
tensors that a layout gives a box; all others are new ones in CPU memory, of the whole stored
tensor. The reads that fill them come later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.layouts import is_dtensor
from unified_ckpt.state.structure import (
    ABSENT,
    ARRAY,
    OWN,
    RANKS,
    STATEFUL,
    SUBCLASS,
    TYPED,
    VALUE,
    Node,
    Stateful,
    as_typed,
    items_of_node,
    make_container,
    make_wrapper,
)

MISSING = object()  # stands for what is not there, where None would be a value


class StoredState(Protocol):
    """What a checkpoint holds, for a state that is made again."""

    def structure(self, path: str) -> Node | None:
        """Return the structure of what was saved at a path, None if no template need be without."""

    def has_inside(self, path: str) -> bool:
        """Return whether there are structures of what was saved inside of a path."""

    def value(self, path: str) -> tuple[bool, Any]:
        """Return whether a value of this path is stored, and the value."""

    def stored(self, part: str, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a stored tensor, None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilder:
    """Makes states again.

    Attributes:
        stored: what the checkpoint holds.
        place: returns the shards of a tensor by its stored key.
        add: takes the shards of a part that are to be read.
        visit: takes what must be filled in place: part, key, and the object.
        is_ignored: whether a path or key is left alone.
        lost: takes paths of values, and (part, key) of tensors, that are not stored.
    """

    stored: StoredState
    place: Callable[[str, torch.Tensor], Sequence[Shard]]
    add: Callable[[str, Sequence[Shard]], None]
    visit: Callable[[str, str, Any], None]
    is_ignored: Callable[[str], bool]
    lost: Callable[[str, str], None]

    def make(
        self, part: str, key: str, node: Node, template: Any, device: torch.device | None = None
    ) -> Any:
        """Return what a node says, `MISSING` if nothing of it is to be loaded."""
        path = f"{part}.{key}" if key else part
        if (
            node == ABSENT
            or self.is_ignored(path)
            or (node != OWN and self.is_ignored(key or "\n"))
        ):
            return template
        if node == VALUE:
            found, value = self.stored.value(path)
            if not found:
                self.lost(path, "")
            return value if found else template
        if node == OWN:
            return self._fill(part, key, template)
        if not isinstance(node, dict) or TYPED in node:
            return self._tensor(part, key or part, node, template, device)
        return self._collection(part, key, node, template, device)

    def _collection(
        self,
        part: str,
        key: str,
        node: Mapping[str, Any],
        template: Any,
        device: torch.device | None,
    ) -> Any:
        if RANKS in node:
            return self.make(part, key, node[RANKS], template, device)
        if STATEFUL in node:
            return self._stateful(part, key, node[STATEFUL][1][0], template)
        wraps = SUBCLASS in node
        items: list[tuple[Any, Any]] = []
        for place, name, item in items_of_node(node):
            known = getattr(template, name, MISSING) if wraps else _item(template, place)
            made = self.make(part, f"{key}.{name}" if key else name, item, known, device)
            if made is not MISSING or "@namedtuple" in node:  # which has all its fields
                items.append((place, None if made is MISSING else made))
        if wraps:
            return make_wrapper(node[SUBCLASS][0], dict(items))
        return make_container(node, items)

    def _stateful(self, part: str, key: str, node: Node, template: Any) -> Any:
        """Return the state of an object inside of a state; or fill the object, if there is one."""
        if isinstance(template, Stateful):
            return self._fill(part, key, template)
        return self.make(part, key, node, template)

    def _fill(self, part: str, key: str, template: Any) -> Any:
        if template is MISSING:
            self.lost(f"{part}.{key}" if key else part, "")
        else:
            self.visit(part, key, template)
        return template

    def _tensor(
        self, part: str, key: str, node: Node, template: Any, device: torch.device | None
    ) -> Any:
        stored = self.stored.stored(part, key)
        if stored is None:
            self.lost(part, key)
            return template
        shape, dtype = stored
        if isinstance(template, torch.Tensor) and node != ARRAY:
            placed = self.place(key, template)
            boxed = is_dtensor(template) or any(s.box.local_shape != shape for s in placed)
            fits = tuple(template.shape) == shape and template.dtype == dtype
            fits = fits and (0 not in template.stride() or template.is_contiguous())
            if fits or (boxed and {s.box.global_shape for s in placed} == {shape}):
                self.add(part, placed)
                return template
        new = torch.zeros(shape, dtype=dtype, device=None if node == ARRAY else device)
        self.add(part, self.place(key, new) if node == ARRAY else [_whole(key, new)])
        if node == ARRAY:
            return new.numpy()
        return new if not isinstance(node, dict) else as_typed(new, *node[TYPED])


def _whole(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.of(key, tensor, global_shape=tensor.shape, offset=[0] * tensor.dim())


def _item(template: Any, place: Any) -> Any:
    """Return what a template has at a key or a place."""
    if isinstance(template, Mapping):
        return template.get(place, MISSING)
    if isinstance(template, list | tuple) and isinstance(place, int) and place < len(template):
        return template[place]
    return MISSING
