from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from moe_pipeline.config import ExpertsOptions, MoEConfig, SharedExpertOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer import DispatchOptions, MoELayer
from moe_pipeline.layer.shared_expert import SharedExpert, SharedExpertGate
from ranktest import run_ranks

HIDDEN, WIDTH = 10, 7


def config_for(implementation="auto", act="silu", gate=True):
    return MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=4,
        num_experts=2,
        num_experts_per_tok=1,
        experts=ExpertsOptions(experts_implementation=implementation, hidden_act=act),
        shared_expert=SharedExpertOptions(
            moe_shared_expert_intermediate_size=WIDTH, moe_shared_expert_gate=gate
        ),
        initializer_range=0.5,
    )


def shared_out():
    """Groups of ranks that share everything out."""
    return MoEGroups(tokens=dist.group.WORLD, sequence=dist.group.WORLD, tp=dist.group.WORLD)


def reference(module, x_TD, scale_T1, act):
    acts = {
        "silu": lambda v: v * torch.sigmoid(v),
        "gelu": lambda v: v * 0.5 * (1 + torch.erf(v / 2**0.5)),
        "gelu_pytorch_tanh": lambda v: F.gelu(v, approximate="tanh"),
    }
    gate, up = x_TD @ module.gate_proj.weight.t(), x_TD @ module.up_proj.weight.t()
    return scale_T1 * ((acts[act](gate) * up) @ module.down_proj.weight.t())


@pytest.mark.parametrize("tokens", [6, 1, 0])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_values_and_gradients_equal_the_formula(seed, implementation, act, tokens):
    config = config_for(implementation, act)
    module = SharedExpert(config, dtype=torch.float64)
    gate = SharedExpertGate(config, dtype=torch.float64)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    got = module(x, gate(x))
    wanted = reference(module, x, 1 / (1 + torch.exp(-(x @ gate.weight.t()))), act)
    assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    inputs = [x, *module.parameters(), *gate.parameters()]
    factors = torch.randn_like(x)
    assert_close(
        torch.autograd.grad(got, inputs, factors),
        torch.autograd.grad(wanted, inputs, factors),
        atol=1e-12,
        rtol=1e-12,
    )


def test_without_a_gate_the_output_is_not_scaled(seed):
    module = SharedExpert(config_for(), dtype=torch.float64)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    assert_close(module(x), reference(module, x, torch.ones(5, 1).double(), "silu"))


def test_gradcheck_with_frozen_weights_and_expanded_gradients(seed):
    module = SharedExpert(config_for("fused"), dtype=torch.float64)
    scale = torch.rand(3, 1, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, scale: module(x, scale), (x, scale))
    module.up_proj.weight.requires_grad_(False)
    module(x.detach()).sum().backward()
    assert module.up_proj.weight.grad is None
    assert module.gate_proj.weight.grad is not None


def test_fused_saves_the_input_and_two_projections_only(seed):
    saved = {}
    module = SharedExpert(config_for("fused"))
    x = torch.randn(50, HIDDEN, requires_grad=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            saved[pointer] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    assert sum(saved.values()) == 50 * (HIDDEN + 2 * WIDTH)
    y.sum().backward()


def test_autocast_computes_in_its_dtype(seed):
    module = SharedExpert(config_for("fused"))
    x = torch.randn(4, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert module.down_proj.weight.grad.dtype == torch.float32


def test_config_without_a_shared_expert_is_refused():
    config = MoEConfig(hidden_size=4, moe_intermediate_size=4, num_experts=2, num_experts_per_tok=1)
    for module in (SharedExpert, SharedExpertGate):
        with pytest.raises(ValueError, match=r"MoEConfig\(shared_expert="):
            module(config)


def test_ranks_with_parts_of_the_width_return_what_one_process_does(seed):
    """Five positions of two ranks, the last ones padding of NaN; gradients are whole, or sum up."""
    config = replace(
        config_for(),
        shared_expert=SharedExpertOptions(
            moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True
        ),
    )
    alone = MoELayer(config, dtype=torch.float64)
    state = alone.state_dict()
    x, tokens = torch.randn(2, 5, HIDDEN, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 5, 6])
    x[0, 4:], x[1, 2:] = torch.nan, torch.nan
    wanted = alone(x, token_idx_N=tokens).hidden
    wanted.square().sum().backward()

    def run(rank, size):
        layer = MoELayer(
            config,
            groups=shared_out(),
            dtype=torch.float64,
        )
        part = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
        own = {
            name: tensor.chunk(size, part[name.split(".")[1]])[rank]
            if name.startswith("shared_experts.")
            else tensor
            for name, tensor in state.items()
        }
        layer.load_state_dict(own)
        first, last = (0, 3) if rank == 0 else (3, 5)
        here = torch.tensor([[0, 1, 2, 3, 4], [0]][rank])
        out = layer(x.detach()[:, first:last].requires_grad_(), token_idx_N=here).hidden
        out.square().sum().backward()
        return out.detach(), {n: p.grad for n, p in layer.named_parameters()}

    (first, grads), (second, others) = run_ranks(run, 2)
    assert_close(torch.cat((first, second), dim=1), wanted.detach())
    for name, parameter in alone.named_parameters():
        if name.startswith("shared_experts."):
            found = torch.cat((grads[name], others[name]), dim=1 if "down" in name else 0)
        else:
            found = grads[name] + others[name]
        assert_close(found, parameter.grad, msg=name)


def test_ranks_that_cannot_share_the_width_or_get_no_sequences_are_refused():
    with pytest.raises(ValueError, match=r"tp axis has 2 ranks .*=7; choose a divisor of 7"):
        SharedExpert(config_for(), tp_size=2)

    def run(*_):
        config = replace(
            config_for(), shared_expert=SharedExpertOptions(moe_shared_expert_intermediate_size=8)
        )
        groups = shared_out()
        with pytest.raises(ValueError, match=r"ranks of groups\.tp gather tokens for it"):
            MoELayer(config, groups=groups, dispatch=DispatchOptions(overlaps_shared_expert=True))
        with pytest.raises(ValueError, match=r"\[batch, sequence, hidden\], got shape \(4, 10\)"):
            MoELayer(config, groups=groups)(torch.randn(4, HIDDEN))

    run_ranks(run, 2)


def test_runs_of_positions_that_are_not_as_equal_as_can_be_are_refused():
    config = replace(
        config_for(), shared_expert=SharedExpertOptions(moe_shared_expert_intermediate_size=8)
    )

    def run(rank, _):
        layer = MoELayer(config, groups=shared_out())
        message = rf"rank {rank} .* brings {(1, 2)[rank]} of 3 positions; .* give it {2 - rank}"
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(1, (1, 2)[rank], HIDDEN))

    run_ranks(run, 2)
