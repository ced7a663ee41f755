"""Under which keys, and in which layout, transformers stores the tensors of a decoder.

`FamilyRules` says how a family names and lays out the tensors of an MoE block and what files spell
otherwise, weight-convert how a fused expert tensor is cut into stored tensors.

    form = stored_form("mixtral", "model.layers.0.mlp.experts.down_proj", (8, 64, 96))
    form.views[3].key      # "model.layers.0.block_sparse_moe.experts.3.w2.weight"
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.model import rules_of, stored_name
from weight_convert import FamilySpec, FusedExperts, StoredView

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
    block = _BLOCK.fullmatch(name)
    rules = rules_of(model_type)
    keys = {key.ours: key for key in rules.block.block_keys}
    if block is None or block["rest"] not in keys:
        return plain_form(name, shape)
    key = keys[block["rest"]]
    spec = _spec_of_experts(model_type)
    if spec is not None and spec.fused_group(name) is not None:
        views = spec.stored_views(name, shape)
        return StoredForm(shape=shape, views=views, to_stored=key.to_theirs, to_memory=key.to_ours)
    theirs = f"{block['layer']}.mlp.{key.theirs}".replace(*rules.renamed_on_disk)
    stored_shape = tuple(key.to_theirs(torch.empty(shape, device="meta")).shape)
    return StoredForm(
        shape=stored_shape,
        views=plain_form(theirs, stored_shape).views,
        to_stored=key.to_theirs,
        to_memory=key.to_ours,
    )


def plain_form(name: str, shape: tuple[int, ...]) -> StoredForm:
    """A tensor that is stored as it is."""
    view = StoredView(key=name, offset=(0,) * len(shape), shape=shape, stored_shape=shape)
    return StoredForm(shape=shape, views=(view,), to_stored=_same, to_memory=_same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _spec_of_experts(model_type: str) -> FamilySpec | None:
    """How fused experts are cut; None where they are stored fused."""
    rules = rules_of(model_type)
    if rules.expert_parts is None:
        return None
    parts = tuple(
        f"{{layer}}.mlp.experts.{{expert}}.{part}.weight".replace(*rules.renamed_on_disk)
        for part in rules.expert_parts
    )
    return FamilySpec(
        model_type=model_type,
        experts=(
            FusedExperts(fused="{layer}.mlp.experts.gate_up_proj", parts=parts[:2]),
            FusedExperts(fused="{layer}.mlp.experts.down_proj", parts=parts[2:]),
        ),
        router="{layer}.mlp.gate.weight".replace(*rules.renamed_on_disk),
        num_experts_keys=("num_local_experts", "num_experts", "n_routed_experts"),
    )
