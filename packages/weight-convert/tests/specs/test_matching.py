import pytest

from weight_convert.specs import Matcher, Side, fill

NAMES = ("{layer}.mlp.experts.{expert}.w1.weight", "{layer}.mlp.experts.{expert}.w3.weight")
MATCHER = Matcher([Side(names=NAMES, groups=())], ("_scale_inv",))


def test_a_member_is_found_by_name_part_and_expert() -> None:
    member = MATCHER.find("model.layers.7.mlp.experts.10.w3.weight")
    assert member is not None
    assert (member.side, member.part, member.expert, member.suffix) == (0, 1, 10, "")
    assert fill(NAMES[1], member.places, 10) == "model.layers.7.mlp.experts.10.w3.weight"
    scale = MATCHER.find("layers.7.mlp.experts.0.w1.weight_scale_inv")
    assert scale is not None
    assert (scale.part, scale.suffix) == (0, "_scale_inv")


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.7.mlp.experts.03.w1.weight",
        "model.layers.7.mlp.experts.3xw1.weight",
        "model.layers.7.mlp.experts.3.w2.weight",
        "model.layers.x.mlp.experts.3.w1.weight",
        "notlayers.7.mlp.experts.3.w1.weight",
        "model.layers.7.mlp.experts.w1.weight",
        f"model.layers.7.mlp.experts.{'9' * 5000}.w1.weight",
    ],
)
def test_names_that_are_nearly_a_members_are_none(key: str) -> None:
    assert MATCHER.find(key) is None
    assert MATCHER.find("model.layers.7.mlp.experts.3.w1.weight") is not None


def test_what_belongs_to_one_expert_is_noticed() -> None:
    assert MATCHER.is_of_one_expert("model.layers.7.mlp.experts.3.w1.qweight")
    assert not MATCHER.is_of_one_expert("model.layers.7.mlp.gate.weight")


def test_a_path_before_the_layers_may_be_any_or_none() -> None:
    matcher = Matcher([Side(names=("{model}norm.weight",), groups=())])
    for key in ("norm.weight", "model.norm.weight", "model.language_model.norm.weight"):
        assert matcher.find(key) is not None
    assert matcher.find("model.layers.3.norm.weight") is None
