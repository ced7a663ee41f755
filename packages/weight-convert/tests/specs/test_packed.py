"""Packed tensors: each element goes where Megatron-Core's reshape puts it, and back."""

import numpy as np
import pytest

from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.specs.packed import PackedRule

CONFIG = {"num_attention_heads": 6, "num_key_value_heads": 3}
RULE = PackedRule.of(
    stored="l.{n}.qkv",
    memory=["m.{n}.q", "m.{n}.k", "m.{n}.v"],
    groups="num_key_value_heads",
    parts=("num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
)


def moved(rule: PackedRule, arrays: list[np.ndarray], part: int = 0) -> list[np.ndarray]:
    """What the runs of a rule make of arrays."""
    sizes = rule.sizes(arrays[part].shape, 0, part)
    made = []
    for _, target in rule.targets(sizes):
        flat = [
            arrays[run.part].reshape(-1)[run.offset : run.offset + run.length]
            for run in rule.runs(0, target, sizes)
        ]
        made.append(np.concatenate(flat).reshape(rule.shape(sizes, target)))
    return made


@pytest.mark.parametrize("rest", [(), (7,), (2, 5)])
def test_packing_is_the_reshape_of_megatron(rest: tuple[int, ...]) -> None:
    head, count = 4, int(np.prod(rest, dtype=int))
    q, k, v = (
        np.random.default_rng().integers(0, 10**6, (heads * head, *rest)) for heads in (6, 3, 3)
    )
    groups = [part.reshape(3, -1, count) for part in (q, k, v)]
    packed = np.concatenate(groups, axis=1).reshape(12 * head, *rest)
    rule = RULE.with_config(CONFIG)
    assert isinstance(rule, PackedRule)
    unpacked = moved(rule, [packed])
    assert all(np.array_equal(a, b) for a, b in zip(unpacked, (q, k, v), strict=True))
    back = rule.inverse()
    assert isinstance(back, PackedRule)
    for part in range(3):
        assert np.array_equal(moved(back, [q, k, v], part)[0], packed)


def test_wrong_heads_are_named() -> None:
    with pytest.raises(WeightConvertError, match=r"config\.json has no num_attention_heads"):
        RULE.with_config({"num_key_value_heads": 2})
    rule = RULE.with_config(CONFIG)
    with pytest.raises(IncompleteExpertsError, match=r"l.\{n\}.qkv has shape \[25, 8\]"):
        rule.sizes((25, 8), 0)
    assert RULE.with_config({"num_attention_heads": 2}).numbers == (2, 2, 2, 2)
