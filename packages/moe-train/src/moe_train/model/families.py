"""What a `config.json` means where the families of decoders differ.

A family is data: which keys say that a projection has a bias, which norm queries and keys pass,
which layers have experts or a window. Nothing here builds a layer: the answers become the options
of `model.layers`, `model.mla` and `model.rotary`. What is MoE is read by `moe_pipeline.family_of`.

A family is added by one more entry of `RULES`; docs/guides/add-a-family.md shows it.

    rules = rules_of("glm4_moe")
    read = ConfigReader(config_json_dict)
    rules.qkv_bias(read), rules.sparse_layers(read)

The defaults are those that transformers gives a key that the file lacks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from moe_pipeline import family_of
from moe_pipeline.families import Family
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A `config.json` whose values are checked as they are read.

    Raises:
        ValueError: of each method: the key is missing without a default, or has another type.
    """

    values: Mapping[str, Any]

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is there and not null."""
        present = (self.values[name] for name in names if self.values.get(name) is not None)
        return next(present, default)

    def need(self, *names: str) -> Any:
        """Like `get`, of a key that has no default."""
        value = self.get(*names)
        if value is None:
            raise TrainValueError(f"config.json: missing {' or '.join(names)}; add it")
        return value

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer; needed if it has no default."""
        value = self.need(*names) if default is None else self.get(*names, default=default)
        return int(_expect(names[0], value, _is_integer(value) and value > 0, "a positive integer"))

    def integer(self, name: str, *, default: int) -> int:
        """An integer of any sign."""
        value = self.get(name, default=default)
        return int(_expect(name, value, _is_integer(value), "an integer"))

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default=default)
        return bool(_expect(name, value, isinstance(value, bool), "true or false"))

    def number(self, name: str, *, default: float, positive: bool = False) -> float:
        """A finite number, which may be an integer."""
        value = self.get(name, default=default)
        is_number = (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)
        kind = "positive finite number" if positive else "finite number"
        return float(_expect(name, value, is_number and (value > 0 or not positive), f"a {kind}"))

    def items(self, name: str) -> Sequence[Any]:
        """A list, empty where there is none."""
        value = self.get(name, default=())
        return tuple(_expect(name, value, isinstance(value, list | tuple), "a list"))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _expect(name: str, value: Any, is_right: bool, expected: str) -> Any:
    if not is_right:
        raise TrainValueError(f"config.json: {name}={value!r}; expected {expected}")
    return value


Flag = Callable[[ConfigReader], bool]
Layers = Callable[[ConfigReader], tuple[bool, ...]]
Windows = Callable[[ConfigReader], tuple[int | None, ...]]


def _key(name: str, default: bool) -> Flag:
    return lambda read: read.flag(name, default=default)


def _always(value: bool) -> Flag:
    return lambda _: value


def _num_layers(read: ConfigReader) -> range:
    return range(read.size("num_hidden_layers"))


def _every_layer(read: ConfigReader) -> tuple[bool, ...]:
    return tuple(True for _ in _num_layers(read))


def _qwen_layers(read: ConfigReader) -> tuple[bool, ...]:
    dense = read.items("mlp_only_layers")
    step = read.size("decoder_sparse_step", default=1)
    return tuple(n not in dense and (n + 1) % step == 0 for n in _num_layers(read))


def _behind_dense(default: int) -> Layers:
    """Every layer from `first_k_dense_replace` on."""

    def layers(read: ConfigReader) -> tuple[bool, ...]:
        first = read.integer("first_k_dense_replace", default=default)
        return tuple(n >= first for n in _num_layers(read))

    return layers


def _ernie_layers(read: ConfigReader) -> tuple[bool, ...]:
    start = read.integer("moe_layer_start_index", default=1)
    end = read.integer("moe_layer_end_index", default=-1)
    last = len(_num_layers(read)) - 1 if end == -1 else end
    step = read.size("moe_layer_interval", default=1)
    return tuple(start <= n <= last and (n + 1) % step == 0 for n in _num_layers(read))


def _no_windows(read: ConfigReader) -> tuple[int | None, ...]:
    if read.get("sliding_window"):
        raise TrainValueError(
            f"config.json: sliding_window={read.get('sliding_window')} is not supported for "
            f"model_type={read.get('model_type')!r}, which has none in transformers; use null"
        )
    return tuple(None for _ in _num_layers(read))


def _one_window(read: ConfigReader) -> tuple[int | None, ...]:
    """The same in every layer (Mixtral)."""
    window = read.size("sliding_window") if read.get("sliding_window") else None
    return tuple(window for _ in _num_layers(read))


def _switched_window(read: ConfigReader) -> tuple[int | None, ...]:
    """The same in every layer, behind a switch (Qwen3-MoE)."""
    if not read.flag("use_sliding_window", default=False):
        return tuple(None for _ in _num_layers(read))
    return _one_window(read)


def _windows_by_type(default: Callable[[ConfigReader, int], bool]) -> Windows:
    """By `layer_types`, or by a rule where the file has none."""

    def windows(read: ConfigReader) -> tuple[int | None, ...]:
        if read.get("layer_types") is None:
            slides = [default(read, n) for n in _num_layers(read)]
        else:
            slides = [_is_sliding(kind) for kind in read.items("layer_types")]
        if len(slides) != len(_num_layers(read)):
            raise TrainValueError(
                f"config.json: layer_types names {len(slides)} layers and num_hidden_layers="
                f"{len(_num_layers(read))}; give one type for each"
            )
        if not any(slides):
            return tuple(None for _ in slides)
        window = read.size("sliding_window")
        return tuple(window if slide else None for slide in slides)

    return windows


def _is_sliding(kind: object) -> bool:
    if kind not in ("sliding_attention", "full_attention"):
        raise TrainValueError(
            f"config.json: layer_types has {kind!r}; it is 'full_attention' or 'sliding_attention'"
        )
    return kind == "sliding_attention"


def _qwen2_slides(read: ConfigReader, layer: int) -> bool:
    below = layer < read.integer("max_window_layers", default=28)
    return read.flag("use_sliding_window", default=False) and below and layer % 2 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """How one `model_type` is read; each attribute says so of the part of its name.

    Attributes:
        architecture: transformers' class, for `architectures` in the file.
        qkv_bias, o_bias: whether the attention's projections have biases.
        qk_norm: the kind of `AttentionOptions.qk_norm`, where `has_qk_norm` says so.
        sparse_layers: which layers have experts.
        windows: each layer's sliding window, None for none.
        rope: what `rope_parameters` is where the file has none.
        partial_rotary_factor: rotated share of a head where the file does not say.
        is_rope_interleaved, is_rope_fp32: see `model.layers` and `model.rotary`.
        has_sinks: attention sinks.
        has_dropout: `attention_dropout` drops attention weights in training.
        is_latent: DeepSeek's latent attention instead of grouped queries.
        has_mtp: `num_nextn_predict_layers` more layers predict tokens further ahead.
        block: the MoE block and how transformers' module names its tensors; names on disk are
            weight-convert's.
        keys: names of its config.json keys besides those of every family.
        supports: of the keys that are refused elsewhere, those that this family has.
        head_dim, rms_norm_eps, tie_word_embeddings: where the file does not say; a `head_dim` of 0
            is the hidden size over the heads.
    """

    architecture: str
    block: Family
    qkv_bias: Flag = field(default=_key("attention_bias", False))
    o_bias: Flag = field(default=_key("attention_bias", False))
    qk_norm: str = "none"
    has_qk_norm: Flag = field(default=_always(True))
    sparse_layers: Layers = field(default=_every_layer)
    windows: Windows = field(default=_no_windows)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    partial_rotary_factor: float = 1.0
    is_rope_interleaved: bool = False
    is_rope_fp32: bool = False
    has_sinks: bool = False
    has_dropout: bool = True
    is_latent: bool = False
    has_mtp: bool = False
    keys: str = ""
    supports: tuple[str, ...] = ()
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


def rules_of(model_type: object) -> FamilyRules:
    """The rules of a `model_type`."""
    if isinstance(model_type, str) and model_type in RULES:
        return RULES[model_type]
    near = get_close_matches(str(model_type), RULES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if model_type in TEXT_PARTS:
        hint = "; of this one model.init_from trains the decoder of text, and writes it as such"
    raise TrainValueError(
        f"config.json: model_type={model_type!r}; this trainer builds the decoders "
        f"{', '.join(sorted(RULES))}{hint}"
    )


# Models of text and images whose decoder, where there is no image, is that of a family here.
TEXT_PARTS = {"qwen3_vl_moe": "qwen3_moe"}


_DEEPSEEK = """
    attention_bias aux_loss_alpha ep_size first_k_dense_replace head_dim kv_lora_rank mlp_bias
    moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob
    num_experts_per_tok pretraining_tp q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim
    routed_scaling_factor scoring_func seq_aux topk_group topk_method v_head_dim
"""
_QWEN = """
    attention_bias decoder_sparse_step head_dim max_window_layers mlp_only_layers
    moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts
    router_aux_loss_coef use_sliding_window
"""


RULES: dict[str, FamilyRules] = {
    "mixtral": FamilyRules(
        architecture="MixtralForCausalLM",
        block=family_of("mixtral"),
        rms_norm_eps=1e-5,
        qkv_bias=_always(False),
        o_bias=_always(False),
        windows=_one_window,
        rope={"rope_theta": 1e6},
        supports=("router_jitter_noise",),
        keys="head_dim num_experts_per_tok num_local_experts router_aux_loss_coef "
        "router_jitter_noise",
    ),
    "olmoe": FamilyRules(
        architecture="OlmoeForCausalLM",
        block=family_of("olmoe"),
        rms_norm_eps=1e-5,
        qk_norm="projection",
        supports=("clip_qkv",),
        keys="attention_bias clip_qkv norm_topk_prob num_experts num_experts_per_tok "
        "router_aux_loss_coef",
    ),
    "qwen2_moe": FamilyRules(
        architecture="Qwen2MoeForCausalLM",
        block=family_of("qwen2_moe"),
        qkv_bias=_key("qkv_bias", True),
        o_bias=_always(False),
        sparse_layers=_qwen_layers,
        windows=_windows_by_type(_qwen2_slides),
        keys=_QWEN + "layer_types qkv_bias shared_expert_intermediate_size",
    ),
    "qwen3_moe": FamilyRules(
        architecture="Qwen3MoeForCausalLM",
        block=family_of("qwen3_moe"),
        qk_norm="head",
        sparse_layers=_qwen_layers,
        windows=_switched_window,
        keys=_QWEN,
    ),
    "deepseek_v2": FamilyRules(
        architecture="DeepseekV2ForCausalLM",
        block=family_of("deepseek_v2"),
        sparse_layers=_behind_dense(0),
        is_rope_interleaved=True,
        is_latent=True,
        keys=_DEEPSEEK,
    ),
    "deepseek_v3": FamilyRules(
        architecture="DeepseekV3ForCausalLM",
        block=family_of("deepseek_v3"),
        sparse_layers=_behind_dense(3),
        is_rope_interleaved=True,
        is_latent=True,
        has_mtp=True,
        supports=("rope_interleave",),
        keys=_DEEPSEEK + "num_nextn_predict_layers rope_interleave",
    ),
    "glm4_moe": FamilyRules(
        architecture="Glm4MoeForCausalLM",
        block=family_of("glm4_moe"),
        rms_norm_eps=1e-5,
        o_bias=_always(False),
        qk_norm="head",
        has_qk_norm=_key("use_qk_norm", False),
        sparse_layers=_behind_dense(1),
        partial_rotary_factor=0.5,
        has_mtp=True,
        keys="attention_bias first_k_dense_replace head_dim moe_intermediate_size n_group "
        "n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok "
        "num_nextn_predict_layers routed_scaling_factor scoring_func topk_group topk_method "
        "use_qk_norm",
    ),
    "ernie4_5_moe": FamilyRules(
        architecture="Ernie4_5_MoeForCausalLM",
        block=family_of("ernie4_5_moe"),
        rms_norm_eps=1e-5,
        qkv_bias=_key("use_bias", False),
        o_bias=_key("use_bias", False),
        sparse_layers=_ernie_layers,
        rope={"rope_theta": 500000.0},
        is_rope_interleaved=True,
        is_rope_fp32=True,
        has_dropout=False,
        tie_word_embeddings=True,
        keys="head_dim moe_capacity moe_gate moe_intermediate_size moe_k "
        "moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts "
        "moe_num_shared_experts moe_use_aux_free num_mtp_layers num_nextn_predict_layers "
        "router_aux_loss_coef use_bias",
    ),
    "gpt_oss": FamilyRules(
        architecture="GptOssForCausalLM",
        block=family_of("gpt_oss"),
        rms_norm_eps=1e-5,
        qkv_bias=_key("attention_bias", True),
        o_bias=_key("attention_bias", True),
        windows=_windows_by_type(lambda _, layer: layer % 2 == 0),
        rope={
            "rope_theta": 150000.0,
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        has_sinks=True,
        head_dim=64,
        keys="attention_bias experts_per_token head_dim initial_context_length layer_types "
        "num_experts_per_tok num_local_experts router_aux_loss_coef swiglu_alpha swiglu_limit",
    ),
}
