"""The sources of a corpus as one: sequences of several token files in one batch.

Invariant: a row is (source, sequence of that source); which rows a batch has is decided elsewhere.
Numbered as a whole, sequences of all sources are interleaved in proportion to their numbers, so
that the first N stand for every source, and all of them are each sequence once.

    train, validation = open_joined(prepared, sequence_length=256, reset_at_documents=True)
    validation.batch(range(64))
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.data.mixture import Mixture
from moe_train.data.packing import Batch, SequenceForm, Split, open_split
from moe_train.data.prepare import PreparedCorpus
from moe_train.errors import TrainValueError
from moe_train.labels import IGNORED_LABEL

_TRAINABLE = ("text", "chat", "tokens")
_LOOKED_AT = 64  # sequences at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSplit:
    """One part, training or held out, of every source; of one sequence length.

    Attributes:
        names: of the sources.
        splits: the sequences of each.
        order: how their sequences are numbered as a whole.
    """

    names: tuple[str, ...]
    splits: tuple[Split, ...]
    order: Mixture

    @property
    def num_sequences(self) -> int:
        """Sequences of all sources."""
        return sum(split.num_sequences for split in self.splits)

    def batch(self, sequence_indices: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The sequences with these numbers among those of all sources.

        Raises:
            ValueError: a number is outside of [0, num_sequences).
        """
        index = np.asarray(sequence_indices, dtype=np.int64).reshape(-1)
        if len(self.splits) > 1 and index.size and int(index.max()) >= self.num_sequences:
            raise TrainValueError(
                f"sequence numbers must be in [0, {self.num_sequences}), got {int(index.max())}"
            )
        return self.rows(*self.order.locate(index))

    def rows(self, source: NDArray[np.int64], sequence: NDArray[np.int64]) -> Batch:
        """The given sequences of the given sources, in this order.

        Args:
            source: int64 [B].
            sequence: number within the source, int64 [B].
        """
        present = np.unique(source)
        if len(present) <= 1:
            return self.splits[present[0] if len(present) else 0].batch(sequence)
        rows = [np.flatnonzero(source == place) for place in present]
        parts = [
            self.splits[place].batch(sequence[own])
            for place, own in zip(present, rows, strict=True)
        ]
        back = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return Batch(
            input_ids=torch.cat([part.input_ids for part in parts])[back],
            labels=torch.cat([part.labels for part in parts])[back],
            position_ids=torch.cat([part.position_ids for part in parts])[back],
        )

    def describe(self) -> list[str]:
        """A line for each source: how its documents fill sequences, and what that cuts."""
        return [_describe(name, s) for name, s in zip(self.names, self.splits, strict=True)]


def open_joined(
    prepared: PreparedCorpus, *, sequence_length: int, reset_at_documents: bool
) -> tuple[JoinedSplit, JoinedSplit]:
    """The training and the held-out part of a corpus.

    Raises:
        ValueError: a source is too small, cannot be packed so, has no token to predict, or holds
            what is not trained on.
    """
    form = SequenceForm(
        length=sequence_length,
        pad_token_id=prepared.pad_token_id,
        reset_at_documents=reset_at_documents,
    )
    return _open(prepared, form, "train"), _open(prepared, form, "validation")


def _open(prepared: PreparedCorpus, form: SequenceForm, part: str) -> JoinedSplit:
    splits = []
    for source in prepared.sources:
        if source.kind not in _TRAINABLE:
            raise TrainValueError(
                f'source {source.name} has kind="{source.kind}", which `moe-train data` reads and '
                f"checks, but which is not trained on; train on {', '.join(_TRAINABLE)}"
            )
        own = replace(form, truncate=source.kind == "chat")
        split = open_split(getattr(source, part), source.packing, own)
        if not _has_target(split):
            raise TrainValueError(
                f"source {source.name} has no token to predict in its {part} part: those are what "
                'loss_mask marks, of conversations what has the role "assistant", no weight of 0 '
                f"and a place in the first data.sequence_length={form.length} tokens; give answers "
                "that role, raise data.sequence_length, or change data.validation_fraction"
            )
        splits.append(split)
    return JoinedSplit(
        names=tuple(source.name for source in prepared.sources),
        splits=tuple(splits),
        order=Mixture([split.num_sequences for split in splits]),
    )


def _has_target(split: Split) -> bool:
    """Whether any sequence predicts a token; reads no further than the first that does."""
    numbers = range(split.num_sequences)
    parts = (split.batch(numbers[at : at + _LOOKED_AT]) for at in numbers[::_LOOKED_AT])
    return any(bool((part.labels != IGNORED_LABEL).any()) for part in parts)


def _describe(name: str, split: Split) -> str:
    places = split.num_sequences * split.form.length
    text = (
        f"source {name}: {split.store.num_documents:,} documents, {len(split.store.tokens):,} "
        f"tokens in {split.num_sequences:,} sequences of {split.form.length:,} ({split.packing})"
    )
    if split.packing != "stream":
        text += f", {split.padding_tokens / places:.1%} padding"
    if split.dropped_tokens:
        text += (
            f"; {split.cut_documents:,} documents are longer than a sequence and lose their last "
            f"{split.dropped_tokens:,} tokens: raise data.sequence_length to keep them"
        )
    elif split.cut_documents:
        text += f"; {split.cut_documents:,} documents are longer and cut into pieces"
    return text
