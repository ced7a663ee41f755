"""Our experts selected inside transformers: the numbers of its own implementation, any family."""

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402  # likewise

import moe_pipeline.families.transformers  # noqa: E402  # after the check that transformers is there

E, D, H = 12, 32, 16

# Configuration, module and class of the experts; sizes are written into each one's own names.
EXPERTS = {
    "mixtral": ("MixtralConfig", "MixtralExperts", {}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeExperts", {"hidden_act": "gelu"}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {}),
    "olmoe": ("OlmoeConfig", "OlmoeExperts", {"hidden_act": "gelu_pytorch_tanh"}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Experts", {}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3Experts", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeExperts", {}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeExperts", {}),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {"swiglu_limit": 1.5}),
    "aria": ("AriaTextConfig", "AriaExperts", {}),  # transposed, halves
    "minimax_m3_vl": (  # clamped, halves
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLExperts",
        {"swiglu_limit": 1.5, "swiglu_alpha": 1.3},
    ),
    "nemotron_h": ("NemotronHConfig", "NemotronHExperts", {"mlp_hidden_act": "gelu"}),  # no gate
}


def experts_module(model_type: str, dtype: torch.dtype = torch.float64, **values: Any) -> nn.Module:
    config_name, class_name, extra = EXPERTS[model_type]
    sizes = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
        "moe_num_experts": E,
        "hidden_size": D,
        "intermediate_size": H,
        "moe_intermediate_size": H,
    }
    config_class = getattr(transformers, config_name, None)
    if config_class is None:
        pytest.skip(f"this transformers has no {config_name}")
    known = {**config_class().to_dict(), **config_class.attribute_map}
    config = config_class(**{k: v for k, v in sizes.items() if k in known}, **{**extra, **values})
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    module = getattr(modeling, class_name)(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert module.down_proj.shape[0] == E
    return module


def routing(tokens: int, k: int, dtype: torch.dtype, experts: int = E) -> tuple[Tensor, Tensor]:
    """Unbalanced: the last expert is never chosen and the first often."""
    scores = torch.rand(tokens, experts)
    scores[:, -1] = -1.0
    scores[:, 0] += 0.5
    weights, idx = scores.topk(k)
    return idx, weights.to(dtype).requires_grad_()


def run(
    module: nn.Module, implementation: str, x: Tensor, idx: Tensor, weights: Tensor, factors: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    module.config._experts_implementation = implementation
    y = module(x, idx, weights)
    inputs = [x, weights, *module.parameters()]
    return y, torch.autograd.grad(y, inputs, factors)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    moe_pipeline.families.transformers.register()
    for name in ("loop", "fused", "grouped_mm"):
        moe_pipeline.families.transformers.register(f"ours_{name}", experts_implementation=name)
    yield
    for name in ("moe_pipeline", "ours_loop", "ours_fused", "ours_grouped_mm"):
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(name)


@pytest.mark.parametrize(
    ("dtype", "limit", "implementation"),
    [
        (torch.float64, 1e-10, "ours_loop"),
        (torch.float64, 1e-10, "moe_pipeline"),
        (torch.float32, 1e-6, "moe_pipeline"),
        (torch.float32, 1e-6, "ours_grouped_mm"),
    ],
)
@pytest.mark.parametrize("model_type", EXPERTS)
def test_values_and_gradients_are_those_of_eager(
    seed: int, model_type: str, dtype: torch.dtype, limit: float, implementation: str
) -> None:
    module = experts_module(model_type, dtype)
    x = torch.randn(40, D, dtype=dtype, requires_grad=True)
    idx, weights = routing(40, 3, dtype)
    factors = torch.randn_like(x)
    expected, expected_grads = run(module, "eager", x, idx, weights, factors)
    got, grads = run(module, implementation, x, idx, weights, factors)
    assert relative(got, expected) < limit
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert relative(ours, theirs) < limit


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_choices_of_other_ranks_experts_cost_nothing_and_get_no_gradient(
    seed: int, model_type: str
) -> None:
    module = experts_module(model_type)
    module._is_expert_parallel = True
    x = torch.randn(20, D, dtype=torch.float64, requires_grad=True)
    idx, weights = routing(20, 4, torch.float64)
    elsewhere = torch.rand(20, 4) < 0.4
    elsewhere[3] = True  # a token with no expert here
    factors = torch.randn_like(x)
    masked = weights.detach().masked_fill(elsewhere, 0.0).requires_grad_()
    expected, expected_grads = run(module, "eager", x, idx, masked, factors)
    sentinels = idx.masked_fill(elsewhere, E)
    got, grads = run(module, "moe_pipeline", x, sentinels, weights, factors)
    assert relative(got, expected) < 1e-12
    assert torch.equal(grads[1][elsewhere], torch.zeros_like(grads[1][elsewhere]))
    assert relative(grads[1], expected_grads[1].masked_fill(elsewhere, 0.0)) < 1e-12
    for ours, theirs in zip(grads[2:], expected_grads[2:], strict=True):
        assert relative(ours, theirs) < 1e-12


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_no_tokens_at_all(seed: int, model_type: str) -> None:
    module = experts_module(model_type, torch.float32)
    x = torch.zeros(0, D, requires_grad=True)
    idx, weights = routing(0, 2, torch.float32)
    y, grads = run(module, "moe_pipeline", x, idx, weights, torch.zeros(0, D))
    assert y.shape == (0, D)
    assert all(not gradient.any() for gradient in grads)


def test_bf16_with_fp32_router_weights_keeps_its_dtype(seed: int) -> None:
    module = experts_module("deepseek_v3", torch.bfloat16)
    reference = copy.deepcopy(module).double()
    x = torch.randn(40, D, dtype=torch.bfloat16, requires_grad=True)
    idx, weights = routing(40, 3, torch.float32)
    factors = torch.randn_like(x)
    got, grads = run(module, "moe_pipeline", x, idx, weights, factors)
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    expected, expected_grads = run(reference, "eager", wide[0], idx, wide[1], factors.double())
    assert got.dtype == torch.bfloat16
    assert relative(got.double(), expected) < 1e-2
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert relative(ours.double(), theirs) < 2e-2


@pytest.mark.parametrize(
    ("model_type", "config", "name", "message"),
    [
        ("nemotron_h", "NemotronHConfig", "NemotronHExperts", "has an activation"),  # relu2
        ("deepseek_v4", "DeepseekV4Config", "DeepseekV4Experts", "has an activation"),
        ("muse_spark", "MuseSparkTextConfig", "MuseSparkExperts", "normalises each expert"),
    ],
)
def test_what_our_experts_do_not_compute_is_refused(
    seed: int, model_type: str, config: str, name: str, message: str
) -> None:
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    with torch.device("meta"):  # its sizes are those of the full model
        module = getattr(modeling, name)(getattr(transformers, config)())
    module.config._experts_implementation = "moe_pipeline"
    x, idx = torch.zeros(1, D), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{message}.*set_experts_implementation"):
        module(x, idx, torch.ones(1, 1))


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="experts_implementation"):
        moe_pipeline.families.transformers.register("wrong", experts_implementation="megablocks")
    assert "wrong" not in ALL_EXPERTS_FUNCTIONS


def tiny_model(implementation: str) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=D,
        moe_intermediate_size=H,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=E,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )


def train(model: nn.Module, batches: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fusion", [False, True])
def test_a_model_trains_with_the_losses_of_eager(seed: int, fusion: bool) -> None:
    moe_pipeline.families.transformers.register("ours", gradient_accumulation_fusion=fusion)
    model = tiny_model("eager")
    starts = torch.randint(0, 64, (15, 8, 1))
    batches = (starts + 3 * torch.arange(16)) % 64  # each token tells the next
    ours = copy.deepcopy(model)
    ours.set_experts_implementation("ours")
    expected, got = train(model, batches), train(ours, batches)
    assert expected[-1] < expected[0] - 0.3
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop("ours")


def test_gradient_checkpointing_gives_the_same_gradients(seed: int) -> None:
    model = tiny_model("moe_pipeline")
    ids = torch.randint(0, 64, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    # Renamed in transformers 5.2x; the old name warns there.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_autocast_computes_the_experts_in_the_dtype_of_their_weights(seed: int) -> None:
    module = experts_module("qwen3_moe", torch.float32)
    x = torch.randn(10, D, requires_grad=True)
    idx, weights = routing(10, 3, torch.float32)
    factors = torch.randn_like(x)
    expected, _ = run(module, "moe_pipeline", x, idx, weights, factors)
    module.config._experts_implementation = "moe_pipeline"
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, idx, weights)
    assert torch.equal(got, expected)


def test_a_model_is_not_kept_alive(seed: int) -> None:
    module = experts_module("mixtral")
    idx, weights = routing(4, 2, torch.float64)
    module.config._experts_implementation = "moe_pipeline"
    module(torch.randn(4, D, dtype=torch.float64), idx, weights)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
