"""A dense MLP turned into experts, so that the new block computes what the MLP computed.

Fine-grained ("granular") upcycling with virtual groups, arXiv 2410.07524: the MLP's H units are cut
into G shards of the experts' width; experts are copies of shards, and each run of G experts that
holds every shard once is a virtual group. All experts of a group get the same router row, so a
token that chooses `m * G` experts chooses m whole groups, and its experts' outputs sum to the MLP's
(G = 1: each expert is a copy of the whole MLP, arXiv 2212.05055). The rows of different groups are
drawn at random, so groups see different tokens and drift apart in training.

What is left is one factor: chosen weights that sum to s give each shard the weight `s / G`, so the
down projection is multiplied by `G / s`. That is exact where the weights are normalised; where they
are plain probabilities no constant is, see `approximate`.

    config = MoEConfig(hidden_size=d, moe_intermediate_size=H // 4, num_experts=32,
                       num_experts_per_tok=4)
    layer = MoELayer(config)
    layer.load_state_dict(upcycled_state(dense.state_dict(), config))

A shared expert takes the first units of the MLP, the shards are cut from the rest. Dims: H units of
the dense MLP, D hidden, E experts, h units of an expert, G = shards.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_pipeline._checks import check_type
from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoEValueError


def upcycled_state(
    dense: Mapping[str, Tensor],
    config: MoEConfig,
    *,
    seed: int = 0,
    local_experts: range | None = None,
    approximate: bool = False,
) -> dict[str, Tensor]:
    """The state dict of a `MoELayer(config)` that equals the dense MLP `dense`.

    Equal up to rounding: G and s that are powers of two cost none, and two groups whose logits for
    a token agree to rounding may be chosen half and half. Rows that a capacity factor drops are
    missing from the sum.

    Args:
        dense: `gate_proj.weight` [H, D] (unless `has_gate` is False), `up_proj.weight` [H, D],
            `down_proj.weight` [D, H], and with `has_bias` also a `.bias` of each. Its activation
            must be the experts'.
        config: of the new layer, with `num_experts` a multiple of G and `num_experts_per_tok`
            too.
        seed: of the router's rows, normal with `initializer_range`; the same on every rank.
        local_experts: the experts of this rank; None: all.
        approximate: accept weights that are not normalised: the factor is then the one for equal
            probabilities, and the block only resembles the MLP.

    Returns:
        Tensors in the dtype and on the device of `dense`. Not collective.

    Raises:
        ValueError: tensors that are not those of such an MLP, or sizes or a routing rule with which
            the block cannot equal it.
    """
    check_type("approximate", approximate, bool)
    _check_rule(config)
    _check_dense(dense, config)
    shards = _num_shards(dense, config)
    local = _local_of(config, local_experts)
    options, shared = config.experts, _shared_size(config)
    names = ["gate_proj", "up_proj"] if options.has_gate else ["up_proj"]
    fused = "gate_up_proj" if options.has_gate else "up_proj"
    factor = shards / _weight_sum(config, shards, approximate)
    down = dense["down_proj.weight"]
    state = {
        "gate.weight": _router_rows(config, shards, seed).to(down),
        f"experts.{fused}": _pick(
            [_cut(dense[f"{name}.weight"][shared:], shards) for name in names], local
        ),
        "experts.down_proj": _pick([_cut(down[:, shared:].t() * factor, shards)], local)
        .transpose(1, 2)
        .contiguous(),
    }
    if options.has_bias:
        state |= _biases(dense, config, names, local)
    if config.router.moe_router_bias:
        state["gate.bias"] = down.new_zeros(config.num_experts)
    if config.router.moe_router_enable_expert_bias:
        zeros = torch.zeros(config.num_experts, dtype=torch.float32, device=down.device)
        state["gate.e_score_correction_bias"] = zeros
    return state | _shared_state(dense, config)


def _check_dense(dense: Mapping[str, Tensor], config: MoEConfig) -> None:
    """Refuse a tensor that is missing, that would be left out, or that has another shape."""
    options = config.experts
    names = ["gate_proj", "up_proj", "down_proj"] if options.has_gate else ["up_proj", "down_proj"]
    wanted = {f"{name}.weight" for name in names}
    if options.has_bias:
        wanted |= {f"{name}.bias" for name in names}
    if dense.keys() != wanted:
        raise MoEValueError(
            f"a dense MLP for experts with has_gate={options.has_gate} and has_bias="
            f"{options.has_bias} has {sorted(wanted)}, got {sorted(dense)}; set both as the MLP is"
        )
    d, units = config.hidden_size, dense["up_proj.weight"].shape[0]
    for name, tensor in sorted(dense.items()):
        shape: tuple[int, ...] = (d, units) if name.startswith("down_proj") else (units, d)
        shape = shape if name.endswith("weight") else shape[:1]
        if tensor.shape != shape:
            raise MoEValueError(
                f"{name} of the dense MLP has shape {tuple(tensor.shape)}; with hidden_size={d} "
                f"and the {units} units of up_proj.weight it has to be {shape}"
            )


def _check_rule(config: MoEConfig) -> None:
    if config.moe_latent_size is not None:
        raise MoEValueError(
            f"moe_latent_size={config.moe_latent_size}: a narrower path cannot equal the dense "
            "MLP; set it to None"
        )
    plain = config.experts.has_gate and config.experts.swiglu_limit is None
    if config.shared_expert is not None and (config.experts.has_bias or not plain):
        raise MoEValueError(
            "a shared expert is gated, without bias and without limit, so it cannot take over "
            "units of a dense MLP with has_bias, has_gate=False or swiglu_limit; set "
            "shared_expert=None"
        )
    if config.router.routed_scaling_factor == 0.0:
        raise MoEValueError("routed_scaling_factor=0.0 leaves nothing of the MLP; give another")
    rule = config.router.moe_router_selection
    if rule != "token_choice":
        raise MoEValueError(
            f"moe_router_selection={rule!r} does not give each token whole virtual groups; "
            "upcycle with 'token_choice'"
        )


def _shared_size(config: MoEConfig) -> int:
    shared = config.shared_expert
    return 0 if shared is None else shared.moe_shared_expert_intermediate_size


def _num_shards(dense: Mapping[str, Tensor], config: MoEConfig) -> int:
    """G, after checking that shards, groups and choices fit."""
    units = dense["down_proj.weight"].shape[1]
    width, rest = config.moe_intermediate_size, units - _shared_size(config)
    if rest < width or rest % width:
        raise MoEValueError(
            f"moe_intermediate_size={width} does not divide the {rest} units of the dense MLP that "
            f"go to routed experts; choose a divisor of {rest}"
        )
    shards = rest // width
    for name in ("num_experts", "num_experts_per_tok"):
        value = getattr(config, name)
        if value % shards:
            raise MoEValueError(
                f"{name}={value} must be a multiple of {shards}, the experts that together make "
                f"one copy of the dense MLP ({rest} units in experts of {width})"
            )
    per_group = config.num_experts // config.router.n_group
    if config.router.n_group > 1 and per_group % shards:
        raise MoEValueError(
            f"n_group={config.router.n_group} makes groups of {per_group} experts and cuts "
            f"through copies of {shards} experts; choose a divisor of "
            f"{config.num_experts // shards}"
        )
    return shards


def _weight_sum(config: MoEConfig, shards: int, approximate: bool) -> float:
    """What the weights of a token's choices sum to."""
    router = config.router
    if router.norm_topk_prob or not router.moe_router_pre_softmax:
        return router.routed_scaling_factor
    if not approximate:
        raise MoEValueError(
            "norm_topk_prob=False: the chosen probabilities sum to another number for each token, "
            "so no weights make the block equal the dense MLP; set norm_topk_prob=True, or accept "
            "the factor for equal probabilities with approximate=True"
        )
    each = 0.5 if router.moe_router_score_function == "sigmoid" else 1 / config.num_experts
    return router.routed_scaling_factor * config.num_experts_per_tok * each


def _local_of(config: MoEConfig, given: range | None) -> range:
    local = range(config.num_experts) if given is None else given
    if min(local, default=0) < 0 or max(local, default=0) >= config.num_experts:
        raise MoEValueError(
            f"local_experts={local} are not all in 0..{config.num_experts - 1}; give those of this "
            "rank, counted over the whole layer"
        )
    return local


def _router_rows(config: MoEConfig, shards: int, seed: int) -> Tensor:
    """One random row for each virtual group, fp32 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (config.num_experts // shards, config.hidden_size)
    rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return (rows * config.initializer_range).repeat_interleave(shards, dim=0)


def _cut(units: Tensor, shards: int) -> Tensor:
    """[G * h, ...] to [G, h, ...]."""
    return units.reshape(shards, -1, *units.shape[1:])


def _pick(parts: list[Tensor], local: range) -> Tensor:
    """Local experts [E, parts * h, ...] from shards [G, h, ...]: expert e holds shard e % G."""
    shards = torch.cat(parts, dim=1)
    index = torch.tensor(list(local), dtype=torch.int64, device=shards.device) % len(shards)
    return shards[index]


def _biases(
    dense: Mapping[str, Tensor], config: MoEConfig, names: list[str], local: range
) -> dict[str, Tensor]:
    """A bias of a chosen expert counts with its weight, so copies sum to s times the bias."""
    shared, width = _shared_size(config), config.moe_intermediate_size
    fused = "gate_up_proj_bias" if config.experts.has_gate else "up_proj_bias"
    parts = [dense[f"{name}.bias"][shared:] for name in names]
    shards = parts[0].shape[0] // width
    down = dense["down_proj.bias"] / _weight_sum(config, shards, approximate=True)
    return {
        f"experts.{fused}": _pick([_cut(part, shards) for part in parts], local),
        "experts.down_proj_bias": down.expand(len(local), -1).contiguous(),
    }


def _shared_state(dense: Mapping[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """The first units of the MLP; a gate starts at sigmoid(0) = 1/2, so its half is doubled."""
    if config.shared_expert is None:
        return {}
    size = _shared_size(config)
    gated = config.shared_expert.moe_shared_expert_gate
    down = dense["down_proj.weight"][:, :size] * (2.0 if gated else 1.0)
    state = {
        "shared_experts.gate_proj.weight": dense["gate_proj.weight"][:size].clone(),
        "shared_experts.up_proj.weight": dense["up_proj.weight"][:size].clone(),
        "shared_experts.down_proj.weight": down,
    }
    if gated:
        state["shared_expert_gate.weight"] = down.new_zeros(1, config.hidden_size)
    return state
