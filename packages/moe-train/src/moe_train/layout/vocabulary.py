"""The rows of the vocabulary: load a checkpoint that has fewer of them than the model.

Invariant: the rows of the checkpoint keep their place and value; every rank fills the others alike,
with the mean of those, so that copies of the embedding stay equal.

    if has_new_rows(layout, source):
        load_first_rows(layout, tensor, source, rank=0, load=load)
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moe_train.errors import TrainValueError
from moe_train.layout.parameters import ParameterLayout, StoredTensors, stored_tensors
from moe_train.layout.stored_form import plain_form
from moe_train.layout.tensor_cuts import BY_TOKEN
from moe_train.model import EMBEDDING
from unified_ckpt import read_index


def has_new_rows(layout: ParameterLayout, source: Path) -> bool:
    """Whether the model has rows of vocabulary in this parameter that `source` does not have.

    Raises:
        ValueError: it has fewer rows.
    """
    rows, name = layout.global_shape[0] if layout.global_shape else 0, layout.name
    if name not in BY_TOKEN:
        return False
    stored = _rows_of(source)
    if stored > rows:
        raise TrainValueError(
            f"{name} has {rows} rows and its checkpoint {stored}; a vocabulary is not made "
            "smaller, since tokens would lose their embeddings"
        )
    return stored < rows


@torch.no_grad()
def load_first_rows(
    layout: ParameterLayout,
    tensor: Tensor,
    source: Path,
    *,
    rank: int,
    load: Callable[[StoredTensors], None],
) -> None:
    """Fill this rank's rows of a parameter from fewer rows; all of them are held for a moment.

    The rows that `source` does not have become the mean of those that it has, taken in fp32.

    Args:
        load: fills what it is given from `source`.
    """
    rows, whole = _rows_of(source), tensor.new_empty(layout.global_shape)
    shape = (rows, *layout.global_shape[1:])
    fewer = replace(layout.whole(), global_shape=shape, form=plain_form(layout.name, shape))
    load(stored_tensors({layout.name: fewer}, {layout.name: whole[:rows]}, rank))
    whole[rows:] = whole[:rows].float().mean(0).to(whole.dtype)
    first = layout.first_row(rank)
    tensor.copy_(whole[first : first + len(tensor)])


def _rows_of(source: Path) -> int:
    """How many rows of vocabulary the weights in a checkpoint folder have."""
    shape = read_index(source, "model")[EMBEDDING].shape
    return int((shape or (0,))[0])
