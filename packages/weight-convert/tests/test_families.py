import dataclasses
import math

import numpy as np
import pytest

from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.families import FAMILIES, FusedExperts, get_spec

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
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj_scale",
        "model.layers.x.mlp.experts.gate_up_proj",
    ],
)
def test_everything_else_maps_to_itself(name: str) -> None:
    (view,) = SPEC.stored_views(name, (4, 6))
    assert dataclasses.astuple(view) == (name, (0, 0), (4, 6), (4, 6))


def test_locate_inverts_stored_views() -> None:
    for name, shape in (
        (f"{EXPERTS}.gate_up_proj", (13, 8, 5)),
        (f"{EXPERTS}.down_proj", (13, 5, 4)),
    ):
        for number, view in enumerate(SPEC.stored_views(name, shape)):
            place = SPEC.locate(view.key)
            assert place is not None
            assert place.fused_key == name
            assert place.expert * len(place.group.parts) + place.part == number


def test_a_base_model_without_the_model_prefix_is_recognised() -> None:
    place = SPEC.locate("layers.7.mlp.experts.11.up_proj.weight")
    assert place is not None
    assert (place.fused_key, place.expert, place.part) == (
        "layers.7.mlp.experts.gate_up_proj",
        11,
        1,
    )


@pytest.mark.parametrize(
    "key",
    [
        f"{EXPERTS}.3.gate_proj.weight_scale_inv",
        f"{EXPERTS}.03.gate_proj.weight",
        f"{EXPERTS}.gate_up_proj",
        "notlayers.3.mlp.experts.1.gate_proj.weight",
        f"{EXPERTS}.3xgate_proj.weight",
    ],
)
def test_names_that_are_nearly_expert_weights_have_no_place(key: str) -> None:
    assert SPEC.locate(key) is None


def test_scales_of_single_experts_are_noticed() -> None:
    assert SPEC.is_unmapped_expert(f"{EXPERTS}.3.gate_proj.weight_scale_inv")
    assert not SPEC.is_unmapped_expert(f"{EXPERTS}.3.gate_proj.weight")
    assert not SPEC.is_unmapped_expert("model.layers.3.mlp.gate.weight")


@pytest.mark.parametrize("shape", [(12, 7, 5), (12, 8), (0, 8, 5), (12, 8, 5, 1)])
def test_a_fused_name_with_another_shape_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gate_up_proj has shape .*expected \[experts, 2 \* rows"):
        SPEC.stored_views(f"{EXPERTS}.gate_up_proj", shape)


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(UnknownFamilyError, match=r"'qwen3moe'; did you mean 'qwen3_moe'\?"):
        get_spec("qwen3moe")
    with pytest.raises(WeightConvertError, match="known: qwen3_moe"):
        get_spec("gpt2")


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("{layer}.a", ()),
        ("a", ("{layer}.{expert}.b",)),
        ("{layer}.a", ("{layer}.b",)),
        ("{layer}.a", ("{expert}.b",)),
        ("{layer}.{expert}.a", ("{layer}.{expert}.b",)),
        ("{layer}.a", ("{layer}.{expert}.b", "{layer}.{expert}.b")),
    ],
)
def test_a_template_that_cannot_be_inverted_is_refused(fused: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs|must"):
        FusedExperts(fused=fused, parts=parts)


def test_families_are_listed_under_their_model_type() -> None:
    assert all(name == spec.model_type for name, spec in FAMILIES.items())
