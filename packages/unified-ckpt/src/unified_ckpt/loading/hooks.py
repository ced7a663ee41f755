"""What a load tells `flatten_state`: what is stored, and memory for states of fresh optimizers.

Invariant: what a load added to an optimizer is gone again if it fails.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unified_ckpt.geometry import Shape
from unified_ckpt.geometry.tensors import dtype_of, is_wrapper
from unified_ckpt.loading.optimizer_memory import StoredStates, allocate_states, remove_states
from unified_ckpt.loading.sources import Sources
from unified_ckpt.options import MASTER_WEIGHTS, LoadOptions, base_key, matcher
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.state import Structures, place_tensor
from unified_ckpt.state.optimizer import StoredGroups

_ON_DEVICE = ("fused", "capturable")  # options that count steps on the device of the parameter


class StoredHooks:
    """Gives fresh optimizers memory for stored states, and tells what a checkpoint holds.

    Attributes:
        is_ignored: whether a key or path is left alone.
        lost_masters: (part, key) of master weights that optimizers had, and that are not stored.
    """

    def __init__(self, sources: Sources, options: LoadOptions) -> None:
        self._sources = sources
        self._layout = options.layout
        self._ignores = bool(options.ignored_keys)
        self.is_ignored = matcher(options.ignored_keys)
        self._groups = StoredGroups(sources.values.encoded)
        self._structures = Structures(sources.structure)
        self._tensors: dict[str, dict[str, StoredTensor | SplitTensor]] = {}
        self._added: list[tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, str]]]] = []
        self.lost_masters: list[tuple[str, str]] = []

    def structure(self, path: str) -> Any:
        """Return the node of a state, `"value"` if it is one value; None for what is neither."""
        node, values = self._structures.find(path), self._sources.values
        if node is None and values.typed and path in values.encoded:
            return "value"
        return node

    def has_inside(self, path: str) -> bool:
        """Return whether there are structures of what was saved inside of a path."""
        return self._structures.has_inside(path)

    def structures_inside(self) -> dict[str, list[str]]:
        """Return what is made again by its structure, by each path that it is inside of."""
        return self._structures.around()

    def value(self, path: str) -> tuple[bool, Any]:
        """Return whether a value of this path is stored, and the value."""
        return self._sources.values.get(path)

    def stored(self, part: str, key: str) -> tuple[Shape, torch.dtype] | None:
        """Return shape and dtype of a stored tensor, as it will be once it is loaded."""
        source = self._sources.find(part, key)
        if source is None:
            return None
        index = self._sources.index(source.part)
        if source.part not in self._tensors:
            self._tensors[source.part] = index.resolve(index.tensor_keys())
        found = self._tensors[source.part][source.key]
        dtype = dtype_of("F32" if index.scales(source.key) else found.dtype).torch_dtype
        return None if found.shape is None or dtype is None else (tuple(found.shape), dtype)

    def prepare(
        self,
        optimizer: torch.optim.Optimizer,
        part: str,
        prefix: str,
        names: Sequence[Sequence[str]],
    ) -> None:
        """Make memory for the stored states that an optimizer lacks."""
        stored = self._without_ignored(self._sources.states_of(part, prefix), part, prefix)
        on_device = [
            self._counts_on_device(f"{part}.{prefix}param_groups", of_group, position, group)
            for position, (of_group, group) in enumerate(
                zip(names, optimizer.param_groups, strict=True)
            )
        ]
        added = allocate_states(optimizer, stored, names, on_device, self._keys_of)
        self._added.append((optimizer, added.states))
        self.lost_masters += [
            (MASTER_WEIGHTS, key) for key in added.lost_masters if not self.is_ignored(key)
        ]

    def _counts_on_device(
        self, where: str, names: Sequence[str], position: int, group: dict[str, Any]
    ) -> bool:
        """Whether a group's parameters count steps on their device, once its fields are loaded."""
        number = self._groups.number(where, names, position, ())
        for name in _ON_DEVICE:
            found, value = self._sources.values.get(f"{where}.{number}.{name}")
            if value if found and name in group else group.get(name):
                return True
        return False

    def _keys_of(self, name: str, parameter: torch.Tensor) -> list[tuple[str, Shape]]:
        """Return the stored keys of a parameter, and the shapes of those tensors."""
        if is_wrapper(parameter):
            return [(name, tuple(parameter.shape))]
        placed = place_tensor(name, parameter, self._layout)
        return [(shard.key, shard.box.global_shape) for shard in placed]

    def _without_ignored(self, stored: StoredStates, part: str, prefix: str) -> StoredStates:
        """Leave out what will not be read, but the tensors of a parameter with other states."""
        if not self._ignores:
            return stored
        taken = {base_key(key) for key in stored.tensors if not self.is_ignored(f"{prefix}{key}")}
        paths = {key: f"{part}.{prefix}{key}" for key in (*stored.values, *stored.structures)}
        return replace(
            stored,
            tensors={k: tensor for k, tensor in stored.tensors.items() if base_key(k) in taken},
            values=[key for key in stored.values if not self.is_ignored(paths[key])],
            structures=[key for key in stored.structures if not self.is_ignored(paths[key])],
            master_dtype=lambda k: None if self.is_ignored(k) else stored.master_dtype(k),
        )

    def group_number(
        self, where: str, names: Sequence[str], position: int, fields: Sequence[str]
    ) -> int:
        """Return the stored number of a group."""
        return self._groups.number(where, names, position, fields)

    def finish(self) -> None:
        """Move steps to where the loaded hyperparameters need them."""
        for optimizer, _ in self._added:
            for group in optimizer.param_groups:
                if any(group.get(name) for name in _ON_DEVICE):
                    for parameter in group["params"]:
                        step = optimizer.state.get(parameter, {}).get("step")
                        if isinstance(step, torch.Tensor) and step.device != parameter.device:
                            optimizer.state[parameter]["step"] = step.to(parameter.device)

    def undo(self) -> None:
        """Take away what was added, so that a failed load leaves a fresh optimizer fresh."""
        for optimizer, added in self._added:
            remove_states(optimizer, added)
