"""How probable a decoder finds the labels of sequences, each row for itself.

Every rank calls it with its own rows, also with none; the sums are in fp64, so that they do not
depend on how rows are dealt out.

    nats_B = score_rows(model, batch)        # None before the last stage
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_train.data import Batch
from moe_train.errors import MoeTrainError, check_finite
from moe_train.generation import ModelRanks
from moe_train.labels import IGNORED_LABEL

_ROUNDS_BETWEEN_QUESTIONS = 16
_CHUNK_TOKENS = 1024  # whose logits are there at a time


class EvaluationStoppedError(MoeTrainError):
    """A rank was asked to stop before the set was read."""


@torch.no_grad()
def score_rows(model: ModelRanks, batch: Batch) -> Tensor | None:
    """The negative log-likelihood of each row's labels, fp64 [B] on the CPU, in nats. Collective.

    Args:
        batch: this rank's rows, the same on every stage; labels of -100 do not count.

    Returns:
        None on other stages than the last.

    Raises:
        ValueError: the logits are not finite numbers.
    """
    hidden_BSd = model.forward(batch.input_ids, batch.position_ids)
    if hidden_BSd is None:
        return None
    row_N, place_N = (batch.labels != IGNORED_LABEL).nonzero(as_tuple=True)
    labels_N = batch.labels[row_N, place_N].to(model.device)
    hidden_Nd = hidden_BSd[row_N.to(model.device), place_N.to(model.device)]
    losses = [
        F.cross_entropy(model.stage.logits(hidden[None])[0].float(), labels, reduction="none")
        for hidden, labels in zip(
            hidden_Nd.split(_CHUNK_TOKENS), labels_N.split(_CHUNK_TOKENS), strict=True
        )
    ]
    nats_N = torch.cat(losses).double().cpu()
    check_finite(bool(torch.isfinite(nats_N).all()))
    return torch.zeros(len(batch.labels), dtype=torch.float64).index_add_(0, row_N, nats_N)


def dealt_rounds(
    model: ModelRanks, count: int, batch_size: int, should_stop: Callable[[], bool]
) -> Iterator[range]:
    """The numbers below `count`, dealt out to the ranks in rounds; a rank may get none.

    Every rank gets the same number of rounds. Now and then the ranks agree on whether to stop.

    Args:
        should_stop: asked on every rank; one yes ends the rounds of all.

    Raises:
        EvaluationStoppedError: on every rank.
    """
    per_round = batch_size * model.num_data_ranks
    for number, first in enumerate(range(0, count, per_round)):
        if number % _ROUNDS_BETWEEN_QUESTIONS == 0 and any(model.sum_over_ranks([should_stop()])):
            raise EvaluationStoppedError("stopped before all was read; there are no figures")
        numbers = range(first, min(first + per_round, count))
        yield numbers[model.data_rank :: model.num_data_ranks]
