"""The MoE blocks of the published families: what their configurations mean, and their tensors.

A family is data: which keys of a `config.json` give which field of `MoEConfig`, and how the block's
tensors are named and laid out in transformers. A layer built from `Family.config` and loaded with
`Family.from_transformers` computes what transformers' block computes.

    family = family_of("gpt_oss")
    layer = MoELayer(family.config(config))                     # config.json's dict, or the object
    layer.load_state_dict(family.from_transformers(block.state_dict()))
    block.load_state_dict(family.to_transformers(layer.state_dict()))      # bit for bit

Two things differ on purpose. Coefficients of balancing losses are taken as they are, while
transformers' loss is `num_experts_per_tok` times the one defined in `moe_pipeline.router.aux_loss`.
And Mixtral's jitter perturbs what the router sees, not also what the experts see.

Attention, norms and which layers have experts are the model's business. One expert per stored
tensor, as on disk, is `weight_convert`'s. Dims: E experts, D hidden, H intermediate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_pipeline._checks import check_type
from moe_pipeline.config import (
    ExpertsOptions,
    MoEConfig,
    RouterLosses,
    RouterOptions,
    SharedExpertOptions,
)
from moe_pipeline.errors import MoEValueError


class TransformersConfig(Protocol):
    """A configuration object of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Its values by the names that `config.json` has."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One tensor of a block: its name on both sides and the change of layout between them.

    `to_ours` and `to_theirs` undo each other exactly; they copy only where the layout differs.
    """

    theirs: str
    ours: str
    to_ours: Callable[[Tensor], Tensor] = lambda tensor: tensor
    to_theirs: Callable[[Tensor], Tensor] = lambda tensor: tensor


@dataclass(frozen=True, slots=True)
class _Values:
    """A config.json that names what it misses."""

    model_type: str
    values: Mapping[str, Any]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that is there and not null."""
        present = (self.values[name] for name in names if self.values.get(name) is not None)
        return next(present, default)

    def need(self, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise MoEValueError(
                f"a {self.model_type} configuration needs {' or '.join(names)}, which it lacks; "
                "give the whole config.json"
            )
        return value

    def refuse_other(self, name: str, expected: object, why: str) -> None:
        if self.get(name, default=expected) != expected:
            raise MoEValueError(
                f"{self.model_type}: {name}={self.values[name]!r} is not supported, only "
                f"{expected!r}: {why}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        model_type: as in `config.json`.
        block_keys: every tensor that a block of this family may have.
        router, shared, experts: what a configuration says about each part.
        intermediate_size: the configuration's name for an expert's width.
    """

    model_type: str
    block_keys: tuple[BlockKey, ...]
    router: Callable[[_Values], RouterOptions]
    shared: Callable[[_Values], SharedExpertOptions | None] = field(default=lambda _: None)
    experts: Callable[[_Values], ExpertsOptions] = field(
        default=lambda values: ExpertsOptions(hidden_act=values.get("hidden_act", default="silu"))
    )
    intermediate_size: str = "moe_intermediate_size"

    def config(self, values: Mapping[str, Any] | TransformersConfig) -> MoEConfig:
        """Sizes, routing rule, losses and experts of this family's MoE layers.

        The balancing loss is over the microbatch, or over each sequence if the configuration has
        DeepSeek's `seq_aux`; its coefficient is 0 where the configuration has none. Other keys that
        are missing mean what they mean in transformers.

        Args:
            values: the dict of a `config.json`, or a configuration object of transformers.

        Raises:
            ValueError: a key that is needed is missing, or asks for what no block of this family
                in transformers does.
        """
        mapping = values if isinstance(values, Mapping) else values.to_dict()
        given = mapping.get("model_type", self.model_type)
        if given != self.model_type:
            raise MoEValueError(
                f"this is the family {self.model_type!r} and the configuration is of {given!r}; "
                f"use family_of({given!r})"
            )
        read = _Values(self.model_type, mapping)
        return MoEConfig(
            hidden_size=read.need("hidden_size"),
            moe_intermediate_size=read.need(self.intermediate_size),
            num_experts=read.need(
                "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
            ),
            num_experts_per_tok=read.need("num_experts_per_tok", "moe_k"),
            router=self.router(read),
            losses=_losses(read),
            experts=self.experts(read),
            shared_expert=self.shared(read),
            initializer_range=read.get("initializer_range", default=0.02),
        )

    def from_transformers(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of a `MoELayer` from that of one block; keys relative to the block.

        Tensors whose layout is the same are passed on, not copied.

        Raises:
            ValueError: a key that no block of this family has.
        """
        by_key = {key.theirs: key for key in self.block_keys}
        self._check_keys(state, by_key, "a block of transformers")
        return {by_key[name].ours: by_key[name].to_ours(tensor) for name, tensor in state.items()}

    def to_transformers(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `from_transformers`, bit for bit.

        Raises:
            ValueError: a key that no layer of this family has.
        """
        by_key = {key.ours: key for key in self.block_keys}
        self._check_keys(state, by_key, "a MoELayer")
        return {
            by_key[name].theirs: by_key[name].to_theirs(tensor) for name, tensor in state.items()
        }

    def _check_keys(
        self, state: Mapping[str, Tensor], known: Mapping[str, BlockKey], what: str
    ) -> None:
        unknown = sorted(state.keys() - known.keys())
        if unknown:
            raise MoEValueError(
                f"{what} of the family {self.model_type!r} has no {', '.join(unknown)}; it has "
                f"{', '.join(sorted(known))}"
            )


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ValueError: none of `FAMILIES`.
    """
    check_type("model_type", model_type, str)
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    near = get_close_matches(model_type, FAMILIES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise MoEValueError(
        f"no MoE family for model_type {model_type!r}{hint} (known: {', '.join(sorted(FAMILIES))})"
    )


def _losses(values: _Values) -> RouterLosses:
    per_sequence = values.get("aux_loss_alpha") is not None and values.get("seq_aux")
    return RouterLosses(
        router_aux_loss_coef=values.get("router_aux_loss_coef", "aux_loss_alpha", default=0.0),
        moe_aux_loss_scope="sequence" if per_sequence else "microbatch",
    )


def _always_normalised(values: _Values) -> RouterOptions:
    return RouterOptions(
        moe_input_jitter_eps=values.get("router_jitter_noise", default=0.0),
    )


def _normalised_if_asked(values: _Values) -> RouterOptions:
    return RouterOptions(norm_topk_prob=values.get("norm_topk_prob", default=False))


def _deepseek_v2_router(values: _Values) -> RouterOptions:
    values.refuse_other("scoring_func", "softmax", "the routers of this family use no other scores")
    values.refuse_other("norm_topk_prob", False, "transformers never normalises in this family")
    method = values.get("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise MoEValueError(
            f"deepseek_v2: topk_method={method!r} is unknown; it is 'greedy' or "
            "'group_limited_greedy'"
        )
    grouped = method == "group_limited_greedy"
    return RouterOptions(
        norm_topk_prob=False,
        routed_scaling_factor=values.get("routed_scaling_factor", default=1.0),
        n_group=values.need("n_group") if grouped else 1,
        topk_group=values.need("topk_group") if grouped else 1,
    )


def _sigmoid_with_bias(
    *, routed_scaling_factor: float, n_group: int, topk_group: int
) -> Callable[[_Values], RouterOptions]:
    """The router of DeepSeek-V3 and GLM-4, with the family's own defaults."""

    def router(values: _Values) -> RouterOptions:
        why = "the routers of this family use no other scores"
        values.refuse_other("scoring_func", "sigmoid", why)
        scale = values.get("routed_scaling_factor", default=routed_scaling_factor)
        return RouterOptions(
            moe_router_score_function="sigmoid",
            norm_topk_prob=values.get("norm_topk_prob", default=True),
            routed_scaling_factor=scale,
            n_group=values.get("n_group", default=n_group),
            topk_group=values.get("topk_group", default=topk_group),
            moe_router_group_score="top2_sum",
            moe_router_enable_expert_bias=True,
        )

    return router


def _ernie_router(values: _Values) -> RouterOptions:
    return RouterOptions(
        moe_norm_min=values.get("moe_norm_min", default=1e-12),
        moe_router_enable_expert_bias=True,
    )


def _gpt_oss_router(values: _Values) -> RouterOptions:
    return RouterOptions(moe_router_pre_softmax=False, norm_topk_prob=False, moe_router_bias=True)


def _gpt_oss_experts(values: _Values) -> ExpertsOptions:
    return ExpertsOptions(
        hidden_act="silu",
        swiglu_limit=values.get("swiglu_limit", default=7.0),
        swiglu_alpha=values.get("swiglu_alpha", default=1.702),
        has_bias=True,
    )


def _counted_shared(default: int) -> Callable[[_Values], SharedExpertOptions | None]:
    """So many experts of the routed ones' width, as one MLP."""

    def shared(values: _Values) -> SharedExpertOptions | None:
        names = ("n_shared_experts", "moe_num_shared_experts")
        is_given = any(name in values.values for name in names)
        count = values.get(*names, default=0 if is_given else default)
        if not count:
            return None
        for name in ("mlp_bias", "use_bias"):
            values.refuse_other(name, False, "shared experts have no bias here")
        return SharedExpertOptions(
            moe_shared_expert_intermediate_size=count * values.need("moe_intermediate_size")
        )

    return shared


def _gated_shared(values: _Values) -> SharedExpertOptions:
    return SharedExpertOptions(
        moe_shared_expert_intermediate_size=values.need("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous()


def _split_halves(tensor: Tensor) -> Tensor:
    """Alternating gate and up along dim 1, to all gates followed by all ups."""
    return torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)


def _alternate(tensor: Tensor) -> Tensor:
    """The inverse of `_split_halves`."""
    return torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)


def _same(*names: str) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(name, name) for name in names)


_PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_ROUTED = _same("gate.weight", "experts.gate_up_proj", "experts.down_proj")
_SHARED = _same(*(f"shared_experts.{name}" for name in _PROJECTIONS))
_BIAS = "gate.e_score_correction_bias"

_DEEPSEEK_V3 = (*_ROUTED, *_same(_BIAS), *_SHARED)
_QWEN2_SHARED = (
    *(BlockKey(f"shared_expert.{name}", f"shared_experts.{name}") for name in _PROJECTIONS),
    *_same("shared_expert_gate.weight"),
)
_ERNIE_BIAS = BlockKey(
    "gate.moe_statics.e_score_correction_bias",
    _BIAS,
    lambda bias_1E: bias_1E.squeeze(0),
    lambda bias_E: bias_E.unsqueeze(0),
)
_GPT_OSS = (
    BlockKey("router.weight", "gate.weight"),
    BlockKey("router.bias", "gate.bias"),
    BlockKey(
        "experts.gate_up_proj",
        "experts.gate_up_proj",
        lambda tensor: _split_halves(tensor.transpose(1, 2)),
        lambda tensor: _transposed(_alternate(tensor)),
    ),
    BlockKey("experts.gate_up_proj_bias", "experts.gate_up_proj_bias", _split_halves, _alternate),
    BlockKey("experts.down_proj", "experts.down_proj", _transposed, _transposed),
    *_same("experts.down_proj_bias"),
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="mixtral",
            block_keys=_ROUTED,
            router=_always_normalised,
            intermediate_size="intermediate_size",
        ),
        Family(
            model_type="olmoe",
            block_keys=_ROUTED,
            router=_normalised_if_asked,
            intermediate_size="intermediate_size",
        ),
        Family(model_type="qwen3_moe", block_keys=_ROUTED, router=_normalised_if_asked),
        Family(
            model_type="qwen2_moe",
            block_keys=(*_ROUTED, *_QWEN2_SHARED),
            router=_normalised_if_asked,
            shared=_gated_shared,
        ),
        Family(
            model_type="deepseek_v2",
            block_keys=(*_ROUTED, *_SHARED),
            router=_deepseek_v2_router,
            shared=_counted_shared(default=2),
        ),
        Family(
            model_type="deepseek_v3",
            block_keys=_DEEPSEEK_V3,
            router=_sigmoid_with_bias(routed_scaling_factor=2.5, n_group=8, topk_group=4),
            shared=_counted_shared(default=1),
        ),
        Family(
            model_type="glm4_moe",
            block_keys=_DEEPSEEK_V3,
            router=_sigmoid_with_bias(routed_scaling_factor=1.0, n_group=1, topk_group=1),
            shared=_counted_shared(default=1),
        ),
        Family(
            model_type="ernie4_5_moe",
            block_keys=(*_ROUTED, _ERNIE_BIAS, *_SHARED),
            router=_ernie_router,
            shared=_counted_shared(default=2),
        ),
        Family(
            model_type="gpt_oss",
            block_keys=_GPT_OSS,
            router=_gpt_oss_router,
            experts=_gpt_oss_experts,
            intermediate_size="intermediate_size",
        ),
    )
}
