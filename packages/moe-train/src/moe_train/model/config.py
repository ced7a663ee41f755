"""The shape of a Qwen3-MoE decoder, read from and written as transformers' `config.json`.

Keys that this decoder does not use are carried through unchanged, so that a checkpoint made from a
transformers configuration has the same `config.json`. What the decoder cannot do (sliding windows,
scaled rotary embeddings, other activations) is refused when the file is read, never ignored.

    config = Qwen3MoeConfig.from_file(Path("config.json"))
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# transformers has written the same value under several names over its versions.
_SPELLINGS = {"num_local_experts": "num_experts", "torch_dtype": "dtype"}
_REFUSED = {
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
    "hidden_act": ("silu",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig:
    """Sizes of the decoder; the names are those of transformers' `Qwen3MoeConfig`.

    Raises:
        ValueError: a size is not positive, heads do not divide, or k exceeds the experts.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    head_dim: int
    norm_topk_prob: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001
    eos_token_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int and (not isinstance(value, int) or value <= 0):
                raise ValueError(f"config.json: {item.name}={value!r}; expected a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; choose a divisor"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"config.json: num_experts_per_tok={self.num_experts_per_tok} exceeds "
                f"num_experts={self.num_experts}; choose at most {self.num_experts}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim={self.head_dim}; rotary needs an even number")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Qwen3MoeConfig":
        """Read the dictionary of a transformers `config.json`.

        Raises:
            ValueError: another model type, a missing size, or a feature that is not supported.
        """
        given = {_SPELLINGS.get(key, key): value for key, value in values.items()}
        model_type = given.get("model_type")
        if model_type != "qwen3_moe":
            raise ValueError(
                f"config.json: model_type={model_type!r}; this trainer builds 'qwen3_moe' decoders"
            )
        for key, allowed in _REFUSED.items():
            if given.get(key, allowed[0]) not in allowed:
                raise ValueError(
                    f"config.json: {key}={given[key]!r} is not supported; use {allowed[0]!r}"
                )
        known = {item.name for item in fields(cls)} - {"extra"}
        own = {key: value for key, value in given.items() if key in known and value is not None}
        own["rope_theta"] = _rope_theta(given)
        own["mlp_only_layers"] = tuple(given.get("mlp_only_layers") or ())
        eos = given.get("eos_token_id")
        own["eos_token_id"] = eos[0] if isinstance(eos, list) else eos
        if "hidden_size" in own and "num_attention_heads" in own:
            own.setdefault("head_dim", own["hidden_size"] // own["num_attention_heads"])
        missing = [
            item.name
            for item in fields(cls)
            if item.type is int and item.name not in own and item.name != "max_position_embeddings"
            if item.name not in ("decoder_sparse_step",)
        ]
        if missing:
            raise ValueError(f"config.json: missing {', '.join(missing)}; add them")
        return cls(**own, extra=dict(values))

    @classmethod
    def from_file(cls, path: Path) -> "Qwen3MoeConfig":
        """Read `config.json`, or the one inside a checkpoint folder.

        Raises:
            ValueError: the file is missing, is not JSON, or describes another decoder.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the model config {file}: {error}") from error
        return cls.from_dict(values)

    def to_json(self, dtype: str) -> str:
        """The text of a `config.json` that transformers opens; `dtype` is the weights' dtype."""
        values = dict(self.extra)
        values.pop("torch_dtype", None)
        values.setdefault("architectures", ["Qwen3MoeForCausalLM"])
        values["dtype"] = dtype
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts (transformers' rule)."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def _rope_theta(given: Mapping[str, Any]) -> float:
    """Newer files nest it in `rope_parameters`, older ones have it beside `rope_scaling`."""
    nested = given.get("rope_parameters") or {}
    scaling = given.get("rope_scaling") or {}
    kind = nested.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ValueError(f"config.json: rope_type={kind!r} is not supported; use 'default'")
    return float(nested.get("rope_theta", given.get("rope_theta", 10000.0)))
