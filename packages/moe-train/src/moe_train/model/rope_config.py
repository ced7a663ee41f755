"""The rotary part of a `config.json`, in the spellings of transformers 4 and 5.

Version 4 has `rope_theta` and `partial_rotary_factor` beside `rope_scaling`; version 5 has it all
in `rope_parameters`, where a key that the file still has outside fills a gap.

    rotary = read_rotary(ConfigReader(values), rules_of("gpt_oss"), head_dim=64)
"""

from collections.abc import Mapping
from typing import Any

from moe_train.errors import TrainValueError
from moe_train.model.families import ConfigReader, FamilyRules
from moe_train.model.rotary import RotaryOptions, YarnOptions, mscale


def read_rotary(read: ConfigReader, rules: FamilyRules, head_dim: int) -> RotaryOptions:
    """How the decoder rotates queries and keys.

    Args:
        head_dim: width of a head; a part of it is rotated.

    Raises:
        ValueError: a scaling other than YaRN, or one that differs from layer to layer; a share of
            a head in a family that has none.
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
        yarn=_yarn(rope) if rope["rope_type"] == "yarn" else None,
        is_fp32=rules.is_rope_fp32,
    )


def rope_parameters(read: ConfigReader, rules: FamilyRules) -> dict[str, Any]:
    """The file's rotary keys under their names of transformers 5.

    `rope_type` is always there, and with "yarn" `factor` and `original_max_position_embeddings`.

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
    if rope["rope_type"] not in ("default", "yarn"):
        raise TrainValueError(
            f"config.json: rope_type={rope['rope_type']!r} is not supported; use 'default' or "
            "'yarn'"
        )
    if rope["rope_type"] == "yarn":
        original = read.get("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or read.size("max_position_embeddings")
        length = ConfigReader(rope).size("original_max_position_embeddings")
        if rope.get("factor") is None:
            rope["factor"] = read.size("max_position_embeddings") / length
        rope["factor"] = ConfigReader(rope).number("factor", default=1.0, positive=True)
    return rope


def latent_softmax_scale(rope: Mapping[str, Any], qk_head_dim: int) -> float:
    """Factor of the scores of DeepSeek's attention, which YaRN's mscale changes twice."""
    scale = float(qk_head_dim**-0.5)
    all_dims = ConfigReader(rope).number("mscale_all_dim", default=0.0)
    if rope["rope_type"] == "default" or not all_dims:
        return scale
    return scale * mscale(rope["factor"], all_dims) ** 2


def _yarn(rope: Mapping[str, Any]) -> YarnOptions:
    read = ConfigReader(rope)
    factor = rope["factor"]
    one, every = (read.number(name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    inferred = mscale(factor)
    if one and every:
        inferred = mscale(factor, one) / mscale(factor, every)
    return YarnOptions(
        factor=factor,
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        attention_factor=read.number("attention_factor", default=inferred),
        beta_fast=read.number("beta_fast", default=32.0, positive=True),
        beta_slow=read.number("beta_slow", default=1.0, positive=True),
        truncate=read.flag("truncate", default=True),
    )
