import dataclasses
import math

import numpy as np
import pytest

from weight_convert.errors import WeightConvertError
from weight_convert.specs import get_spec

SPEC = get_spec("qwen3_moe")
EXPERTS = "model.layers.3.mlp.experts"


def test_gate_and_up_are_the_halves_of_each_expert_in_memory_order() -> None:
    views = SPEC.stored_views(f"{EXPERTS}.gate_up_proj", (12, 8, 5))
    assert [view.key for view in views[:2]] == [
        f"{EXPERTS}.0.gate_proj.weight",
        f"{EXPERTS}.0.up_proj.weight",
    ]
    assert [view.offset for view in views] == [(e, r, 0) for e in range(12) for r in (0, 4)]
    assert {(view.shape, view.stored_shape) for view in views} == {((1, 4, 5), (4, 5))}
    assert views[20].key == f"{EXPERTS}.10.gate_proj.weight"


def test_down_is_one_view_per_expert() -> None:
    views = SPEC.stored_views(f"{EXPERTS}.down_proj", (12, 5, 4))
    assert [(view.key, view.offset) for view in views] == [
        (f"{EXPERTS}.{e}.down_proj.weight", (e, 0, 0)) for e in range(12)
    ]


def test_a_renamed_tensor_is_one_view_under_its_stored_name() -> None:
    (view,) = get_spec("mixtral").stored_views("model.layers.3.mlp.gate.weight", (8, 5))
    key = "model.layers.3.block_sparse_moe.gate.weight"
    assert dataclasses.astuple(view) == (key, (0, 0), (8, 5), (8, 5))
    (view,) = SPEC.stored_views(f"{EXPERTS}.down_proj", (12, 5, 4), "fused")
    assert view.key == f"{EXPERTS}.down_proj"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EXPERTS}.gate_up_proj", (12, 8, 5)),
        (f"{EXPERTS}.down_proj", (3, 5, 4)),
        ("model.layers.3.self_attn.q_proj.weight", (6, 5)),
        ("model.norm.weight", (5,)),
        ("model.scalar", ()),
    ],
)
def test_views_tile_the_tensor_and_lie_gapless_in_memory(name: str, shape: tuple[int, ...]) -> None:
    memory = np.arange(math.prod(shape)).reshape(shape)
    found = []
    for view in SPEC.stored_views(name, shape):
        box = tuple(slice(o, o + n) for o, n in zip(view.offset, view.shape, strict=True))
        found += memory[box].reshape(view.stored_shape).ravel().tolist()
    assert found == list(range(memory.size))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj_zeros",
        "model.layers.x.mlp.experts.gate_up_proj",
    ],
)
def test_everything_else_maps_to_itself(name: str) -> None:
    (view,) = SPEC.stored_views(name, (4, 6))
    assert dataclasses.astuple(view) == (name, (0, 0), (4, 6), (4, 6))


@pytest.mark.parametrize("shape", [(12, 7, 5), (12, 8), (0, 8, 5), (12, 8, 5, 1)])
def test_a_fused_name_with_another_shape_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gate_up_proj has shape .*\[expert \(part row\) column"):
        SPEC.stored_views(f"{EXPERTS}.gate_up_proj", shape)


def test_an_unknown_format_names_those_that_there_are() -> None:
    with pytest.raises(WeightConvertError, match="no format 'gguf'; it has transformers, megatron"):
        SPEC.format("gguf")
