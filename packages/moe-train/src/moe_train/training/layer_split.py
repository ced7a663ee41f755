"""Which layers each pipeline stage has: equal numbers, or as equal work as layers allow.

Work is counted, not measured, so that every rank and every plan finds the same: the weights that a
token passes through, and what attention does with the other tokens of its sequence. The head and
the layers of multi-token prediction stand behind the last layer; the embedding is a lookup.

    layers = split_layers(layer_work(config, sequence_length=4096), num_stages=4)
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from moe_train.layout import is_expert
from moe_train.model import DecoderConfig, DecoderStage, StageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Products for a token in a forward: of each layer, and behind the last one."""

    layers: tuple[float, ...]
    behind: float


def layer_work(config: DecoderConfig, sequence_length: int) -> LayerWork:
    """The work of a decoder's parts on a token of sequences of that length."""
    layers = range(config.num_hidden_layers)
    options = StageOptions(layers=layers, first=True, last=True, device=torch.device("meta"))
    found = dict.fromkeys((*layers, *config.mtp_layers), 0.0)
    share = config.moe.num_experts_per_tok / max(config.num_experts, 1)
    for name, parameter in DecoderStage(config, options).named_parameters():
        kind, _, rest = name.removeprefix("model.").partition(".")
        if kind == "layers" and parameter.dim() > 1:
            used = share if is_expert(name) else 1.0
            found[int(rest.partition(".")[0])] += used * parameter.numel()
    for layer in found:
        # Half of the tokens are earlier ones; scores, and what they weigh.
        window = config.window(layer) if layer in layers else None
        seen = sequence_length / 2 if window is None else min(window, sequence_length / 2)
        found[layer] += 2 * seen * config.hidden_size
    head = float(config.vocab_size * config.hidden_size)
    behind = head + sum(found[layer] + head for layer in config.mtp_layers)
    return LayerWork(layers=tuple(found[layer] for layer in layers), behind=behind)


def split_layers(work: LayerWork, num_stages: int) -> list[range]:
    """Layers of each stage, at least one, so that the dearest stage is as cheap as can be.

    Among the best ones that whose squares of work sum up to least: stages are alike otherwise, too.
    """
    sums = [0.0]
    for cost in work.layers:
        sums.append(sums[-1] + cost)
    count = len(work.layers)

    def cost_of(first: int, end: int) -> float:
        return sums[end] - sums[first] + (work.behind if end == count else 0.0)

    # By the number of layers that the stages so far have: dearest, squares, where each begins.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            candidates = (
                (max(dearest, cost), squares + cost * cost, (*starts, first))
                for first, (dearest, squares, starts) in best.items()
                if first < end
                for cost in (cost_of(first, end),)
            )
            found = min(candidates, default=None)
            if found is not None:
                following[end] = found
        best = following
    starts = [*best[count][2], count]
    return [range(first, end) for first, end in pairwise(starts)]
