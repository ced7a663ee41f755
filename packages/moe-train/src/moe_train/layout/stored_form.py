"""Under which keys, and in which layout, transformers stores the tensors of a decoder.

`FamilyRules` says how transformers' module of an MoE block names and lays out its tensors,
weight-convert's spec of the family what files call the tensors of modules, and how they are cut.

    form = stored_form("mixtral", "model.layers.0.mlp.experts.down_proj", (8, 64, 96))
    form.views[3].key      # "model.layers.0.block_sparse_moe.experts.3.w2.weight"
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.model import rules_of, stored_name
from weight_convert import StoredView, get_spec

_BLOCK = re.compile(r"(?P<layer>.+\.layers\.\d+)\.mlp\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """How one tensor in memory is stored.

    Attributes:
        shape: its shape in the stored layout, over all ranks.
        views: which boxes of it, in that layout, are which stored tensors.
        to_stored, to_memory: change its layout and undo that. Experts stay on dim 0, so both work
            on any range of them; the result shares memory where the layouts are the same.
    """

    shape: tuple[int, ...]
    views: tuple[StoredView, ...]
    to_stored: Callable[[Tensor], Tensor]
    to_memory: Callable[[Tensor], Tensor]


def stored_form(model_type: str, name: str, shape: tuple[int, ...]) -> StoredForm:
    """The stored form of the parameter or buffer `name` of a `DecoderStage`.

    Args:
        model_type: the family.
        shape: of the whole tensor, over all ranks.
    """
    name = stored_name(name)
    spec = get_spec(model_type)
    block = _BLOCK.fullmatch(name)
    keys = {key.ours: key for key in rules_of(model_type).block.block_keys}
    if block is None or block["rest"] not in keys:
        views = spec.stored_views(name, shape)
        return StoredForm(shape=shape, views=views, to_stored=_same, to_memory=_same)
    key = keys[block["rest"]]
    stored_shape = tuple(key.to_theirs(torch.empty(shape, device="meta")).shape)
    return StoredForm(
        shape=stored_shape,
        views=spec.stored_views(f"{block['layer']}.mlp.{key.theirs}", stored_shape),
        to_stored=key.to_theirs,
        to_memory=key.to_ours,
    )


def plain_form(name: str, shape: tuple[int, ...]) -> StoredForm:
    """A tensor that is stored as it is."""
    view = StoredView(key=name, offset=(0,) * len(shape), shape=shape, stored_shape=shape)
    return StoredForm(shape=shape, views=(view,), to_stored=_same, to_memory=_same)


def _same(tensor: Tensor) -> Tensor:
    return tensor
