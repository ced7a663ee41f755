"""Every key of a `config.json` that is known; a misspelt one is told to the user.

Invariant: a key is read by the decoder, or known to change nothing, or refused when its value asks
for something that no decoder here computes; all others are named by `unknown_keys`.

    unknown_keys({"model_type": "olmoe", "num_expert": 8})   # ["config.json: num_expert is ..."]

The lists, those of the families in `model.families`, are those of transformers' configuration
classes and of published files; a test holds them against `ConfigClass().to_dict()`.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from moe_train.errors import TrainValueError
from moe_train.model.families import RULES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF_ALL = _names(
    """
    attention_dropout bos_token_id eos_token_id hidden_act hidden_size initializer_range
    intermediate_size max_position_embeddings model_type num_attention_heads num_hidden_layers
    num_key_value_heads original_max_position_embeddings pad_token_id partial_rotary_factor
    quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    tie_word_embeddings vocab_size
    """
)
# What transformers writes into any file, of its versions 4 and 5; nothing is computed from it.
# So are keys that begin with "_" or "output_".
_GENERIC = _names(
    """
    add_cross_attention architectures attn_implementation auto_map bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
    """
)
_OF_ROPE = _names(
    """
    attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor
    mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta
    rope_type short_factor truncate type
    """
)
# Keys of other decoders: with any other value they would compute something else.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embd_pdrop": (0, None),
    "embedding_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "index_topk": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "moe_gate": ("topk", None),
    "residual_multiplier": (1, None),
    "resid_pdrop": (0, None),
    "hidden_dropout": (0, None),
    "use_alibi": (False, None),
    "use_parallel_residual": (False, None),
}


def refuse_other_computations(values: Mapping[str, Any]) -> None:
    """Refuse keys that ask for what no decoder here computes, and derived ones that are wrong.

    Raises:
        ValueError: names the key, its value and what it may be.
    """
    for key, allowed in _NEUTRAL.items():
        if key in values and values[key] not in allowed:
            raise TrainValueError(
                f"config.json: {key}={values[key]!r} is not supported, only {allowed[0]!r}; this "
                "decoder does not compute it"
            )
    for key, parts in (
        ("qk_head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")),
        ("experts_per_token", ("num_experts_per_tok",)),
    ):
        given = [values.get(part) for part in parts]
        numbers = [part for part in given if isinstance(part, int)]
        is_known = values.get(key) is not None and len(numbers) == len(parts)
        if is_known and values[key] != sum(numbers):
            raise TrainValueError(
                f"config.json: {key}={values[key]} contradicts {' + '.join(parts)} = "
                f"{sum(numbers)}; remove {key}"
            )


def unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """One line for each key that nothing here or in transformers reads in this family."""
    family = str(values.get("model_type"))
    known = _OF_ALL | _names(RULES[family].keys if family in RULES else "")
    lines = [
        _line(key, key, known, family)
        for key in values
        if key not in known | _GENERIC | _NEUTRAL.keys() and not key.startswith(("_", "output_"))
    ]
    for name in ("rope_parameters", "rope_scaling"):
        inside = values.get(name)
        if isinstance(inside, Mapping):
            lines += [
                _line(f"{name}.{key}", key, _OF_ROPE, family)
                for key in inside
                if key not in _OF_ROPE
            ]
    return lines


def _line(full_name: str, key: str, known: frozenset[str], family: str) -> str:
    near = get_close_matches(key, sorted(known), n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "it is kept, and changes nothing"
    return f"config.json: {full_name} is unknown for model_type={family!r}; {hint}"
