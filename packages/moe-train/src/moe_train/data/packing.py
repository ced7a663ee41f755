"""Fill sequences of one length with documents, and know where documents meet.

Three ways: a stream (every document behind the one before, cut every S tokens, with the token
behind as the last label), best fit (whole documents, the rest of a sequence is padding) and one
document a sequence. A document longer than a sequence is cut into pieces, of which each but the
last predicts the first token of the next; a conversation keeps its first S tokens only.

Invariants: a batch is a function of the sequence numbers alone. Positions start at 0 where a
document or a piece does; a position of -1 is padding. A label is the next token of the same
document, and -100 where there is none or where that token is no target.

    split = open_split(source.train, "stream", SequenceForm(length=256, pad_token_id=0))
    batch = split.batch([0, 5])     # batch.input_ids: [2, 256]
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_train.data.bins import best_fit, cut_pieces, single
from moe_train.data.token_store import TokenStore, open_store
from moe_train.errors import TrainValueError
from moe_train.labels import IGNORED_LABEL

_PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B packed sequences of S tokens, all int64 [B, S].

    Attributes:
        input_ids: tokens.
        labels: the next token of each place, or -100 where nothing is predicted.
        position_ids: places counted from the start of the document or of the sequence; -1 is
            padding.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceForm:
    """What every sequence of a job is like.

    Attributes:
        length: tokens of a sequence.
        pad_token_id: what stands where a sequence has no document.
        reset_at_documents: restart positions after each document and ignore labels across borders;
            only a stream can do without.
        truncate: keep the beginning of a document that is longer than a sequence, and drop the
            rest; a stream never does.
    """

    length: int
    pad_token_id: int
    reset_at_documents: bool = True
    truncate: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise TrainValueError(f"sequence_length={self.length} must be at least 1")


class Split(ABC):
    """The sequences of one token file, read from disk as they are asked for.

    Attributes:
        num_sequences: how many there are; at least one.
        packing: how documents fill them.
        padding_tokens: places of all sequences that hold no document.
        cut_documents: documents longer than a sequence; a stream counts none.
        dropped_tokens: their tokens that no sequence holds.
    """

    packing: str
    padding_tokens: int = 0
    cut_documents: int = 0
    dropped_tokens: int = 0

    def __init__(self, store: TokenStore, form: SequenceForm, num_sequences: int) -> None:
        self.store, self.form, self.num_sequences = store, form, num_sequences

    def batch(self, sequence_indices: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The sequences with these numbers, in this order; none gives tensors of shape [0, S].

        Raises:
            ValueError: a number is outside of [0, num_sequences).
        """
        index = np.asarray(sequence_indices, dtype=np.int64).reshape(-1)
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < self.num_sequences:
            raise TrainValueError(
                f"sequence numbers must be in [0, {self.num_sequences}), got "
                f"{int(index.min())} to {int(index.max())}"
            )
        inputs, labels, positions = self._read(index)
        return Batch(
            input_ids=torch.from_numpy(inputs),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions),
        )

    @abstractmethod
    def _read(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Inputs, labels and positions of sequences, int64 [B, S] each."""

    def _targets(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at these places as labels."""
        labels = self.store.tokens[places].astype(np.int64)
        if self.store.trained is not None:
            labels[self.store.trained[places] == 0] = IGNORED_LABEL
        return labels


class StreamSplit(Split):
    """Sequence i has the tokens [i*S, i*S + S], the last one as a label only."""

    packing = "stream"

    def __init__(self, store: TokenStore, form: SequenceForm) -> None:
        super().__init__(store, form, max(0, len(store.tokens) - 1) // form.length)

    def _read(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        length = self.form.length
        place = np.arange(length)
        places = index[:, None] * length + place
        inputs = self.store.tokens[places].astype(np.int64)
        labels = self._targets(places + 1)
        positions = np.broadcast_to(place, inputs.shape).copy()
        if self.form.reset_at_documents:
            starts = self._document_starts(index * length)
            labels[starts[:, 1:]] = IGNORED_LABEL
            positions -= np.maximum.accumulate(np.where(starts[:, :-1], place, 0), axis=1)
        return inputs, labels, positions

    def _document_starts(self, first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a document begins at each of the S + 1 places from `first` on, [B, S + 1]."""
        found = np.zeros((len(first), self.form.length + 1), dtype=np.bool_)
        low = np.searchsorted(self.store.starts, first)
        high = np.searchsorted(self.store.starts, first + self.form.length + 1)
        for row, (begin, end) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
            found[row, self.store.starts[begin:end] - first[row]] = True
        return found


class BinSplit(Split):
    """Whole documents (or their pieces) in each sequence, and padding behind them."""

    def __init__(self, store: TokenStore, form: SequenceForm, packing: str) -> None:
        pieces = cut_pieces(store.starts, capacity=form.length, truncate=form.truncate)
        if packing == "best_fit":
            bins = best_fit(pieces.length, capacity=form.length)
        else:
            bins = single(pieces.length)
        super().__init__(store, form, len(bins.start) - 1)
        self.packing = packing
        self._bins = bins.start
        self._start, self._length = pieces.start[bins.piece], pieces.length[bins.piece]
        self._goes_on = pieces.goes_on[bins.piece]
        self.padding_tokens = self.num_sequences * form.length - int(pieces.length.sum())
        self.cut_documents, self.dropped_tokens = pieces.cut_documents, pieces.dropped_tokens

    def _read(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        shape = (len(index), self.form.length)
        inputs = np.full(shape, self.form.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        positions = np.full(shape, _PADDING, dtype=np.int64)
        for row, sequence in enumerate(index.tolist()):
            pieces = slice(self._bins[sequence], self._bins[sequence + 1])
            lengths = self._length[pieces].astype(np.int64)
            used = int(lengths.sum())
            ends = np.cumsum(lengths)
            positions[row, :used] = np.arange(used) - np.repeat(ends - lengths, lengths)
            places = np.repeat(self._start[pieces], lengths) + positions[row, :used]
            inputs[row, :used] = self.store.tokens[places]
            predicts = np.ones(used, dtype=np.bool_)
            predicts[ends - 1] = self._goes_on[pieces]
            labels[row, :used][predicts] = self._targets(places[predicts] + 1)
        return inputs, labels, positions


def open_split(path: Path, packing: str, form: SequenceForm) -> Split:
    """Open a token file as sequences.

    Args:
        path: as `open_store` takes it.
        packing: `stream`, `best_fit` or `pad`, as data.packing.

    Raises:
        ValueError: the file does not fit its description, holds less than one sequence, or
            documents are put together while they shall attend to each other.
    """
    store = open_store(path)
    split: Split
    if packing == "stream":
        split = StreamSplit(store, form)
        if not split.num_sequences:
            raise TrainValueError(
                f"{path.name} has {len(store.tokens)} tokens, but one sequence of "
                f"data.sequence_length={form.length} needs {form.length + 1}; use more "
                "text, a shorter sequence_length or another data.validation_fraction"
            )
        return split
    if packing == "best_fit" and not form.reset_at_documents:
        raise TrainValueError(
            'packing="best_fit" puts documents that have nothing to do with each other into one '
            "sequence, so they must not attend to each other; set data.reset_at_documents=true"
        )
    split = BinSplit(store, form, packing)
    if not split.num_sequences:
        raise TrainValueError(f"{path.name} has no document with a token; use more text")
    return split
