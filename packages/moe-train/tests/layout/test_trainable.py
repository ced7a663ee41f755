from typing import Any

import pytest

from moe_train.layout.trainable import chosen_names
from moe_train.model.config import DecoderConfig


def config_of(**changes: Any) -> DecoderConfig:
    values = {
        "model_type": "mixtral",
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return DecoderConfig.from_dict({**values, **changes})


EXPERTS = {
    f"model.layers.{n}.mlp.experts.{name}" for n in (0, 1) for name in ("gate_up_proj", "down_proj")
}


@pytest.mark.parametrize(
    "patterns",
    [
        ["*.mlp.experts.*"],
        ["*.block_sparse_moe.experts.*"],
        ["*.experts.*.w[123].weight"],
        ["model.layers.*", "!*norm*", "!*self_attn*", "!*.gate.weight"],
        ["!*", "*.experts.*"],
    ],
)
def test_experts_are_found_by_names_in_memory_and_on_disk(patterns: list[str]) -> None:
    assert chosen_names("train.trainable", patterns, config_of()) == EXPERTS


def test_without_patterns_or_with_exclusions_alone_all_else_is_trained() -> None:
    everything = chosen_names("train.trainable", (), config_of())
    assert "lm_head.weight" in everything and len(everything) == 2 * 9 + 3
    assert chosen_names("train.trainable", ["!*.experts.*"], config_of()) == everything - EXPERTS


def test_the_last_pattern_that_matches_decides() -> None:
    names = chosen_names(
        "train.trainable", ["*norm*", "!model.layers.0.*", "*.0.input_layernorm*"], config_of()
    )
    assert names == {
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    }


def test_names_of_gpt_oss_and_of_multi_token_prediction_are_those_on_disk() -> None:
    router = chosen_names(
        "train.trainable", ["*.mlp.router.*"], config_of(model_type="gpt_oss", sliding_window=4)
    )
    assert router == {f"model.layers.{n}.mlp.gate.{w}" for n in (0, 1) for w in ("weight", "bias")}
    glm = config_of(
        model_type="glm4_moe", n_routed_experts=4, moe_intermediate_size=6, n_shared_experts=1
    ).with_mtp_layers(1)
    assert chosen_names("train.trainable", ["model.layers.2.self_attn.o_proj.weight"], glm) == {
        "model.layers.2.mtp_block.self_attn.o_proj.weight"
    }


@pytest.mark.parametrize(
    ("patterns", "changes", "message"),
    [
        (["model.layers.0.self_atn.q_proj.weight"], {}, "nearest names are .*self_attn.q_proj"),
        (["*norm*", "!lm_hed.weight"], {}, "'!lm_hed.weight' matches no.*lm_head.weight"),
        (["*.experts.*.w1.weight"], {}, "matches 4 of the 8 stored tensors .*gate_up_proj"),
        (["*.experts.2.*"], {}, "matches 2 of the 8"),
        (["*", "!*"], {}, "leaves no parameter"),
        (["lm_head*"], {"tie_word_embeddings": True}, "tied to the embedding; name model.embed"),
    ],
)
def test_patterns_that_choose_nothing_or_a_part_are_refused(
    patterns: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chosen_names("train.trainable", patterns, config_of(**changes))
