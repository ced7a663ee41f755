"""Layouts of state dicts against what the rules say, and against brute force."""

import math
import random

import pytest
from torch.distributed.tensor import Replicate, Shard

from mesh_spmd import MeshTypeError, MeshValueError, ProcessMesh, all_boxes, choose_layouts

MESH = ProcessMesh((2, 4), ("dp", "ep"))
RULES = {"*.experts.*": {"ep": 0}, "*.norm.weight": {}, "*": {"dp": 0, "ep": 0}}


def test_the_first_rule_that_meets_a_name_counts() -> None:
    shapes = {
        "layers.0.experts.w": (8, 6),
        "layers.0.norm.weight": (6,),
        "layers.0.q.weight": (16, 6),
    }
    layouts = choose_layouts(shapes, MESH, rules=RULES)
    assert [one.spec.placements for one in layouts] == [
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
        (Shard(0), Shard(0)),
    ]
    assert [one.rule for one in layouts] == list(RULES)
    assert [one.reason for one in layouts] == ["", "", ""]


def test_what_falls_back_says_why() -> None:
    (one,) = choose_layouts({"w": (60, 2)}, MESH, rules={"*": {"dp": 0, "ep": 0}})
    assert one.spec.placements == (Replicate(), Shard(0))
    assert one.reason == "dim 0 is 60, which does not divide by dp=2 x ep=4 = 8: dp replicates"
    (one,) = choose_layouts({"w": (7, 5)}, MESH, rules={"*": {"dp": 0, "ep": 1}})
    assert one.reason == (
        "dim 0 is 7, which does not divide by dp=2: dp replicates; "
        "dim 1 is 5, which does not divide by ep=4: ep replicates"
    )
    (one, two) = choose_layouts({"w": (8,), "b": (8,)}, MESH, rules={"w": {"ep": 0}})
    assert two.rule is None and two.reason == "no rule names it: it is replicated"


def test_ragged_parts_instead_of_replicas_are_as_even_as_they_can_be() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(60):
        mesh = ProcessMesh([chance.randint(1, 5) for _ in range(3)], ("a", "b", "c"))
        shape = (chance.randint(0, 30), chance.randint(0, 9))
        wanted = {axis: chance.randrange(2) for axis in chance.sample("abc", chance.randint(0, 3))}
        case = f"seed {seed}: {shape} on {mesh}, {wanted}"
        pairs = [
            choose_layouts({"w": shape}, mesh, rules={"*": wanted}, ragged=ragged)[0]
            for ragged in (False, True)
        ]
        boxes = [all_boxes(shape, one.spec) for one in pairs]
        most = [max(box.numel for box in of.values()) for of in boxes]
        assert most[1] <= most[0], case
        assert bool(pairs[0].reason) == bool(pairs[1].reason), case
        for dim, size in enumerate(shape):
            lengths = {box.shape[dim] for box in boxes[1].values()}
            assert max(lengths) - min(lengths) <= 1, case
            axes = [axis for axis in wanted if wanted[axis] == dim]
            even = size % math.prod(map(mesh.axis_size, axes)) == 0
            if even:
                assert lengths == {size // math.prod(map(mesh.axis_size, axes))}, case
            elif len(axes) == 1:
                assert max(lengths) == -(-size // mesh.axis_size(axes[0])), case
                is_cut = f"{axes[0]} is ragged" in pairs[1].reason
                assert is_cut == (size > 1), case


def test_mistakes_name_the_tensor_or_the_rule() -> None:
    with pytest.raises(MeshValueError, match=r"w of shape \(8,\): axis 'ep' shards dim 1"):
        choose_layouts({"w": (8,)}, MESH, rules={"*": {"ep": 1}})
    with pytest.raises(MeshValueError, match=r"no tensor follows the rules \['experts'\]"):
        choose_layouts({"w": (8,)}, MESH, rules={"experts": {"ep": 0}})
    with pytest.raises(MeshValueError, match="unknown axis 'tp'"):
        choose_layouts({"w": (8,)}, MESH, rules={"*": {"tp": 0}})
    with pytest.raises(MeshTypeError, match="rules must map patterns"):
        choose_layouts({"w": (8,)}, MESH, rules=["*"])  # type: ignore[arg-type]
    with pytest.raises(MeshTypeError, match="must map axes to tensor dims"):
        choose_layouts({"w": (8,)}, MESH, rules={"*": 0})  # type: ignore[dict-item]


@pytest.mark.parametrize("shape", [(4,), (12,), (2,), (0,), (1,)])
def test_ragged_axes_that_make_no_more_parts_replicate(shape: tuple[int, ...]) -> None:
    mesh = ProcessMesh((4, 3, 2), ("a", "b", "c"))
    rules = {"*": dict.fromkeys(mesh.axis_names, 0)}
    (one,) = choose_layouts({"w": shape}, mesh, rules=rules, ragged=True)
    boxes = set(all_boxes(shape, one.spec).values())
    assert sum(box.numel for box in boxes) == shape[0]
    assert min(box.numel for box in boxes) > 0 or shape[0] == 0
