"""The perplexity of a whole set of sequences, exact on any number of ranks.

figures = measure_perplexity(model, files.open(256, pad_token_id), batch_size=8)
figures["nats_per_token"]
"""

import math
from collections.abc import Callable

from moe_train.data import JoinedSplit
from moe_train.errors import TrainValueError
from moe_train.evaluation.scoring import dealt_rounds, score_rows
from moe_train.generation import ModelRanks
from moe_train.labels import IGNORED_LABEL


def measure_perplexity(
    model: ModelRanks,
    split: JoinedSplit,
    *,
    batch_size: int = 8,
    num_bytes: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Figures over every sequence of the split, equal on every rank. Collective.

    Args:
        split: the same on every rank.
        batch_size: rows of a rank at a time; rows are dealt out, a rank may get none.
        num_bytes: of the text; None: no bits per byte.
        should_stop: as `dealt_rounds`.

    Returns:
        `tokens` predicted, `nats_per_token`, `perplexity`, and `bits_per_byte` where bytes are
        given.

    Raises:
        ValueError: no token is predicted.
        EvaluationStoppedError: a rank was asked to stop.
    """
    nats, tokens = 0.0, 0
    for own in dealt_rounds(model, split.num_sequences, batch_size, should_stop):
        batch = split.batch(own)
        nats_B = score_rows(model, batch)
        if nats_B is not None:
            nats += float(nats_B.sum())
            tokens += int((batch.labels != IGNORED_LABEL).sum())
    nats, num_tokens = model.sum_over_ranks([nats, tokens])
    if not num_tokens:
        raise TrainValueError(
            "the data predict no token: every document has one token, or no turn is trained on"
        )
    mean = nats / num_tokens
    figures = {
        "tokens": int(num_tokens),
        "nats_per_token": mean,
        "perplexity": math.exp(min(mean, 700.0)),
    }
    if num_bytes:
        figures["bits_per_byte"] = nats / math.log(2) / num_bytes
    return figures
