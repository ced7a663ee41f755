import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_train.config.model_tables import ModelConfig
from moe_train.config.optimizer_tables import OptimizerConfig, ParamGroupConfig
from moe_train.config.tables import Config
from moe_train.config.train_tables import TrainConfig
from moe_train.optim.grads import GradientStore, ParameterGroup, clip_coefficient
from moe_train.optim.optimizer import Optimizer, StateOptions
from moe_train.optim.rounding import StochasticRounding
from moe_train.optim.update_rules import update_rules
from ranktest import run_ranks


def store_of(*parameters: nn.Parameter, fp32: bool = False) -> GradientStore:
    group = ParameterGroup(parameters=parameters, reduce_group=None)
    return GradientStore([group], fp32_accumulation=fp32)


def job_of(config: OptimizerConfig, *groups: ParamGroupConfig) -> Config:
    train = TrainConfig(output_dir="run", max_steps=1, global_batch_size=1)
    model = ModelConfig(config_file="config.json")
    return Config(model=model, train=train, optimizer=config, param_groups=groups)


def optimizer_of(
    parameters: dict[str, nn.Parameter],
    config: OptimizerConfig,
    *groups: ParamGroupConfig,
    master_weights: bool = False,
) -> Optimizer:
    """Groups match names as they stand in their patterns."""
    names = {group.name: group.parameters for group in groups}
    shapes = {n: p.shape for n, p in parameters.items()}
    rules = update_rules(shapes, job_of(config, *groups), names)
    return Optimizer(parameters, rules, config, StateOptions(master_weights=master_weights))


def test_the_update_is_torchs_adamw_with_decay_on_matrices_only() -> None:
    torch.manual_seed(1)
    ours = {
        n: nn.Parameter(torch.randn(s))
        for n, s in {"a.weight": (3, 4), "norm.weight": (4,)}.items()
    }
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.5}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=0.1,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    optimizer, store = optimizer_of(ours, config), store_of(*ours.values())
    for _ in range(5):
        store.clear()
        for mine, other in zip(ours.values(), theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step(store, 0.1)
        reference.step()
    for mine, other in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_master_weights_keep_what_bfloat16_would_lose() -> None:
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    config = OptimizerConfig(lr=0.1, weight_decay=0.0)
    optimizer = optimizer_of({"w": weight}, config, master_weights=True)
    store = store_of(weight, fp32=True)
    for _ in range(6):
        store.clear()
        weight.sum().backward()
        assert weight.grad is None
        optimizer.step(store, 0.1)
    torch.testing.assert_close(optimizer.master["w"], torch.full((4, 4), 255.4), rtol=0, atol=1e-3)
    assert weight.dtype == torch.bfloat16 and weight[0, 0].item() == 255.0


def test_fp32_accumulation_sums_many_small_gradients() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    store = store_of(weight, fp32=True)
    store.clear()
    for _ in range(1000):
        weight.sum().backward()
    assert store.of(weight).item() == 1000.0


def test_a_parameter_that_no_token_reached_has_a_zero_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    store = store_of(weight)
    store.clear()
    assert store.of(weight).tolist() == [0, 0, 0]
    assert store.norm_squared() == 0


def test_norm_and_clipping_agree_with_torch() -> None:
    parameters = [nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(7))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 3
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()  # type: ignore[union-attr]
    store = store_of(*parameters)
    norm = math.sqrt(store.norm_squared())
    expected = torch.nn.utils.clip_grad_norm_(copies, 1.0)
    assert math.isclose(norm, float(expected), rel_tol=1e-6)
    store.scale(clip_coefficient(norm, 1.0))
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(store.of(parameter), copy.grad)


def test_the_norm_of_bfloat16_gradients_is_exact_however_they_are_shared_out() -> None:
    generator = torch.Generator().manual_seed(5)
    gradient = torch.randn(96, 32, generator=generator).bfloat16()
    exact = gradient.double().square().sum().item()
    for count in (1, 3, 4):
        parts = [nn.Parameter(torch.zeros_like(part)) for part in gradient.chunk(count)]
        for part, own in zip(parts, gradient.chunk(count), strict=True):
            part.grad = own.clone()
        assert store_of(*parts).norm_squared() == pytest.approx(exact, rel=1e-6), count


def test_shares_of_a_replicated_parameter_add_up_to_one_norm() -> None:
    def share(*_: int) -> float:
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([3.0, 4.0])
        group = ParameterGroup(parameters=[weight], reduce_group=dist.group.WORLD)
        return GradientStore([group], fp32_accumulation=False).norm_squared()

    assert run_ranks(share, 4) == [25.0 / 4] * 4


def test_no_clipping_below_the_limit_or_when_switched_off() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(100.0, math.inf) == 1.0


DECODER = {
    "model.embed_tokens.weight": (12, 6),
    "model.layers.0.self_attn.q_proj.weight": (4, 6),
    "model.layers.0.mlp.gate.weight": (3, 6),
    "model.layers.0.mlp.experts.gate_up_proj": (3, 10, 6),
    "model.layers.0.mlp.experts.down_proj": (3, 6, 5),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (3, 10),
    "model.norm.weight": (6,),
    "lm_head.weight": (12, 6),
}
ADAMW = ("embed_tokens.weight", "norm.weight", "lm_head.weight", "_bias")


def decoder_parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in DECODER.items()}


def matrices_of(name: str, tensor: Tensor) -> list[Tensor]:
    """The linear maps of a decoder, each for itself, as transformers stores them."""
    if tensor.dim() == 2:
        return [tensor]
    if not name.endswith("gate_up_proj"):
        return [tensor[expert] for expert in range(3)]
    return [tensor[e, rows] for e in range(3) for rows in (slice(0, 5), slice(5, 10))]


@pytest.mark.parametrize("master_weights", [False, True])
def test_muon_updates_each_matrix_for_itself_and_adamw_the_rest(master_weights: bool) -> None:
    torch.manual_seed(2)
    ours = decoder_parameters()
    config = OptimizerConfig(lr=0.02, weight_decay=0.3, name="muon", muon_momentum=0.9)
    optimizer = optimizer_of(ours, config, master_weights=master_weights)
    store = store_of(*ours.values(), fp32=master_weights)
    theirs = {name: p.detach().clone() for name, p in ours.items()}
    gradients = {name: torch.zeros_like(p) for name, p in theirs.items()}
    linear = [
        (nn.Parameter(matrix), gradient)
        for name in DECODER
        if not name.endswith(ADAMW)
        for matrix, gradient in zip(
            matrices_of(name, theirs[name]), matrices_of(name, gradients[name]), strict=True
        )
    ]
    others = {n: nn.Parameter(t) for n, t in theirs.items() if n.endswith(ADAMW)}
    decayed = [p for n, p in others.items() if n.endswith(("embed_tokens.weight", "head.weight"))]
    plain = [p for n, p in others.items() if n.endswith(("norm.weight", "_bias"))]
    settings = {"lr": 0.02, "weight_decay": 0.3}
    references: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [p for p, _ in linear], momentum=0.9, adjust_lr_fn="match_rms_adamw", **settings
        ),
        torch.optim.AdamW(decayed, betas=(0.9, 0.95), **settings),
        torch.optim.AdamW(plain, betas=(0.9, 0.95), lr=0.02, weight_decay=0.0),
    ]
    assert len(linear) == 2 + 6 + 3 and len(decayed) == len(plain) == 2
    for _ in range(3):
        store.clear()
        for name, parameter in ours.items():
            gradients[name].copy_(torch.randn_like(parameter))
            (parameter * gradients[name]).sum().backward()
        for parameter, gradient in linear:
            parameter.grad = gradient.clone()
        for name, parameter in others.items():
            parameter.grad = gradients[name].clone()
        optimizer.step(store, 0.02)
        for reference in references:
            reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.data, theirs[name], rtol=1e-5, atol=1e-6)
    moments = optimizer.moments()
    assert moments["exp_avg"].keys() == others.keys()
    assert moments["momentum_buffer"].keys() == DECODER.keys() - others.keys()
    assert all(t.any() for tensors in moments.values() for t in tensors.values())


def test_a_rank_with_some_of_the_experts_makes_the_same_update_of_them() -> None:
    torch.manual_seed(3)
    config = OptimizerConfig(lr=0.1, name="muon")
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (4, 6, 8)
    whole, gradient = nn.Parameter(torch.randn(shape)), torch.randn(shape)
    part = nn.Parameter(whole.detach()[1:3].clone())
    none = nn.Parameter(whole.detach()[:0].clone())
    for parameter, rows in ((whole, slice(None)), (part, slice(1, 3)), (none, slice(0))):
        parameter.grad = gradient[rows].clone()
        optimizer_of({name: parameter}, config).step(store_of(parameter), 0.1)
    assert torch.equal(part, whole[1:3]) and not torch.equal(whole, gradient)


def test_a_group_has_a_rate_a_decay_and_an_algorithm_of_its_own() -> None:
    torch.manual_seed(4)
    ours = decoder_parameters()
    before = {name: p.detach().clone() for name, p in ours.items()}
    router, norm = "model.layers.0.mlp.gate.weight", "model.norm.weight"
    frozen = ParamGroupConfig(name="a", parameters=("lm_head.weight",), lr_ratio=0.0)
    strong = ParamGroupConfig(
        name="b", parameters=(router, norm), lr_ratio=0.5, weight_decay=1.0, algorithm="adamw"
    )
    optimizer = optimizer_of(
        ours,
        OptimizerConfig(lr=0.1, name="muon"),
        frozen,
        strong,
    )
    store = store_of(*ours.values())
    store.clear()  # without gradients only the decay is left
    optimizer.step(store, 0.1)
    assert torch.equal(ours["lm_head.weight"], before["lm_head.weight"])
    for name in (router, norm):
        torch.testing.assert_close(ours[name].data, before[name] * (1 - 0.1 * 0.5 * 1.0))
        assert name in optimizer.moments()["exp_avg"]
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(ours[q_proj].data, before[q_proj] * (1 - 0.1 * 0.1))


def test_groups_that_cannot_be_are_refused_by_name() -> None:
    shapes = {"model.norm.weight": (6,), "lm_head.weight": (12, 6)}
    fast = ParamGroupConfig(name="fast", parameters=("*",), algorithm="muon")
    slow = ParamGroupConfig(name="slow", parameters=("*",))
    names = {"fast": {"model.norm.weight"}, "slow": set(shapes)}
    config = OptimizerConfig(lr=0.1)
    with pytest.raises(ValueError, match=r"fast.algorithm=.*model.norm.weight .*\(6,\)"):
        update_rules(shapes, job_of(config, fast), names)
    with pytest.raises(ValueError, match=r"norm.weight is matched by .*fast\] and .*slow\]"):
        update_rules(shapes, job_of(config, fast, slow), names)


def test_weights_that_are_rounded_by_chance_are_updated_in_fp32_and_keep_small_updates(
    seed: int,
) -> None:
    weight = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
    exact = nn.Parameter(torch.full((64, 64), 1.0))
    config = OptimizerConfig(lr=1e-4, weight_decay=0.0)
    rules = update_rules({"w": weight.shape}, job_of(config), {})
    rounding = StochasticRounding(seed=seed % 1000, first={})
    optimizer = Optimizer({"w": weight}, rules, config, StateOptions(rounding=rounding))
    reference = torch.optim.AdamW([exact], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    assert {m: t["w"].dtype for m, t in optimizer.moments().items()} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    store = store_of(weight)
    for _ in range(20):
        store.clear()
        weight.grad = torch.ones_like(weight)
        exact.grad = torch.ones_like(exact)
        optimizer.step(store, 1e-4)
        reference.step()
    assert optimizer.updated()["w"].data_ptr() == weight.data_ptr()
    torch.testing.assert_close(
        optimizer.moments()["exp_avg"]["w"], reference.state[exact]["exp_avg"]
    )
    # Each update is a twentieth of half the distance to the number below: rounded to the nearest,
    # none of them would be seen. The mean of 4,096 weights is within 5 standard deviations.
    moved = 1.0 - weight.detach().double().mean().item()
    assert moved == pytest.approx(1.0 - exact.detach().double().mean().item(), abs=5 * 2.8e-3 / 64)


WITHOUT_COMPILER = """
import sys, torch
from moe_train.config.optimizer_tables import OptimizerConfig
from moe_train.model import DecoderConfig, DecoderStage
from moe_train.optim.grads import GradientStore, ParameterGroup
from moe_train.optim.optimizer import Optimizer, StateOptions
from moe_train.optim.update_rules import UpdateRule
config = DecoderConfig.from_dict({sizes!r})
assert all(p.is_meta for p in DecoderStage.without_memory(config).parameters())
names = {{"a": "adamw", "b": "muon"}}
parameters = {{name: torch.nn.Parameter(torch.ones(3, 2)) for name in names}}
rules = {{n: UpdateRule(algorithm=a, lr_ratio=1.0, weight_decay=0.1) for n, a in names.items()}}
optimizer = Optimizer(parameters, rules, OptimizerConfig(lr=0.1), StateOptions())
for parameter in parameters.values():
    parameter.grad = torch.ones(3, 2)
group = ParameterGroup(parameters=tuple(parameters.values()), reduce_group=None)
optimizer.step(GradientStore([group], fp32_accumulation=False), 0.1)
assert all((p < 1).all() for p in parameters.values())
print("torch._dynamo" in sys.modules)
"""


def test_neither_shapes_nor_updates_import_torchs_compiler() -> None:
    """Which takes seconds of the start of each process of a job."""
    sizes = {
        "model_type": "qwen3_moe",
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
    }
    code = WITHOUT_COMPILER.format(sizes=sizes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
