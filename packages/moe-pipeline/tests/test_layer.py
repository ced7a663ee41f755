import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig
from moe_pipeline.layer import MoELayer
from ranktest import run_ranks

HIDDEN, INTERMEDIATE = 12, 5


def config_for(**kwargs):
    values = dict(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=8,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.3,
        initializer_range=0.4,
    )
    return MoEConfig(**{**values, **kwargs})


def dense_reference(layer, x_TD):
    """Each token through its experts, one at a time; and the auxiliary loss by its formula."""
    config = layer.config
    probs = torch.softmax(x_TD @ layer.gate.weight.t(), dim=-1)
    weights, idx = probs.topk(config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for token in range(len(x_TD)):
        total = torch.zeros_like(x_TD[token])
        for choice, expert in enumerate(idx[token].tolist()):
            both = layer.experts.gate_up_proj[expert] @ x_TD[token]
            gate, up = both[:INTERMEDIATE], both[INTERMEDIATE:]
            down = layer.experts.down_proj[expert]
            total = total + weights[token, choice] * (down @ (F.silu(gate) * up))
        rows.append(total)
    counts = torch.bincount(idx.flatten(), minlength=config.num_experts)
    aux = config.router_aux_loss_coef * config.num_experts
    aux = aux * ((counts.double() / counts.sum()) * probs.mean(0)).sum()
    return torch.stack(rows), aux, counts


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(8, 3), (5, 1), (60, 8), (4, 4)])
@pytest.mark.parametrize("implementation", ["loop", "fused", "auto"])
def test_layer_equals_the_dense_reference(seed, implementation, experts, k, norm):
    config = config_for(
        num_experts=experts,
        num_experts_per_tok=k,
        norm_topk_prob=norm,
        experts_implementation=implementation,
    )
    layer = MoELayer(config, dtype=torch.float64)
    x = torch.randn(4, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    # A strong pull towards the first expert, so that routing is far from balanced.
    with torch.no_grad():
        layer.gate.weight[0] += x.mean((0, 1)) * 4
    out = layer(x)
    hidden, aux, counts = dense_reference(layer, x.reshape(-1, HIDDEN))
    assert_close(out.hidden, hidden.view(x.shape), atol=1e-10, rtol=1e-10)
    assert_close(out.aux_loss, aux, atol=1e-12, rtol=1e-10)
    assert torch.equal(out.load_E, counts)
    factors = torch.randn_like(x)
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad((out.hidden * factors).sum() + out.aux_loss, inputs)
    theirs = torch.autograd.grad((hidden.view(x.shape) * factors).sum() + aux, inputs)
    assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_names_are_those_of_transformers():
    layer = MoELayer(config_for())
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    assert shapes == {
        "gate.weight": (8, HIDDEN),
        "experts.gate_up_proj": (8, 2 * INTERMEDIATE, HIDDEN),
        "experts.down_proj": (8, HIDDEN, INTERMEDIATE),
    }


def test_tokens_without_batch_dim_give_the_same_numbers(seed):
    layer, x = MoELayer(config_for()), torch.randn(2, 3, HIDDEN)
    batched, flat = layer(x), layer(x.reshape(6, HIDDEN))
    assert torch.equal(batched.hidden.reshape(6, HIDDEN), flat.hidden)
    assert torch.equal(batched.aux_loss, flat.aux_loss)


@pytest.mark.parametrize("shape", [(0, HIDDEN), (2, 0, HIDDEN), (0, 4, HIDDEN)])
def test_zero_tokens_give_zero_gradients(shape):
    layer = MoELayer(config_for())
    x = torch.empty(shape, requires_grad=True)
    out = layer(x)
    (out.hidden.sum() + out.aux_loss).backward()
    assert out.hidden.shape == shape
    assert all(not p.grad.any() for p in layer.parameters())


def test_non_contiguous_input_and_input_without_gradient_work(seed):
    layer = MoELayer(config_for(), dtype=torch.float64)
    x = torch.randn(3, HIDDEN, 4, dtype=torch.float64).transpose(1, 2)
    out = layer(x)
    out.hidden.square().sum().backward()
    assert torch.equal(out.hidden, layer(x.contiguous()).hidden)
    assert layer.gate.weight.grad.any()


def test_bf16_layer_is_close_to_the_fp32_layer(seed):
    layer = MoELayer(config_for(), dtype=torch.bfloat16)
    exact = MoELayer(config_for())
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(40, HIDDEN).bfloat16()
    out, expected = layer(x), exact(x.float())
    assert out.hidden.dtype == torch.bfloat16
    assert out.aux_loss.dtype == torch.float32
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


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[batch, sequence, hidden\] or \[tokens, hidden\]"):
        MoELayer(config_for())(torch.zeros(HIDDEN))
    with pytest.raises(ValueError, match="hidden_size=12"):
        MoELayer(config_for())(torch.zeros(4, 7))
    with pytest.raises(ValueError, match="pass the layer"):
        MoELayer(config_for(moe_aux_loss_scope="sequence"))(torch.zeros(4, HIDDEN))


def groups_of(rank, world_size, ep_size):
    """The ep group of this rank, from consecutive ranks; all ranks create all groups."""
    own = None
    for first in range(0, world_size, ep_size):
        ranks = list(range(first, first + ep_size))
        group = dist.new_group(ranks)
        own = group if rank in ranks else own
    return own


LAYOUTS = [(2, 2), (4, 4), (4, 2), (2, 1), (4, 1)]  # ranks, ep; dp is the quotient


@pytest.mark.parametrize(("world_size", "ep_size"), LAYOUTS)
@pytest.mark.parametrize("scope", ["micro_batch", "sequence"])
@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_ranks_equal_one_process(seed, world_size, ep_size, scope, implementation):
    config = config_for(moe_aux_loss_scope=scope, experts_implementation=implementation)
    whole = MoELayer(config, dtype=torch.float64)
    # Unequal numbers of sequences; the second rank has none. Routing is unbalanced, and with a
    # large negative row the last expert gets nothing.
    sizes = [2, 0, 3, 1][:world_size]
    x = torch.randn(sum(sizes), 5, HIDDEN, dtype=torch.float64)
    x[..., 0] = 1
    with torch.no_grad():
        whole.gate.weight[0, 0] += 2
        whole.gate.weight[7, 0] -= 50
    factors = torch.randn_like(x)
    pieces, factor_pieces = x.split(sizes), factors.split(sizes)

    def fn(rank, world_size):
        ep_group = groups_of(rank, world_size, ep_size)
        layer = MoELayer(
            config,
            ep_group=ep_group if ep_size > 1 else None,
            token_group=dist.group.WORLD,
            dtype=torch.float64,
        )
        local = config.num_experts // ep_size
        mine = slice(rank % ep_size * local, (rank % ep_size + 1) * local)
        with torch.no_grad():
            layer.gate.weight.copy_(whole.gate.weight)
            layer.experts.gate_up_proj.copy_(whole.experts.gate_up_proj[mine])
            layer.experts.down_proj.copy_(whole.experts.down_proj[mine])
        own = pieces[rank].clone().requires_grad_()
        out = layer(own)
        ((out.hidden * factor_pieces[rank]).sum() + out.aux_loss).backward()
        grads = [own.grad, *(p.grad for p in layer.parameters())]
        return [t.numpy() for t in (out.hidden.detach(), out.aux_loss.detach(), out.load_E, *grads)]

    ranks = [[torch.as_tensor(t) for t in values] for values in run_ranks(fn, world_size)]
    x.requires_grad_()
    out = whole(x)
    ((out.hidden * factors).sum() + out.aux_loss).backward()
    hidden, aux, load, grad_x, grad_gate, grad_gate_up, grad_down = zip(*ranks, strict=True)
    close = dict(atol=1e-12, rtol=1e-12)
    assert load[0][7] == 0
    assert_close(torch.cat(hidden), out.hidden, **close)
    assert_close(sum(aux), out.aux_loss, **close)
    assert all(torch.equal(each, out.load_E) for each in load)
    assert_close(torch.cat(grad_x), x.grad, **close)
    assert_close(sum(grad_gate), whole.gate.weight.grad, **close)
    for parts, name in ((grad_gate_up, "gate_up_proj"), (grad_down, "down_proj")):
        replicas = [torch.cat(parts[i : i + ep_size]) for i in range(0, world_size, ep_size)]
        assert_close(sum(replicas), getattr(whole.experts, name).grad, **close)


def test_experts_that_do_not_divide_are_refused():
    def fn(rank, world_size):
        with pytest.raises(ValueError, match="ep axis has 2 ranks but num_experts=7"):
            MoELayer(config_for(num_experts=7), ep_group=dist.group.WORLD)

    run_ranks(fn, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_layer_agrees_with_the_cpu(seed, dtype):
    config = config_for(hidden_size=64, moe_intermediate_size=32)
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
