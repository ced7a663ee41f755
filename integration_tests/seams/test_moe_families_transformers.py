"""Our MoE layer against the MoE block of every family, with the block's own weights.

transformers' routers compute in fp32 whatever the dtype of the model. In fp64 their code runs as it
is, but with every conversion to fp32 made one to fp64, so that the whole block can be compared to
1e-10.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_pipeline.config import MoEConfig
from moe_pipeline.families.catalog import FAMILIES, family_of
from moe_pipeline.layer import MoELayer

transformers = pytest.importorskip("transformers")

D, H = 32, 16

# Configuration class and block class, and what a configuration needs besides the sizes.
BLOCKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {"shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock", {}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Moe", {"routed_scaling_factor": 1.7}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE", {"n_group": 1, "topk_group": 1}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeSparseMoeBlock", {}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeMoE", {"routed_scaling_factor": 2.5}),
    "gpt_oss": ("GptOssConfig", "GptOssMLP", {"swiglu_limit": 1.0}),
}
DEEPSEEK_GROUPS = {"n_group": 4, "topk_group": 2}
SHAPES = [(8, 2), (60, 8), (60, 7), (60, 4), (60, 5), (12, 6), (5, 1), (4, 3), (4, 4)]


class InDouble(TorchFunctionMode):
    """Every conversion to fp32 becomes one to fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = {k: _wide(v) for k, v in (kwargs or {}).items()}
        return func(*(_wide(a) for a in args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def as_written(dtype: torch.dtype) -> Iterator[None]:
    if dtype != torch.float64:
        yield
    else:
        with InDouble():
            yield


def block_of(
    model_type: str, experts: int, k: int, dtype: torch.dtype, **values: Any
) -> tuple[nn.Module, Any]:
    """transformers' block in its plain implementation, with weights that spread the tokens."""
    config_name, class_name, extra = BLOCKS[model_type]
    config_class = getattr(transformers, config_name)
    sizes = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
        **dict.fromkeys(("moe_num_experts",), experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), k),
        "hidden_size": D,
        "intermediate_size": H,
        "moe_intermediate_size": H,
    }
    written = config_class().to_dict()
    sizes = {key: value for key, value in sizes.items() if key in written}
    config = config_class(**{**sizes, **extra, **values})
    config._experts_implementation = "eager"
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    block: nn.Module = getattr(modeling, class_name)(config).to(dtype)
    for name, tensor in block.state_dict().items():
        # The selection bias is fp32 in our layer, so it has to be exact there.
        spread = torch.randn(tensor.shape) * (0.1 if "e_score" in name else 0.2)
        tensor.copy_(spread)
    return block, config


def layer_of(
    model_type: str, block: nn.Module, config: Any, implementation: str, dtype: torch.dtype
) -> MoELayer:
    family = family_of(model_type)
    values = with_implementation(family.config(config), implementation)
    layer = MoELayer(values, dtype=dtype)
    layer.load_state_dict(family.from_transformers(block.state_dict()))
    return layer


def with_implementation(config: MoEConfig, implementation: str) -> MoEConfig:
    experts = replace(config.experts, experts_implementation=implementation)
    return replace(config, experts=experts)


def unbalance(model_type: str, block: nn.Module) -> None:
    """Expert 0 attracts every token and the last one none, through the router's last column."""
    gate = block.router if model_type == "gpt_oss" else block.gate
    with torch.no_grad():
        gate.weight[:, -1] = 0.0
        gate.weight[0, -1] = 4.0
        gate.weight[-1, -1] = -4.0
        for name, tensor in block.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.view(-1)[0], tensor.view(-1)[-1] = 1.0, -1.0


def hidden_of(output: Any) -> Tensor:
    """GPT-OSS's block returns its router's scores as well."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()


def compare(model_type: str, block: nn.Module, layer: MoELayer, x: Tensor, limit: float) -> Tensor:
    """Value, input gradient and the gradient of every parameter; returns the layer's load."""
    factors = torch.randn_like(x)
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    with as_written(x.dtype):
        expected = hidden_of(block(x_theirs))
        expected.backward(factors)
    got = layer(x_ours)
    got.hidden.backward(factors)
    assert relative(got.hidden, expected) < limit
    assert relative(x_ours.grad, x_theirs.grad) < limit
    trained = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    wanted = family_of(model_type).from_transformers(trained)
    ours = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert ours.keys() == wanted.keys()
    # What a router's gradient would be if its one weight were not normalised.
    unnormalised = (expected * factors).sum(-1).abs() * x.norm(dim=-1)
    for name, gradient in ours.items():
        # A router's gradient is a sum of differences of what experts gave, and its rounding is of
        # their size. One normalised weight is always 1, so that nothing but rounding is left.
        nothing = wanted[name].norm() < 1e-5 * factors.norm()
        rounding = unnormalised.norm() if nothing else 0.1 * factors.norm()
        floor = rounding if name.startswith("gate.") else 0.0
        scale = wanted[name].norm() + floor
        assert (gradient - wanted[name]).norm() <= limit * scale, name
    return got.load_E


def test_every_family_has_a_block() -> None:
    assert set(BLOCKS) == set(FAMILIES)


@pytest.mark.parametrize(
    ("dtype", "limit", "implementation"),
    [
        (torch.float64, 1e-10, "loop"),
        (torch.float32, 1e-6, "loop"),
        (torch.float32, 1e-6, "auto"),
        (torch.float32, 1e-6, "grouped_mm"),
    ],
)
@pytest.mark.parametrize("model_type", BLOCKS)
def test_values_and_gradients_are_those_of_transformers(
    seed: int, model_type: str, dtype: torch.dtype, limit: float, implementation: str
) -> None:
    for experts, k in SHAPES:
        block, config = block_of(model_type, experts, k, dtype)
        layer = layer_of(model_type, block, config, implementation, dtype)
        load_E = compare(model_type, block, layer, torch.randn(2, 9, D, dtype=dtype), limit)
        assert load_E.sum() == 2 * 9 * k


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("model_type", BLOCKS)
def test_with_unbalanced_routing_and_empty_experts(
    seed: int, model_type: str, dtype: torch.dtype
) -> None:
    block, config = block_of(model_type, 60, 3, dtype)
    unbalance(model_type, block)
    layer = layer_of(model_type, block, config, "auto", dtype)
    x = torch.randn(4, 5, D, dtype=dtype)
    x[..., -1] = 2.0
    load_E = compare(model_type, block, layer, x, 1e-10 if dtype == torch.float64 else 1e-6)
    assert load_E[0] == 20
    assert load_E[-1] == 0
    assert (load_E == 0).sum() >= 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy", **DEEPSEEK_GROUPS}),
        ("deepseek_v3", DEEPSEEK_GROUPS),
        ("deepseek_v3", {**DEEPSEEK_GROUPS, "norm_topk_prob": False}),
        ("glm4_moe", {"n_group": 5, "topk_group": 3}),
        ("qwen2_moe", {"norm_topk_prob": True, "hidden_act": "gelu"}),
        ("olmoe", {"norm_topk_prob": True, "hidden_act": "gelu_pytorch_tanh"}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
        ("ernie4_5_moe", {"moe_norm_min": 0.9}),
        ("gpt_oss", {"swiglu_alpha": 1.1, "swiglu_limit": 0.5}),
    ],
)
def test_with_what_configurations_may_ask_for(
    seed: int, model_type: str, values: dict[str, Any], dtype: torch.dtype
) -> None:
    for k in range(1, 9):
        block, config = block_of(model_type, 60, k, dtype, **values)
        layer = layer_of(model_type, block, config, "auto", dtype)
        limit = 1e-10 if dtype == torch.float64 else 1e-6
        compare(model_type, block, layer, torch.randn(2, 9, D, dtype=dtype), limit)


@pytest.mark.parametrize("model_type", BLOCKS)
def test_no_tokens(seed: int, model_type: str) -> None:
    block, config = block_of(model_type, 8, 2, torch.float32)
    layer = layer_of(model_type, block, config, "auto", torch.float32)
    out = layer(torch.zeros(0, D, requires_grad=True))
    assert out.hidden.shape == (0, D)
    out.hidden.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize("model_type", BLOCKS)
def test_a_trained_layer_goes_back_bit_for_bit(seed: int, model_type: str) -> None:
    block, config = block_of(model_type, 8, 2, torch.float32)
    layer = layer_of(model_type, block, config, "auto", torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    block.load_state_dict(family_of(model_type).to_transformers(layer.state_dict()))
    again = layer_of(model_type, block, config, "auto", torch.float32)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("model_type", BLOCKS)
def test_the_dict_of_a_config_json_says_the_same(seed: int, model_type: str) -> None:
    _, config = block_of(model_type, 8, 2, torch.float32)
    family = family_of(model_type)
    assert family.config(config.to_dict()) == family.config(config)
