"""The plainest language model there is, as the mark that a trained one has to beat.

Invariant: it predicts the same places as `PackedSplit` labels, and sees training tokens only.

    unigram_cross_entropy(prepared, 256)    # nats per predicted token of the held-out text
"""

import numpy as np
from numpy.typing import NDArray

from moe_train.data.packing import PackedSplit
from moe_train.data.prepare import PreparedCorpus
from moe_train.data.token_store import open_store
from moe_train.errors import TrainValueError, check_type
from moe_train.labels import IGNORED_LABEL

_BATCH = 1024


def unigram_cross_entropy(
    prepared: PreparedCorpus,
    sequence_length: int,
    *,
    reset_at_documents: bool = True,
    sequence_indices: NDArray[np.int64] | None = None,
) -> float:
    """Mean cross entropy of the held-out labels under the frequencies of the training tokens.

    Frequencies are smoothed by adding one to each token's count (Laplace).

    Args:
        sequence_indices: the validation sequences to score; None scores all.

    Returns:
        Nats per predicted token.

    Raises:
        ValueError: the splits are too small, or nothing is predicted in these sequences.
    """
    check_type("prepared", prepared, PreparedCorpus)
    check_type("sequence_length", sequence_length, int)
    train = open_store(prepared.train_tokens).tokens
    counts = np.bincount(train, minlength=prepared.vocab_size).astype(np.float64) + 1.0
    nats = -np.log(counts / counts.sum())
    split = PackedSplit(
        prepared.validation_tokens, sequence_length, prepared.eos_token_id, reset_at_documents
    )
    chosen = np.arange(split.num_sequences) if sequence_indices is None else sequence_indices
    total, predicted = 0.0, 0
    for first in range(0, len(chosen), _BATCH):
        labels = split.batch(chosen[first : first + _BATCH]).labels.numpy()
        labels = labels[labels != IGNORED_LABEL]
        total += float(nats[labels].sum())
        predicted += len(labels)
    if predicted == 0:
        raise TrainValueError(f"no token is predicted in {len(chosen)} sequences; use more text")
    return total / predicted
