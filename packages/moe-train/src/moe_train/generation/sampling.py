"""Which token comes next, given the logits: transformers' processors, in transformers' order.

    token = next_token(logits_V, ids, GenerationOptions(temperature=0.8, top_k=50), generator)

Shape legend: V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from moe_train.errors import check_finite
from moe_train.generation.options import GenerationOptions


def seeded_generator(seed: int, sequence_index: int) -> torch.Generator:
    """The generator of one text: a function of the seed and of its number among those of a prompt,
    so that a text does not depend on what is generated beside it.
    """
    state = np.random.SeedSequence((seed, sequence_index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def next_token(
    logits_V: Tensor, ids: list[int], options: GenerationOptions, generator: torch.Generator
) -> int:
    """One token id.

    Args:
        logits_V: of the last token, fp32 on the CPU.
        ids: the text so far, with the prompt.
        generator: asked for one number where a token is drawn.

    Raises:
        ValueError: the logits are not finite numbers.
    """
    check_finite(bool(torch.isfinite(logits_V).all()))
    processed_V = processed_logits(logits_V, ids, options)
    if options.temperature == 0:
        return int(processed_V.argmax())
    return int(torch.multinomial(processed_V.softmax(0), 1, generator=generator))


def processed_logits(logits_V: Tensor, ids: list[int], options: GenerationOptions) -> Tensor:
    """The logits after the repetition penalty and, where tokens are drawn, the restrictions."""
    if options.repetition_penalty != 1:
        logits_V = _penalised(logits_V, ids, options.repetition_penalty)
    if options.temperature == 0:
        return logits_V
    logits_V = logits_V / options.temperature
    if 0 < options.top_k < logits_V.numel():
        logits_V = _without(logits_V, logits_V < logits_V.topk(options.top_k).values[-1])
    if options.top_p < 1:
        logits_V = _top_p(logits_V, options.top_p)
    if options.min_p > 0:
        probabilities_V = logits_V.softmax(0)
        logits_V = _without(logits_V, probabilities_V < options.min_p * probabilities_V.max())
    return logits_V


def _penalised(logits_V: Tensor, ids: list[int], penalty: float) -> Tensor:
    seen = torch.tensor(sorted({i for i in ids if i < logits_V.numel()}), dtype=torch.int64)
    values = logits_V[seen]
    return logits_V.index_put((seen,), torch.where(values < 0, values * penalty, values / penalty))


def _top_p(logits_V: Tensor, top_p: float) -> Tensor:
    ascending_V, order_V = torch.sort(logits_V)
    removed_V = ascending_V.softmax(0).cumsum(0) <= 1 - top_p
    removed_V[-1] = False
    return _without(logits_V, torch.zeros_like(removed_V).scatter(0, order_V, removed_V))


def _without(logits_V: Tensor, removed_V: Tensor) -> Tensor:
    return logits_V.masked_fill(removed_V, -torch.inf)
