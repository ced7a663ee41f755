"""Cut a stream of tokens into sequences of one length, and know where documents meet.

The stream is every document followed by the end-of-text token. Sequence i is made of the tokens
`[i*S, i*S + S]`: S inputs, and as labels the same tokens shifted by one.

Invariant: a batch is a function of the sequence numbers alone. With `reset_at_documents`, positions
start at 0 after each end-of-text token, and no label asks for the first token of the next document.

    split = PackedSplit(prepared.train_tokens, 256, prepared.eos_token_id, True)
    batch = split.batch([0, 5])     # batch.input_ids: [2, 256]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_train.data.token_store import open_store
from moe_train.errors import TrainValueError
from moe_train.labels import IGNORED_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B packed sequences of S tokens, all int64 [B, S] on the CPU.

    Attributes:
        input_ids: tokens.
        labels: the next token of each place, or -100 where nothing is predicted.
        position_ids: places counted from the start of the document or of the sequence.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


class PackedSplit:
    """The sequences of one token file, read from disk as they are asked for.

    Args:
        path: a token file as `moe_train.data.token_store` writes it.
        sequence_length: tokens of a sequence.
        eos_token_id: the token that ends a document.
        reset_at_documents: restart positions after each document and ignore labels across borders.

    Raises:
        ValueError: the file does not fit its description, or holds less than one sequence.
    """

    def __init__(
        self, path: Path, sequence_length: int, eos_token_id: int, reset_at_documents: bool
    ) -> None:
        if sequence_length < 1:
            raise TrainValueError(f"sequence_length={sequence_length} must be at least 1")
        self._tokens = open_store(path).tokens
        self.path = path
        self.sequence_length = sequence_length
        self.eos_token_id = eos_token_id
        self.reset_at_documents = reset_at_documents
        self.num_sequences = max(0, len(self._tokens) - 1) // sequence_length
        if self.num_sequences == 0:
            raise TrainValueError(
                f"{path.name} has {len(self._tokens)} tokens, but one sequence of "
                f"data.sequence_length={sequence_length} needs {sequence_length + 1}; use more "
                "text, a shorter sequence_length or another data.validation_fraction"
            )

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
        places = index[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens = self._tokens[places].astype(np.int64)
        inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
        positions = np.broadcast_to(np.arange(self.sequence_length), inputs.shape)
        if self.reset_at_documents:
            labels[inputs == self.eos_token_id] = IGNORED_LABEL
            positions = self._positions(inputs)
        return Batch(
            input_ids=torch.from_numpy(inputs.copy()),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions.copy()),
        )

    def _positions(self, inputs: NDArray[np.int64]) -> NDArray[np.int64]:
        place = np.broadcast_to(np.arange(self.sequence_length), inputs.shape)
        starts = np.zeros_like(inputs)
        starts[:, 1:] = np.where(inputs[:, :-1] == self.eos_token_id, place[:, 1:], 0)
        return place - np.maximum.accumulate(starts, axis=1)
