import pytest

from moe_train.model.known_keys import refuse_other_computations, unknown_keys


def test_unknown_keys_are_named_with_the_nearest_known_one() -> None:
    values = {"model_type": "olmoe", "num_expert": 8, "rope_thetaa": 1e4, "made_by": "me"}
    assert unknown_keys(values) == [
        "config.json: num_expert is unknown for model_type='olmoe'; did you mean num_experts?",
        "config.json: rope_thetaa is unknown for model_type='olmoe'; did you mean rope_theta?",
        "config.json: made_by is unknown for model_type='olmoe'; it is kept, and changes nothing",
    ]


def test_keys_of_another_family_and_inside_rope_are_unknown() -> None:
    values = {"model_type": "mixtral", "moe_k": 2, "rope_parameters": {"rope_type": "x", "fctr": 1}}
    lines = unknown_keys(values)
    assert len(lines) == 2
    assert "moe_k is unknown" in lines[0]
    assert "rope_parameters.fctr is unknown" in lines[1] and "factor?" in lines[1]


def test_generic_keys_are_silent() -> None:
    keys = ("use_cache", "transformers_version", "_name_or_path", "output_attentions", "dtype")
    assert unknown_keys({"model_type": "qwen3_moe", **dict.fromkeys(keys)}) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"logit_scale": 0.5}, "only 1; this decoder does not compute it"),
        ({"moe_gate": "sinkhorn"}, "moe_gate='sinkhorn' is not supported, only 'topk'"),
        (
            {"qk_head_dim": 9, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
            "qk_head_dim=9 contradicts qk_nope_head_dim . qk_rope_head_dim = 8; remove",
        ),
        ({"experts_per_token": 4, "num_experts_per_tok": 2}, "experts_per_token=4 contradicts"),
    ],
)
def test_keys_that_ask_for_another_computation_are_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_other_computations(values)
    refuse_other_computations(dict.fromkeys(values))
