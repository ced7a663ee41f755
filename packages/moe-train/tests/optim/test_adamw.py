import math

import torch
import torch.distributed as dist
from torch import nn

from moe_train.config.train_tables import OptimizerConfig
from moe_train.optim.adamw import AdamW
from moe_train.optim.grads import GradientStore, ParameterGroup, clip_coefficient
from ranktest import run_ranks


def store_of(*parameters: nn.Parameter, fp32: bool = False) -> GradientStore:
    group = ParameterGroup(parameters=parameters, reduce_group=None)
    return GradientStore([group], fp32_accumulation=fp32)


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
    optimizer, store = AdamW(ours, config, master_weights=False), store_of(*ours.values())
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
    optimizer = AdamW({"w": weight}, OptimizerConfig(lr=0.1, weight_decay=0.0), master_weights=True)
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
