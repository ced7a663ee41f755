"""The rotary part of a `config.json`, in the spellings of transformers 4 and 5.

Version 4 has `rope_theta` and `partial_rotary_factor` beside `rope_scaling`; version 5 has it all
in `rope_parameters`, where a key that the file still has outside fills a gap.

    rotary = read_rotary(ConfigReader(values), rules_of("gpt_oss"), head_dim=64)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from moe_train.errors import TrainValueError
from moe_train.model.families import ConfigReader, FamilyRules
from moe_train.model.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    mscale,
)
from moe_train.model.rotary import RotaryOptions

_WITH_ORIGINAL = ("llama3", "longrope", "yarn")  # forms that know the original context


def read_rotary(read: ConfigReader, rules: FamilyRules, head_dim: int) -> RotaryOptions:
    """How the decoder rotates queries and keys.

    Args:
        head_dim: width of a head; a part of it is rotated.

    Raises:
        ValueError: an unknown scaling, or one that differs from layer to layer; a share of a head
            in a family that has none.
    """
    rope = rope_parameters(read, rules)
    share = ConfigReader(rope).number(
        "partial_rotary_factor", default=rules.partial_rotary_factor, positive=True
    )
    if share != 1 and rules.partial_rotary_factor == 1:
        raise TrainValueError(
            f"config.json: partial_rotary_factor={share} is not supported for "
            f"model_type={read.get('model_type')!r}, which rotates whole heads in transformers; "
            "remove it"
        )
    dim = int(head_dim * share)
    if dim <= 0 or dim % 2:
        raise TrainValueError(
            f"config.json: head_dim={head_dim} with partial_rotary_factor={share} rotates {dim} "
            "dims; rotary needs a positive even number"
        )
    return RotaryOptions(
        dim=dim,
        theta=ConfigReader(rope).number("rope_theta", default=0.0, positive=True),
        scaling=_FORMS[rope["rope_type"]](ConfigReader(rope), dim),
        is_fp32=rules.is_rope_fp32,
    )


def rope_parameters(read: ConfigReader, rules: FamilyRules) -> dict[str, Any]:
    """The file's rotary keys under their names of transformers 5.

    `rope_type` is always there, with "llama3", "longrope" and "yarn"
    `original_max_position_embeddings`, and with the last two `factor`.

    Raises:
        ValueError: a scaling that is not supported, or without what it needs.
    """
    given = read.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise TrainValueError(
            f"config.json: rope_parameters={given!r} is not supported; give one set of rotary "
            "parameters for all layers"
        )
    outside = {
        name: read.get(name)
        for name in ("rope_theta", "partial_rotary_factor")
        if read.get(name) is not None
    }
    inside = {name: value for name, value in given.items() if value is not None}
    # A family's own scaling holds for files that say nothing of scaling.
    default = {"rope_theta": rules.rope["rope_theta"]} if given else rules.rope
    rope = {**default, **outside, **inside}
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in _FORMS:
        raise TrainValueError(
            f"config.json: rope_type={rope['rope_type']!r} is not supported; it is one of "
            f"{', '.join(_FORMS)}"
        )
    if rope["rope_type"] in _WITH_ORIGINAL:
        original = read.get("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or read.size("max_position_embeddings")
    if rope["rope_type"] in ("longrope", "yarn") and rope.get("factor") is None:
        length = ConfigReader(rope).size("original_max_position_embeddings")
        rope["factor"] = read.size("max_position_embeddings") / length
    if rope["rope_type"] == "dynamic":
        rope["max_position_embeddings"] = read.size("max_position_embeddings")
    return rope


def latent_softmax_scale(rope: Mapping[str, Any], qk_head_dim: int) -> float:
    """Factor of the scores of DeepSeek's attention, which YaRN's mscale changes twice."""
    scale = float(qk_head_dim**-0.5)
    all_dims = ConfigReader(rope).number("mscale_all_dim", default=0.0)
    if rope["rope_type"] == "default" or not all_dims:
        return scale
    return scale * mscale(_needed(ConfigReader(rope), "factor"), all_dims) ** 2


def _needed(read: ConfigReader, name: str) -> float:
    read.need(name)
    return read.number(name, default=0.0, positive=True)


def _linear(read: ConfigReader, dim: int) -> RopeScaling:
    return LinearScaling(factor=_needed(read, "factor"))


def _dynamic(read: ConfigReader, dim: int) -> RopeScaling:
    return DynamicScaling(
        factor=_needed(read, "factor"),
        max_position_embeddings=read.size("max_position_embeddings"),
    )


def _llama3(read: ConfigReader, dim: int) -> RopeScaling:
    return Llama3Scaling(
        factor=_needed(read, "factor"),
        low_freq_factor=_needed(read, "low_freq_factor"),
        high_freq_factor=_needed(read, "high_freq_factor"),
        original_max_position_embeddings=read.size("original_max_position_embeddings"),
    )


def _longrope(read: ConfigReader, dim: int) -> RopeScaling:
    factors = {}
    for name in ("short_factor", "long_factor"):
        given = read.items(name)
        if len(given) != dim // 2 or not all(isinstance(x, int | float) and x > 0 for x in given):
            raise TrainValueError(
                f"config.json: {name}={list(given)!r}; expected {dim // 2} positive numbers, one "
                "for each rotated pair of a head"
            )
        factors[name] = tuple(float(x) for x in given)
    length, factor = read.size("original_max_position_embeddings"), _needed(read, "factor")
    inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return LongRopeScaling(
        **factors,
        original_max_position_embeddings=length,
        attention_factor=read.number("attention_factor", default=inferred),
    )


def _yarn(read: ConfigReader, dim: int) -> RopeScaling:
    factor = _needed(read, "factor")
    one, every = (read.number(name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    inferred = mscale(factor)
    if one and every:
        inferred = mscale(factor, one) / mscale(factor, every)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=read.size("original_max_position_embeddings"),
        attention_factor=read.number("attention_factor", default=inferred),
        beta_fast=read.number("beta_fast", default=32.0, positive=True),
        beta_slow=read.number("beta_slow", default=1.0, positive=True),
        truncate=read.flag("truncate", default=True),
    )


_FORMS: Mapping[str, Callable[[ConfigReader, int], RopeScaling | None]] = {
    "default": lambda read, dim: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
