from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from moe_pipeline.config import (
    ExpertsOptions,
    MoEConfig,
    RouterLosses,
    RouterOptions,
    SharedExpertOptions,
)
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.local_experts import Experts
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.recomputation import recompute, recompute_modules
from ranktest import run_ranks

HIDDEN, INTERMEDIATE = 12, 5
SHARED = SharedExpertOptions(moe_shared_expert_intermediate_size=7, moe_shared_expert_gate=True)


def config_for(*, implementation="auto", scope="microbatch", router=None, **kwargs):
    values = dict(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=8,
        num_experts_per_tok=3,
        router=router or RouterOptions(),
        losses=RouterLosses(
            router_aux_loss_coef=0.3, router_z_loss_coef=0.2, moe_aux_loss_scope=scope
        ),
        experts=ExpertsOptions(experts_implementation=implementation),
        initializer_range=0.4,
    )
    return MoEConfig(**{**values, **kwargs})


def dense_reference(layer, x_TD, idx=None):
    """Each token through its experts, one at a time; and the losses by their formulas."""
    config = layer.config
    logits = x_TD @ layer.gate.weight.t()
    probs = torch.softmax(logits, dim=-1)
    idx = probs.topk(config.num_experts_per_tok).indices if idx is None else idx
    weights = probs.gather(1, idx.clamp(min=0)) * (idx >= 0)
    if config.router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    latent = config.moe_latent_size is not None
    inner = layer.fc1_latent_proj(x_TD) if latent else x_TD
    rows = []
    for token in range(len(x_TD)):
        total = torch.zeros_like(inner[token])
        for choice, expert in enumerate(idx[token].tolist()):
            if expert < 0:
                continue
            both = layer.experts.gate_up_proj[expert] @ inner[token]
            gate, up = both[:INTERMEDIATE], both[INTERMEDIATE:]
            down = layer.experts.down_proj[expert]
            total = total + weights[token, choice] * (down @ (F.silu(gate) * up))
        rows.append(total)
    hidden = torch.stack(rows)
    hidden = layer.fc2_latent_proj(hidden) if latent else hidden
    if config.shared_expert is not None:
        state = dict(layer.named_parameters())
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (state[f"shared_experts.{name}.weight"] for name in names)
        shared = (F.silu(x_TD @ gate.t()) * (x_TD @ up.t())) @ down.t()
        hidden = hidden + torch.sigmoid(x_TD @ state["shared_expert_gate.weight"].t()) * shared
    counts = torch.bincount(idx[idx >= 0], minlength=config.num_experts)
    aux = config.losses.router_aux_loss_coef * config.num_experts
    aux = aux * ((counts.double() / counts.sum()) * probs.mean(0)).sum()
    z = config.losses.router_z_loss_coef * logits.logsumexp(-1).square().mean()
    return hidden, aux, z, counts


def check_against_the_reference(layer, x, **given):
    out = layer(x, **given)
    hidden, aux, z, counts = dense_reference(layer, x.reshape(-1, HIDDEN), *given.values())
    assert_close(out.hidden, hidden.view(x.shape), atol=1e-10, rtol=1e-10)
    assert_close(out.aux_loss, aux, atol=1e-12, rtol=1e-10)
    assert_close(out.z_loss, z, atol=1e-12, rtol=1e-10)
    assert torch.equal(out.load_E, counts)
    factors = torch.randn_like(x)
    inputs = [x, *layer.parameters()]
    ours = (out.hidden * factors).sum() + out.aux_loss + out.z_loss
    theirs = (hidden.view(x.shape) * factors).sum() + aux + z
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (ours, theirs))
    assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def unbalanced(config):
    """A layer and tokens with a strong pull towards the first expert."""
    layer = MoELayer(config, dtype=torch.float64)
    x = torch.randn(4, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.gate.weight[0] += x.mean((0, 1)) * 4
    return layer, x


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(8, 3), (5, 1), (60, 8), (4, 4)])
@pytest.mark.parametrize("implementation", ["loop", "fused", "auto"])
def test_layer_equals_the_dense_reference(seed, implementation, experts, k, norm):
    config = config_for(
        implementation=implementation,
        num_experts=experts,
        num_experts_per_tok=k,
        router=RouterOptions(norm_topk_prob=norm),
    )
    check_against_the_reference(*unbalanced(config))


@pytest.mark.parametrize("latent", [None, 7])
@pytest.mark.parametrize("shared", [None, SHARED])
def test_shared_and_latent_experts_equal_the_dense_reference(seed, shared, latent):
    config = config_for(shared_expert=shared, moe_latent_size=latent)
    check_against_the_reference(*unbalanced(config))


def test_given_choices_are_taken_and_missing_ones_skipped(seed):
    layer, x = unbalanced(config_for())
    idx = torch.rand(20, 8).topk(3).indices
    idx[3, 1], idx[7, :2] = -1, -1
    check_against_the_reference(layer, x, topk_idx_TK=idx)


def test_replayed_choices_give_the_same_bits(seed):
    layer, x = unbalanced(config_for())
    first = layer(x)
    again = layer(x, topk_idx_TK=first.topk_idx_TK)
    assert torch.equal(first.hidden, again.hidden)
    assert torch.equal(first.aux_loss, again.aux_loss)


def test_names_are_those_of_transformers():
    config = config_for(shared_expert=SHARED, moe_latent_size=4)
    shapes = {name: tuple(p.shape) for name, p in MoELayer(config).state_dict().items()}
    assert shapes == {
        "gate.weight": (8, HIDDEN),
        "experts.gate_up_proj": (8, 2 * INTERMEDIATE, 4),
        "experts.down_proj": (8, 4, INTERMEDIATE),
        "shared_experts.gate_proj.weight": (7, HIDDEN),
        "shared_experts.up_proj.weight": (7, HIDDEN),
        "shared_experts.down_proj.weight": (HIDDEN, 7),
        "shared_expert_gate.weight": (1, HIDDEN),
        "fc1_latent_proj.weight": (4, HIDDEN),
        "fc2_latent_proj.weight": (HIDDEN, 4),
    }


def test_tokens_without_batch_dim_give_the_same_numbers(seed):
    layer, x = MoELayer(config_for()), torch.randn(2, 3, HIDDEN)
    batched, flat = layer(x), layer(x.reshape(6, HIDDEN))
    assert torch.equal(batched.hidden.reshape(6, HIDDEN), flat.hidden)
    assert torch.equal(batched.aux_loss, flat.aux_loss)


@pytest.mark.parametrize("shape", [(0, HIDDEN), (2, 0, HIDDEN), (0, 4, HIDDEN)])
def test_zero_tokens_give_zero_gradients(shape):
    layer = MoELayer(config_for(shared_expert=SHARED, moe_latent_size=4))
    x = torch.empty(shape, requires_grad=True)
    out = layer(x)
    (out.hidden.sum() + out.aux_loss + out.z_loss).backward()
    assert out.hidden.shape == shape
    assert x.grad.shape == shape
    assert all(not p.grad.any() for p in layer.parameters())


def test_non_contiguous_input_and_input_without_gradient_work(seed):
    layer = MoELayer(config_for(), dtype=torch.float64)
    x = torch.randn(3, HIDDEN, 4, dtype=torch.float64).transpose(1, 2)
    out = layer(x)
    out.hidden.square().sum().backward()
    assert torch.equal(out.hidden, layer(x.contiguous()).hidden)
    assert layer.gate.weight.grad.any()


def test_bf16_layer_is_close_to_the_fp32_layer(seed):
    layer = MoELayer(config_for(shared_expert=SHARED), dtype=torch.bfloat16)
    exact = MoELayer(config_for(shared_expert=SHARED))
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(40, HIDDEN).bfloat16()
    out, expected = layer(x), exact(x.float())
    assert out.hidden.dtype == torch.bfloat16
    assert out.aux_loss.dtype == out.z_loss.dtype == torch.float32
    assert torch.equal(out.load_E, expected.load_E)
    assert (out.hidden - expected.hidden).norm() < 2e-2 * expected.hidden.norm()


def test_same_input_gives_the_same_bits_twice(seed):
    layer, x = MoELayer(config_for()), torch.randn(64, HIDDEN)
    grads = []
    for _ in range(2):
        layer.zero_grad()
        layer(x).hidden.square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_load_is_counted_once_per_training_forward_and_not_in_evaluation(seed):
    router = RouterOptions(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    layer, x = MoELayer(config_for(router=router)), torch.randn(10, HIDDEN)
    total = layer(x).load_E + layer(x).load_E
    assert torch.equal(layer.gate.tokens_per_expert, total)
    layer.eval()
    layer(x)
    assert torch.equal(layer.gate.tokens_per_expert, total)


def test_a_layer_alone_calls_experts_that_have_hooks(seed):
    layer = MoELayer(config_for(), dtype=torch.float64)
    calls = []
    layer.experts.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    check_against_the_reference(layer, x)
    assert calls == [3]


def test_recomputed_experts_of_a_layer_alone_run_again_in_backward(seed):
    layer = MoELayer(config_for(), dtype=torch.float64)
    runs = []
    original = Experts.forward

    def counted(self, *args):
        runs.append(len(args))
        return original(self, *args)

    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "forward", counted)
        recompute_modules(layer, {"experts": recompute})
        check_against_the_reference(layer, x)
    assert runs == [3, 3]


def experts_under_fsdp(rank, world_size):
    torch.manual_seed(0)
    layer = MoELayer(config_for(), dtype=torch.float64)
    whole = deepcopy(layer)
    fully_shard(layer.experts, mesh=init_device_mesh("cpu", (world_size,)))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    for each in (layer, whole):
        each(x).hidden.square().sum().backward()
    for ours, theirs in zip(layer.experts.parameters(), whole.experts.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad, atol=1e-12, rtol=1e-10)


def test_experts_of_a_layer_alone_may_be_sharded_by_fsdp():
    run_ranks(experts_under_fsdp, 2)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
def test_dropping_rows_changes_neither_losses_nor_load(seed, scope):
    limited = RouterOptions(moe_expert_capacity_factor=0.5)
    layer, x = unbalanced(config_for(scope=scope))
    dropping = MoELayer(config_for(scope=scope, router=limited), dtype=torch.float64)
    dropping.load_state_dict(layer.state_dict())
    out, dropped = layer(x), dropping(x)
    assert (dropped.topk_idx_TK < 0).any()
    assert torch.equal(out.load_E, dropped.load_E)
    assert torch.equal(out.aux_loss, dropped.aux_loss)
    assert torch.equal(out.z_loss, dropped.z_loss)
    if scope == "global_batch":
        assert torch.equal(out.balance.counts_E, dropped.balance.counts_E)


@pytest.mark.parametrize("implementation", ["loop", "fused"])
@pytest.mark.parametrize("latent", [None, 7])
@pytest.mark.parametrize("shared", [None, SHARED])
def test_autocast_returns_the_dtype_of_the_input(seed, implementation, shared, latent):
    config = config_for(implementation=implementation, shared_expert=shared, moe_latent_size=latent)
    layer, x = MoELayer(config), torch.randn(6, HIDDEN, requires_grad=True)
    exact = layer(x).hidden
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x).hidden
    assert out.dtype == x.dtype
    assert (out - exact).norm() < 2e-2 * exact.norm()
    out.sum().backward()
    assert all(p.grad is not None for p in [x, *layer.experts.parameters()])


def test_a_forward_that_fails_has_counted_nothing():
    router = RouterOptions(moe_router_enable_expert_bias=True)
    config = config_for(router=router, experts=ExpertsOptions(fp8=True))
    layer = MoELayer(config, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="fp8=True needs sizes in multiples of 16"):
        layer(torch.randn(6, HIDDEN).bfloat16())
    assert not layer.gate.tokens_per_expert.any()


def test_wrong_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"\[batch, sequence, hidden\] or \[tokens, hidden\]"):
        MoELayer(config_for())(torch.zeros(HIDDEN))
    with pytest.raises(ValueError, match="hidden_size=12"):
        MoELayer(config_for())(torch.zeros(4, 7))
    with pytest.raises(ValueError, match="pass the layer"):
        MoELayer(config_for(scope="sequence"))(torch.zeros(4, HIDDEN))
    with pytest.raises(TypeError, match=r"torch\.float32 and got torch\.float64; convert"):
        MoELayer(config_for())(torch.zeros(4, HIDDEN).double())


def test_sizes_that_do_not_divide_are_refused():
    def fn(rank, world_size):
        groups = MoEGroups(ep=dist.group.WORLD, tokens=dist.group.WORLD)
        with pytest.raises(ValueError, match="ep axis has 2 ranks but num_experts=7"):
            MoELayer(config_for(num_experts=7), groups=groups)
        groups = MoEGroups(etp=dist.group.WORLD, tokens=dist.group.WORLD)
        with pytest.raises(ValueError, match="etp axis has 2 ranks but moe_intermediate_size=5"):
            MoELayer(config_for(), groups=groups)

    run_ranks(fn, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_layer_agrees_with_the_cpu(seed, dtype):
    config = replace(config_for(shared_expert=SHARED), hidden_size=64, moe_intermediate_size=32)
    layer = MoELayer(config, dtype=dtype)
    on_gpu = MoELayer(config, dtype=dtype, device="cuda")
    on_gpu.load_state_dict(layer.state_dict())
    x = torch.randn(2, 30, 64, dtype=dtype)
    out, got = layer(x), on_gpu(x.cuda())
    assert torch.equal(out.load_E, got.load_E.cpu())
    (out.hidden.float().square().sum() + out.aux_loss).backward()
    (got.hidden.float().square().sum() + got.aux_loss).backward()
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip(on_gpu.parameters(), layer.parameters(), strict=True):
        difference = (ours.grad.cpu().float() - theirs.grad.float()).norm()
        assert difference <= limit * theirs.grad.float().norm()
