"""Which parameters a key means: patterns on the names that transformers uses, as `train.trainable`.

A parameter is known by its name in the decoder and by the keys under which it is stored, so that
`*.mlp.experts.*` and `*.block_sparse_moe.experts.*.w1.weight` both find Mixtral's experts. The
choice is made over the whole decoder, so every rank makes the same.

    patterns = ("lm_head.weight", "*.layers.3.*", "!*.mlp.gate.weight")
    names = chosen_names("train.trainable", patterns, config)

Patterns are those of `fnmatch`, case and all; the last one that matches a parameter decides. A list
that begins with an exclusion begins with everything.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import translate

from moe_train.errors import TrainValueError
from moe_train.layout.parameters import single_rank_layouts
from moe_train.model import EMBEDDING, DecoderConfig, DecoderStage

_HEAD = "lm_head.weight"


def chosen_names(key: str, patterns: Sequence[str], config: DecoderConfig) -> frozenset[str]:
    """Names of the decoder's parameters that the patterns of `key` choose; all without patterns.

    Raises:
        ValueError: a pattern that matches nothing, or a part of what is one parameter here; or
            nothing is chosen.
    """
    keys = _keys_by_parameter(config)
    chosen = set(keys) if not patterns or patterns[0].startswith("!") else set()
    try:
        for pattern in patterns:
            matched = _matched(pattern, keys, config)
            chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    except TrainValueError as error:
        raise TrainValueError(f"{key}: {error}") from None
    if not chosen:
        raise TrainValueError(
            f"{key}={list(patterns)} leaves no parameter; the last pattern that matches a "
            "parameter decides, so put exclusions (!) behind what they exclude from"
        )
    return frozenset(chosen)


def decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter of the whole decoder; nothing is allocated."""
    return {
        name: tuple(p.shape) for name, p in DecoderStage.without_memory(config).named_parameters()
    }


def _keys_by_parameter(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Each parameter's name in the decoder -> the keys under which it is stored."""
    stage = DecoderStage.without_memory(config)
    layouts = single_rank_layouts(stage, config)
    names = [name for name, _ in stage.named_parameters()]
    return {name: tuple(view.key for view in layouts[name].form.views) for name in names}


def _matched(pattern: str, keys: Mapping[str, tuple[str, ...]], config: DecoderConfig) -> set[str]:
    matches = re.compile(translate(pattern.removeprefix("!"))).match
    found = set()
    for name, stored in keys.items():
        if matches(name):
            found.add(name)
            continue
        count = sum(1 for key in stored if matches(key))
        if count == len(stored):
            found.add(name)
        elif count:
            raise TrainValueError(
                f"{pattern!r} matches {count} of the {len(stored)} stored tensors that are one "
                f"parameter here, {name}, which is taken whole or not at all; use {name!r}"
            )
    if not found:
        raise TrainValueError(_no_match(pattern, keys, config))
    return found


def _no_match(pattern: str, keys: Mapping[str, tuple[str, ...]], config: DecoderConfig) -> str:
    text = pattern.removeprefix("!")
    if config.tie_word_embeddings and re.match(translate(text), _HEAD):
        return (
            f"{pattern!r} matches no parameter: the head of this model is tied to "
            f"the embedding; name {EMBEDDING}, which is both"
        )
    names = sorted({*keys, *(key for stored in keys.values() for key in stored)})
    near = get_close_matches(text, names, n=3, cutoff=0.7)
    hint = f"; the nearest names are {', '.join(near)}" if near else f"; one name is {names[0]}"
    return f"{pattern!r} matches no parameter{hint}"
