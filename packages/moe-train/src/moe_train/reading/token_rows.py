"""A row of token ids that were made elsewhere, with what says which of them are targets.

Invariant: `labels` and `attention_mask` mean what they mean to a model of transformers: a label is
the token itself, not the one behind it, or -100; where the mask is 0 there is no token.

    row = token_row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "input_ids", "line 1")
    row.ids, row.trained
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.errors import TrainValueError
from moe_train.reading.arrays import ATTENTION, LABELS, MASK_FIELD
from moe_train.reading.rows import field_of

_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRow:
    """The ids of a row [N], nonzero where one is a target [N] (None: everywhere), and padding."""

    ids: NDArray[Any]
    trained: NDArray[Any] | None
    num_padding: int


def token_row(value: Mapping[str, Any], field: str, place: str) -> TokenRow | None:
    """The tokens of a row; None where it has none.

    Raises:
        ValueError: a field is no list of numbers, or does not fit the ids; names the place.
    """
    listed = field_of(value, field, place)
    if not listed:
        return None
    ids = _whole_numbers(listed, "iu")
    if ids is None:
        raise TrainValueError(f"{place}: field {field!r} is no list of token ids")
    trained = _mask(value, MASK_FIELD, len(ids), place)
    if trained is None:
        trained = _from_labels(value, ids, place)
    attention = _mask(value, ATTENTION, len(ids), place)
    if attention is None or attention.all():
        return TokenRow(ids=ids, trained=trained, num_padding=0)
    there = attention != 0
    own = None if trained is None else trained[there]
    return TokenRow(ids=ids[there], trained=own, num_padding=int((~there).sum()))


def _from_labels(value: Mapping[str, Any], ids: NDArray[Any], place: str) -> NDArray[Any] | None:
    labels = _mask(value, LABELS, len(ids), place, "iu", f"the id, or {_IGNORED}")
    if labels is None:
        return None
    trained: NDArray[np.bool_] = labels != _IGNORED
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        raise TrainValueError(
            f"{place}: {LABELS} has {labels[at]} at {at}, where the token is {ids[at]}; expected "
            f"the token itself (labels are shifted in training), or {_IGNORED} for no target"
        )
    return trained


def _mask(
    value: Mapping[str, Any],
    name: str,
    length: int,
    place: str,
    kinds: str = "biu",
    meaning: str = "0 or 1",
) -> NDArray[Any] | None:
    given = value.get(name)
    numbers = None if given is None else _whole_numbers(given, kinds)
    if given is not None and (numbers is None or len(numbers) != length):
        raise TrainValueError(
            f"{place}: {name} is {type(given).__name__} {given!r:.50}, expected a list of {length} "
            f"numbers, {meaning} for each token"
        )
    return numbers


def _whole_numbers(listed: Any, kinds: str) -> NDArray[Any] | None:
    """The numbers of a list, of these kinds of dtypes; None where it is anything else."""
    try:
        numbers = np.array(listed if isinstance(listed, list) else "")
    except ValueError:  # lists of different lengths in it
        return None
    return numbers if numbers.dtype.kind in kinds and numbers.ndim == 1 else None
