"""The plainest language model there is, as the mark that a trained one has to beat.

Invariant: it predicts the same places as a trained model, and sees training targets only.

    unigram_cross_entropy(prepared, 256)    # nats per predicted token of the held-out text
"""

import numpy as np
from numpy.typing import NDArray

from moe_train.data import PreparedCorpus, open_joined
from moe_train.errors import TrainValueError, check_type
from moe_train.labels import IGNORED_LABEL

_ROWS = 1024


def unigram_cross_entropy(
    prepared: PreparedCorpus,
    sequence_length: int,
    *,
    reset_at_documents: bool = True,
    sequence_indices: NDArray[np.int64] | None = None,
) -> float:
    """Mean cross entropy of the held-out labels under the frequencies of the training targets.

    Frequencies are those of each source, smoothed by adding one to each token's count (Laplace) and
    mixed by the sources' weights.

    Args:
        sequence_indices: the validation sequences to score; None scores all.

    Returns:
        Nats per predicted token.

    Raises:
        ValueError: the splits are too small, or nothing is predicted in these sequences.
    """
    check_type("prepared", prepared, PreparedCorpus)
    check_type("sequence_length", sequence_length, int)
    train, validation = open_joined(
        prepared, sequence_length=sequence_length, reset_at_documents=reset_at_documents
    )
    mixed = np.zeros(prepared.vocab_size)
    for source, split in zip(prepared.sources, train.splits, strict=True):
        tokens, trained = split.store.tokens, split.store.trained
        targets = tokens if trained is None else tokens[trained != 0]
        counts = np.bincount(targets, minlength=prepared.vocab_size) + 1.0
        mixed += source.weight * counts / counts.sum()
    nats = -np.log(mixed / mixed.sum())
    chosen = np.arange(validation.num_sequences) if sequence_indices is None else sequence_indices
    total, predicted = 0.0, 0
    for first in range(0, len(chosen), _ROWS):
        labels = validation.batch(chosen[first : first + _ROWS]).labels.numpy()
        labels = labels[labels != IGNORED_LABEL]
        total += float(nats[labels].sum())
        predicted += len(labels)
    if predicted == 0:
        raise TrainValueError(f"no token is predicted in {len(chosen)} sequences; use more text")
    return total / predicted
