"""Our experts inside transformers' models, chosen by name.

    import moe_pipeline.families.transformers

    moe_pipeline.families.transformers.register()
    model = AutoModelForCausalLM.from_config(config, experts_implementation="moe_pipeline")
    model.set_experts_implementation("moe_pipeline")              # or later, on any model

The model's own parameters are used in place, in whatever layout they have: transposed (Aria,
GPT-OSS), gate and up alternating (GPT-OSS), with biases, without a gate. Router, state dict and
optimizer see no difference. Needs transformers >= 5.17, which this package does not install.

What a family computes between its projections is code of its own (`_apply_gate`, `act_fn`). It is
tried out once per module, on a few fp64 numbers: if none of our activations returns the same, the
call is refused.

Choices of experts that are not on this rank, which transformers marks with the number of local
experts, cost nothing and get zero gradient. Under autocast the experts work in the dtype of their
weights, as transformers' grouped_mm does. `torch.compile` breaks its graph here.

Dims: T tokens, D hidden, E local experts, K choices, G width of the first projection.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_pipeline.config import ACTIVATIONS, ExpertsOptions
from moe_pipeline.errors import MoEValueError
from moe_pipeline.experts import Activation, ExpertWeights, token_experts_function
from moe_pipeline.weight_grad import InPlaceAccumulation

_INSTEAD = "set_experts_implementation('grouped_mm') or 'eager' on the model instead"


def register(
    name: str = "moe_pipeline",
    *,
    experts_implementation: str = "auto",
    gradient_accumulation_fusion: bool = False,
) -> None:
    """Make our experts selectable as `experts_implementation=name` in every model.

    Process-wide, as transformers' registry is; registering a name again replaces it. Not
    collective.

    Args:
        name: under which models select it.
        experts_implementation: ours to use; see `moe_pipeline.experts.compute`.
        gradient_accumulation_fusion: weight gradients are added in place to `grad`, whose memory is
            kept over steps (`moe_pipeline.weight_grad.accumulation`). Transposed weights and those
            with hooks, such as DDP's, get theirs through autograd as ever.

    Raises:
        ValueError: unknown `experts_implementation`.
    """
    options = ExpertsOptions(
        experts_implementation=experts_implementation,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
    )
    ALL_EXPERTS_FUNCTIONS.register(name, RegisteredExperts(options))


@final
class RegisteredExperts:
    """The function that transformers calls in place of an experts module's forward."""

    def __init__(self, options: ExpertsOptions) -> None:
        self._options = options
        self._modules: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: Any,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Each token's weighted sum over its experts, [T, D] as `hidden_states`. Not collective.

        `top_k_index` and `top_k_weights` are [T, K]; an index outside 0 .. E-1 chooses no expert of
        this rank. `module` is an experts module of transformers, with its flags and parameters.
        """
        known = self._modules.get(module)
        if known is None:
            known = self._modules[module] = _Known(module, self._options)
        weights = known.weights(module)
        num_experts = weights.down_EDH.shape[0]
        index_TK = top_k_index.to(torch.int64)
        index_TK = index_TK.masked_fill((index_TK < 0) | (index_TK >= num_experts), -1)
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            x_TD = hidden_states.to(weights.down_EDH.dtype)
            y_TD = token_experts_function(x_TD, index_TK, top_k_weights, weights, known.options)
            return y_TD.to(hidden_states.dtype)


@final
class _Known:
    """What was found out about one module."""

    def __init__(self, module: Any, options: ExpertsOptions) -> None:
        if module.has_post_expert_norm:
            raise MoEValueError(
                f"{type(module).__name__} normalises each expert's output before the router's "
                f"weight, which moe_pipeline's experts do not; {_INSTEAD}"
            )
        activation = _find_activation(module)
        self._interleaved = activation.interleaved
        fuses = options.gradient_accumulation_fusion
        self._accumulation = InPlaceAccumulation(keeps_memory=True) if fuses else None
        self.options = replace(
            options,
            hidden_act=activation.name,
            has_gate=activation.has_gate,
            swiglu_limit=activation.limit,
            swiglu_alpha=activation.alpha,
            has_bias=module.has_bias,
        )

    def weights(self, module: Any) -> ExpertWeights:
        """The module's parameters of this moment, as views."""
        first = "gate_up_proj" if module.has_gate else "up_proj"
        gate_up, down = getattr(module, first), module.down_proj
        if module.is_transposed:
            gate_up, down = gate_up.mT, down.mT
        return ExpertWeights(
            gate_up_EGD=gate_up,
            down_EDH=down,
            gate_up_bias_EG=getattr(module, f"{first}_bias") if module.has_bias else None,
            down_bias_ED=module.down_proj_bias if module.has_bias else None,
            interleaved=self._interleaved,
            accumulation=self._accumulation,
        )


def _find_activation(module: Any) -> Activation:
    """Ours that returns what the module's own returns, on numbers that tell them all apart."""
    theirs: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
    probe = torch.linspace(-40.0, 40.0, 2 * 193, dtype=torch.float64)
    # Small and large numbers meet each other as gate and up, in both layouts.
    probe = torch.stack((probe, probe / 16, probe.roll(101), probe.flip(0).roll(7) / 5))
    with torch.no_grad():
        expected = theirs(probe.clone())
        for candidate in _candidates(module):
            if _agree(candidate(probe), expected):
                return candidate
    raise MoEValueError(
        f"{type(module).__name__} has an activation that moe_pipeline's experts do not have (they "
        f"have {', '.join(ACTIVATIONS)}, gated or not, and GPT-OSS's clamped one); {_INSTEAD}"
    )


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(
        ours, theirs.to(ours.dtype), rtol=1e-9, atol=1e-12
    )


def _candidates(module: Any) -> Iterator[Activation]:
    """Those that a module with these flags and numbers may have."""
    if not module.has_gate:
        yield from (Activation(name=name, has_gate=False) for name in ACTIVATIONS)
        return
    interleaved = not module.is_concatenated
    limits = _numbers(module, "limit", "swiglu_limit")
    alphas = _numbers(module, "alpha", "swiglu_alpha")
    for limit, alpha in product(limits, alphas):
        yield Activation(limit=limit, alpha=alpha, interleaved=interleaved)
    yield from (Activation(name=name, interleaved=interleaved) for name in ACTIVATIONS)


def _numbers(module: Any, *names: str) -> list[float]:
    values = (getattr(module, name, None) for name in names)
    return [float(value) for value in values if value is not None]
