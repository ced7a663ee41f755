"""The shape of a decoder, read from and written as transformers' `config.json`.

Keys that this decoder does not use are carried through unchanged, so that a checkpoint made from a
transformers configuration has the same `config.json`. What the decoder cannot do (other
activations, quantised weights) is refused when the file is read, never ignored.

    config = DecoderConfig.from_file(Path("config.json"))       # of any family in model.families
    config.attention, config.rotary, config.moe, config.windows
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_pipeline import MoEConfig
from moe_train.errors import TrainValueError
from moe_train.model.families import TEXT_PARTS, ConfigReader, FamilyRules, rules_of
from moe_train.model.known_keys import refuse_other_computations, unknown_keys
from moe_train.model.layers import AttentionOptions
from moe_train.model.mla import MLAOptions
from moe_train.model.rope_config import latent_softmax_scale, read_rotary, rope_parameters
from moe_train.model.rotary import RotaryOptions

# What the value has to be where the file has the key, and why nothing else is built.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", None), "the MLPs are SwiGLU"),
    "mlp_bias": ((False, None), "the MLPs have no biases"),
    "use_bias": ((False, None), "the MLPs have no biases"),
    "moe_layer_freq": ((1, None), "experts are in every layer behind the dense ones"),
    "router_jitter_noise": ((0, 0.0, None), "this family has no such noise in transformers"),
    "rope_interleave": ((True, None), "this family turns neighbouring dims in transformers"),
    "clip_qkv": ((None,), "this family does not clip in transformers"),
    "quantization_config": ((None,), "weights are not stored quantised; dequantise them first"),
}
_MOE_NUMBERS = (
    "initializer_range",
    "moe_norm_min",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "swiglu_alpha",
    "swiglu_limit",
)
_LATENT_NORM_EPS = 1e-6  # of transformers' latent norms, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a decoder is made of, whatever its family.

    Attributes:
        model_type: of the `config.json`.
        intermediate_size: width of the MLP in layers without experts.
        num_attention_heads: query heads.
        attention: grouped-query or latent attention.
        rotary: how queries and keys are rotated.
        windows: each layer's sliding window; None for none.
        sparse_layers: whether each layer has experts.
        moe: of the layers with experts.
        num_nextn_predict_layers: layers behind the others for multi-token prediction, with experts.
        eos_token_ids: tokens that end a text, the usual one first.
        extra: the whole file, as it was read.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    attention: AttentionOptions | MLAOptions
    rotary: RotaryOptions
    windows: tuple[int | None, ...]
    sparse_layers: tuple[bool, ...]
    moe: MoEConfig
    rms_norm_eps: float
    initializer_range: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_nextn_predict_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """Read the dictionary of a transformers `config.json`.

        Raises:
            ValueError: an unknown model type, a missing or impossible size, or a feature that is
                not supported.
        """
        rules = rules_of(values.get("model_type"))
        _refuse_unsupported(values, rules)
        refuse_other_computations(values)
        try:
            return cls._read(ConfigReader(values), rules)
        except TrainValueError as error:
            # What is missing may be there under a misspelt name.
            notes = "".join(f"; {line}" for line in unknown_keys(values))
            raise TrainValueError(f"{error}{notes}") from error

    @classmethod
    def _read(cls, read: ConfigReader, rules: FamilyRules) -> "DecoderConfig":
        hidden_size, heads = read.size("hidden_size"), read.size("num_attention_heads")
        attention: AttentionOptions | MLAOptions
        if rules.is_latent:
            attention = _latent_attention(read, rules)
            head_dim = attention.qk_rope_head_dim
        else:
            attention = _grouped_attention(read, rules)
            head_dim = attention.head_dim
        return cls(
            model_type=str(read.need("model_type")),
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden_size,
            num_hidden_layers=read.size("num_hidden_layers"),
            intermediate_size=read.size("intermediate_size"),
            num_attention_heads=heads,
            attention=attention,
            rotary=read_rotary(read, rules, head_dim),
            windows=rules.windows(read),
            sparse_layers=rules.sparse_layers(read),
            moe=_moe(read),
            rms_norm_eps=_norm_eps(read, rules),
            initializer_range=read.number("initializer_range", default=0.02),
            max_position_embeddings=read.size("max_position_embeddings", default=32768),
            tie_word_embeddings=read.flag("tie_word_embeddings", default=rules.tie_word_embeddings),
            num_nextn_predict_layers=_num_mtp_layers(read, rules),
            eos_token_ids=_token_ids(read, "eos_token_id"),
            extra=dict(read.values),
        )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values; of latent attention as many as query heads."""
        attention = self.attention
        if isinstance(attention, MLAOptions):
            return self.num_attention_heads
        return attention.num_kv_heads

    @property
    def gathered_width(self) -> int:
        """Numbers of a token that tensor-parallel ranks gather for attention."""
        attention = self.attention
        if not isinstance(attention, MLAOptions):
            return self.hidden_size
        latents = attention.kv_lora_rank + attention.qk_rope_head_dim
        return latents + (attention.q_lora_rank or self.hidden_size)

    @property
    def norms_all_heads(self) -> bool:
        """Whether queries, or keys, of all heads are normed together."""
        attention = self.attention
        return isinstance(attention, AttentionOptions) and attention.qk_norm == "projection"

    @property
    def dense_widths(self) -> dict[str, int]:
        """The inner widths of layers without experts, and of shared experts, where there are."""
        widths = {}
        if not all(map(self.is_sparse, range(self.num_hidden_layers))):
            widths["intermediate_size"] = self.intermediate_size
        if self.moe.shared_expert is not None:
            width = self.moe.shared_expert.moe_shared_expert_intermediate_size
            widths["shared_expert_intermediate_size"] = width
        return widths

    @classmethod
    def from_file(cls, path: Path, *, of_text: bool = False) -> "DecoderConfig":
        """Read `config.json`, or the one inside a checkpoint folder.

        Args:
            path: the file or the folder.
            of_text: take the decoder of text out of a model of text and images.

        Raises:
            ValueError: the file is missing, is not JSON, or describes another decoder.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainValueError(f"cannot read the model config {file}: {error}") from error
        if not isinstance(values, dict):
            raise TrainValueError(f"the model config {file} is not a JSON object")
        return cls.from_dict(_text_part(values) if of_text else values)

    def to_json(self, dtype: str) -> str:
        """The text of a `config.json` that transformers opens; `dtype` is the weights' dtype."""
        values = dict(self.extra)
        values.pop("torch_dtype", None)
        values.setdefault("architectures", [rules_of(self.model_type).architecture])
        values["dtype"] = dtype
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def with_mtp_layers(self, count: int) -> "DecoderConfig":
        """This decoder with so many layers for multi-token prediction, also in its file."""
        extra = {k: v for k, v in self.extra.items() if k != "num_mtp_layers"}
        extra["num_nextn_predict_layers"] = count
        return replace(self, num_nextn_predict_layers=count, extra=extra)

    def with_vocab_size(self, rows: int) -> "DecoderConfig":
        """This decoder with so many rows of vocabulary, also in its file."""
        return replace(self, vocab_size=rows, extra={**self.extra, "vocab_size": rows})

    def with_token_ids(self, **ids: int | tuple[int, ...] | None) -> "DecoderConfig":
        """This decoder with other special tokens in its file, such as `eos_token_id=(2, 7)`."""
        extra = dict(self.extra)
        for name, given in ids.items():
            several = isinstance(given, tuple) and len(given) != 1
            extra[name] = given[0] if isinstance(given, tuple) and not several else given
        return replace(
            self, eos_token_ids=_token_ids(ConfigReader(extra), "eos_token_id"), extra=extra
        )

    def unknown_keys(self) -> list[str]:
        """One line for each key of the file that nothing reads, with the nearest known one."""
        return unknown_keys(self.extra)

    @property
    def eos_token_id(self) -> int | None:
        """The token that usually ends a text."""
        return next(iter(self.eos_token_ids), None)

    @property
    def mtp_layers(self) -> range:
        """Global numbers of the layers for multi-token prediction."""
        first = self.num_hidden_layers
        return range(first, first + self.num_nextn_predict_layers)

    def shares_embedding(self, mtp_loss_coef: float) -> bool:
        """Whether the last stage uses the embedding; on another rank than the first it has a copy.

        Args:
            mtp_loss_coef: of multi-token prediction, which embeds tokens; 0: not trained.
        """
        predicts_further = self.num_nextn_predict_layers > 0 and mtp_loss_coef > 0
        return self.tie_word_embeddings or predicts_further

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers: dropout, or jitter of the routers' input."""
        return self.attention.dropout > 0 or self.moe.router.moe_input_jitter_eps > 0

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.moe.num_experts

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts; those of multi-token prediction have."""
        return layer >= self.num_hidden_layers or self.sparse_layers[layer]

    def window(self, layer: int) -> int | None:
        """The sliding window of decoder layer `layer`."""
        return None if layer >= self.num_hidden_layers else self.windows[layer]


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the decoder of a model of text and images is by itself; any other one's values.

    Without images every token has one position, so that the sections of a rotary form in three
    dims turn as one. Its router always divides by the sum of the chosen scores.

    Raises:
        ValueError: the file says nothing of the decoder.
    """
    family = TEXT_PARTS.get(str(values.get("model_type")))
    if family is None:
        return values
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise TrainValueError(
            f"config.json: text_config={text!r}; model_type={values['model_type']!r} needs the "
            "object that describes its decoder"
        )
    part: dict[str, Any] = {"rope_theta": 500000.0, "max_position_embeddings": 128000, **text}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(part.get(name), Mapping):
            part[name] = {k: v for k, v in part[name].items() if not k.startswith("mrope_")}
    return part | {
        "architectures": [rules_of(family).architecture],
        "model_type": family,
        "norm_topk_prob": True,
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }


def _refuse_unsupported(values: Mapping[str, Any], rules: FamilyRules) -> None:
    for key, (allowed, why) in _REFUSED.items():
        if key in values and values[key] not in allowed and key not in rules.supports:
            raise TrainValueError(
                f"config.json: {key}={values[key]!r} is not supported, only {allowed[0]!r}: {why}"
            )


def _grouped_attention(read: ConfigReader, rules: FamilyRules) -> AttentionOptions:
    heads = read.size("num_attention_heads")
    head_dim = read.size("head_dim", default=rules.head_dim or read.size("hidden_size") // heads)
    clip = read.get("clip_qkv")
    # null says one key head per query head; a file without the key is not whole.
    is_null = "num_key_value_heads" in read.values and not read.get("num_key_value_heads")
    return AttentionOptions(
        num_heads=heads,
        num_kv_heads=heads if is_null else read.size("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=rules.qkv_bias(read),
        o_bias=rules.o_bias(read),
        qk_norm=rules.qk_norm if rules.has_qk_norm(read) else "none",
        norm_eps=_norm_eps(read, rules),
        clip_qkv=None if clip is None else read.number("clip_qkv", default=clip, positive=True),
        has_sinks=rules.has_sinks,
        rope_interleaved=rules.is_rope_interleaved,
        dropout=_dropout(read, rules),
    )


def _latent_attention(read: ConfigReader, rules: FamilyRules) -> MLAOptions:
    nope, rope = read.size("qk_nope_head_dim"), read.size("qk_rope_head_dim")
    if "q_lora_rank" not in read.values:
        raise TrainValueError(
            "config.json: missing q_lora_rank; add it, null for queries of full rank"
        )
    return MLAOptions(
        q_lora_rank=read.get("q_lora_rank"),
        kv_lora_rank=read.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=read.size("v_head_dim"),
        softmax_scale=latent_softmax_scale(rope_parameters(read, rules), nope + rope),
        attention_bias=rules.qkv_bias(read),
        rope_interleave=read.flag("rope_interleave", default=rules.is_rope_interleaved),
        rms_norm_eps=_LATENT_NORM_EPS,
        dropout=_dropout(read, rules),
    )


def _dropout(read: ConfigReader, rules: FamilyRules) -> float:
    p = read.number("attention_dropout", default=0.0)
    if not 0.0 <= p < 1.0 or (p and not rules.has_dropout):
        expected = "0 up to 1" if rules.has_dropout else "0: this family has none in transformers"
        raise TrainValueError(f"config.json: attention_dropout={p}; expected {expected}")
    return p


def _norm_eps(read: ConfigReader, rules: FamilyRules) -> float:
    return read.number("rms_norm_eps", default=rules.rms_norm_eps, positive=True)


def _token_ids(read: ConfigReader, name: str) -> tuple[int, ...]:
    """One token or a list of them; empty where there is none."""
    given = read.get(name, default=())
    ids = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise TrainValueError(
            f"config.json: {name}={given!r}; expected an integer or a list of them"
        )
    return ids


def _moe(read: ConfigReader) -> MoEConfig:
    family = rules_of(read.get("model_type")).block
    for name in _MOE_NUMBERS:
        read.number(name, default=0.0)
    try:
        return family.config(read.values)
    except (TypeError, ValueError) as error:
        raise TrainValueError(f"config.json: {error}") from error


def _num_mtp_layers(read: ConfigReader, rules: FamilyRules) -> int:
    other_name = read.integer("num_mtp_layers", default=0)
    count = read.integer("num_nextn_predict_layers", default=other_name)
    if count < 0:
        raise TrainValueError(f"config.json: num_nextn_predict_layers={count}; expected 0 or more")
    if count and not rules.has_mtp:
        raise TrainValueError(
            f"config.json: num_nextn_predict_layers={count} is not supported for "
            f"model_type={read.get('model_type')!r}; use 0 to train and save without these layers"
        )
    return count


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of stage `stage`.

    Raises:
        ValueError: the layers do not divide by the stages.
    """
    if num_layers % num_stages:
        raise TrainValueError(
            f"num_hidden_layers={num_layers} is not divisible by parallel.pp={num_stages} stages; "
            f"choose pp among {_divisors(num_layers)}"
        )
    size = num_layers // num_stages
    return range(stage * size, (stage + 1) * size)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
