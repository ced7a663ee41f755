"""The rows of the vocabulary: load a checkpoint that has fewer of them than the model.

Invariant: the rows of the checkpoint keep their place and value; every rank fills the others alike,
with the mean of those, so that copies of the embedding stay equal.

    fewer = first_rows(layouts, tensors, source)      # load into these
    fill_new_rows(tensors, source)
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moe_train.errors import TrainValueError
from moe_train.layout.parameters import ParameterLayout
from moe_train.layout.stored_form import plain_form
from moe_train.model import EMBEDDING
from unified_ckpt import read_index

_BY_TOKEN = frozenset({EMBEDDING, "lm_head.weight"})


def first_rows(
    layouts: Mapping[str, ParameterLayout], tensors: Mapping[str, Tensor], source: Path
) -> tuple[dict[str, ParameterLayout], dict[str, Tensor]]:
    """Layouts and tensors as of the vocabulary of `source`; these tensors share the given's memory.

    Raises:
        ValueError: the tensors have fewer rows.
    """
    rows = _rows_of(source)
    new_layouts, new_tensors = dict(layouts), dict(tensors)
    for name in _BY_TOKEN & tensors.keys():
        if rows > tensors[name].shape[0]:
            raise TrainValueError(
                f"{name} has {tensors[name].shape[0]} rows and its checkpoint {rows}; a vocabulary "
                "is not made smaller, since tokens would lose their embeddings"
            )
        shape = (rows, *layouts[name].global_shape[1:])
        new_layouts[name] = replace(layouts[name], global_shape=shape, form=plain_form(name, shape))
        new_tensors[name] = tensors[name][:rows]
    return new_layouts, new_tensors


@torch.no_grad()
def fill_new_rows(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Give the rows that `source` does not have the mean of those that it has, taken in fp32."""
    rows = _rows_of(source)
    for name in _BY_TOKEN & tensors.keys():
        weight = tensors[name]
        weight[rows:] = weight[:rows].float().mean(0).to(weight.dtype)


def _rows_of(source: Path) -> int:
    """How many rows of vocabulary the weights in a checkpoint folder have."""
    shape = read_index(source, "model")[EMBEDDING].shape
    return int((shape or (0,))[0])
