import math
import random

import numpy as np
import pytest

from weight_convert.errors import WeightConvertError
from weight_convert.specs import Rule

STACK = {
    "stored": ["{layer}.e.{expert}.w1", "{layer}.e.{expert}.w3"],
    "memory": ["{layer}.gate_up"],
    "dims": "row column -> expert (part row) column",
}


def apply(rule: Rule, tensors: dict[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], object]:
    """What a rule makes, through its runs alone."""
    shape = next(iter(tensors.values())).shape
    sizes = rule.sizes(shape, 1 + max(expert for expert, _ in tensors))
    made: dict[tuple[int, int], object] = {}
    for expert, part in rule.targets(sizes):
        flat = [
            tensors[run.expert, run.part].ravel()[run.offset : run.offset + run.length]
            for run in rule.runs(expert, part, sizes)
        ]
        made[expert, part] = np.concatenate(flat).reshape(rule.target.shape(sizes))
    return made


def test_experts_are_stacked_and_parts_joined_in_the_order_of_their_names() -> None:
    rng = np.random.default_rng()
    experts = rng.integers(0, 1000, (12, 2, 5, 7))
    rule = Rule.parse(**STACK)
    made = apply(rule, {(e, p): experts[e, p] for e in range(12) for p in range(2)})
    fused = np.concatenate([experts[:, 0], experts[:, 1]], axis=1)
    assert np.array_equal(made[0, 0], fused)
    back = apply(rule.inverse(), {(0, 0): fused})
    assert all(np.array_equal(back[e, p], experts[e, p]) for e in range(12) for p in range(2))


def test_rows_may_alternate_and_be_regrouped() -> None:
    # As Megatron packs queries, keys and values of each group of heads, here with one query head.
    rule = Rule.parse(
        stored=["{layer}.qkv"],
        memory=["{layer}.q", "{layer}.k", "{layer}.v"],
        dims="group part head column -> (group head) column",
    )
    packed = np.arange(4 * 3 * 2 * 5).reshape(4, 3, 2, 5)
    made = apply(rule, {(0, 0): packed})
    for part in range(3):
        assert np.array_equal(made[0, part], packed[:, part].reshape(8, 5))


@pytest.mark.parametrize("round_number", range(20))
def test_a_rule_and_its_inverse_are_the_identity(round_number: int) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    axes = ["a", "b", "c", "column"][rng.randint(0, 3) :]
    index = rng.sample(["expert", "part"], rng.randint(0, 2))
    order = [*index, *axes[:-1]]
    rng.shuffle(order)
    order.append("column")
    dims = " ".join(axes) + " -> " + " ".join(order)
    stem = "{layer}.{expert}" if "expert" in index else "{layer}.s"
    names = [f"{stem}.x", f"{stem}.y", f"{stem}.z"][: 3 if "part" in index else 1]
    rule = Rule.parse(stored=names, memory=["{layer}.m"], dims=dims)
    shape = [rng.randint(1, 4) for _ in axes]
    experts = rng.randint(10, 13) if "expert" in index else 1
    tensors = {
        (e, p): np.random.default_rng(seed + e * 7 + p).integers(0, 99, shape)
        for e in range(experts)
        for p in range(len(names))
    }
    made = apply(rule, tensors)
    total = sum(tensor.size for tensor in tensors.values())
    assert math.prod(np.shape(made[0, 0])) == total, seed
    back = apply(rule.inverse(), made)  # type: ignore[arg-type]
    assert all(np.array_equal(back[place], tensor) for place, tensor in tensors.items()), seed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dims": "row column -> expert (part row) row"}, "each once"),
        ({"dims": "row column -> expert (part row)"}, "same ones"),
        ({"dims": "row column -> expert column (part row)"}, "only byte ranges are moved"),
        ({"dims": "row column"}, "expected 'stored dims -> memory dims'"),
        ({"dims": "row column -> Expert (part row) column"}, "expected names of axes"),
        ({"dims": ""}, "renames one tensor"),
        ({"stored": ["{layer}.a", "{layer}.a"]}, "each once"),
        ({"stored": []}, "needs names"),
        ({"stored": ["{layer}.{expert}.a", "{layer}.b"]}, "the same ones in each name"),
        ({"stored": ["{layer}.{experts}.a"]}, "stand at most once"),
        ({"memory": ["gate_up"]}, "differ in places"),
    ],
)
def test_a_rule_that_cannot_be_inverted_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(WeightConvertError, match=said):
        Rule.parse(**(STACK | change))  # type: ignore[arg-type]
