"""Every scoring rule by name, as `RouterOptions(moe_router_score_function=name)` takes it.

    scores_TE = SCORE_FUNCTIONS["sigmoid"].scores(logits_TE)

Dims: T tokens, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScoreFunction(NamedTuple):
    """One rule; both functions are differentiable, on fp32 or fp64, and neither changes its input.

    Attributes:
        scores: of logits [T, E], each from 0 up; higher logits have higher scores.
        probs: of logits and scores: the scores divided by their sum over the experts.
    """

    scores: Callable[[Tensor], Tensor]
    probs: Callable[[Tensor, Tensor], Tensor]


SCORE_FUNCTIONS = {
    "softmax": ScoreFunction(
        scores=lambda logits_TE: torch.softmax(logits_TE, dim=-1),
        probs=lambda logits_TE, scores_TE: scores_TE,
    ),
    "sigmoid": ScoreFunction(
        scores=torch.sigmoid,
        # s / sum(s) as a softmax of log(s): no 0 / 0 where all scores vanish.
        probs=lambda logits_TE, scores_TE: torch.softmax(F.logsigmoid(logits_TE), dim=-1),
    ),
}
