"""Which stored tensors a tensor is part of: its own placements say it, or the layout does.

place_tensor("w", tensor, {"w": Box((8, 4), (4, 0), (4, 4))})
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import Box, Shard, check_plain
from unified_ckpt.geometry.layouts import Layout, dtensor_shards, is_dtensor


def place_tensor(key: str, tensor: torch.Tensor, layout: Layout | None) -> Sequence[Shard]:
    """Return what a tensor is of which stored tensors: its placements or the layout say it."""
    check_plain(key, tensor)
    if is_dtensor(tensor):
        return dtensor_shards(key, tensor)
    if layout is None:
        return [Shard(key=key, tensor=tensor, box=_whole_box(tensor.shape))]
    box = ask_layout(layout, key, tensor)
    parameter, slash, state = key.partition("/")
    if box is None and slash and tensor.dim():
        box = ask_layout(layout, parameter, tensor)
        if isinstance(box, Box):
            box = _box_of_state(key, tensor, box)
        elif box is not None:
            box = [renamed(shard, f"{shard.key}/{state}") for shard in box]
    if box is None:
        box = _whole_box(tensor.shape)
    return [Shard(key=key, tensor=tensor, box=box)] if isinstance(box, Box) else box


@lru_cache(maxsize=4096)
def _whole_box(shape: torch.Size) -> Box:
    """Return the box of a whole tensor; a model has few shapes, and a box costs a check."""
    return Box.whole(shape)


def _box_of_state(key: str, tensor: torch.Tensor, box: Box) -> Box | None:
    """Return the parameter's box for a state of its shape; None if both are whole."""
    if tuple(tensor.shape) == box.memory_shape:
        return box
    if box.flattened_range is None and box.local_shape == box.global_shape:
        return None
    raise CheckpointValueError(
        f"{key!r} of shape {tuple(tensor.shape)} is a state of a part of a parameter, "
        f"{box.local_shape} of {box.global_shape}, but of another shape, so nothing says which "
        f"part of a stored tensor it is; give it a box: a layout is asked for {key!r} first"
    )


def ask_layout(
    layout: Layout | None, key: str, tensor: torch.Tensor
) -> Box | Sequence[Shard] | None:
    """Return what a layout says of a tensor, None if nothing."""
    if layout is None:
        return None
    return layout.get(key) if isinstance(layout, Mapping) else layout(key, tensor)


def renamed(shard: Shard, key: str) -> Shard:
    """Return a shard under another key."""
    return Shard(key=key, tensor=shard.tensor, box=shard.box)


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
