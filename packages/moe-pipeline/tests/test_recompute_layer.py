"""Recompute of MoE layers under other logits: 1e-3 of noise is injected into the second forward.

The routers' logits differ by less than the noise, so that routing again would choose others; the
tests that use torch's own checkpoint show that it does.
"""

import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from comm_collectives.call import calls
from comm_collectives.moe.routes.ranks import RankRouting
from moe_pipeline.config import (
    ExpertsOptions,
    MoEConfig,
    RouterLosses,
    RouterOptions,
    SharedExpertOptions,
)
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.recomputation.recomputing import is_replaying, recompute
from moe_pipeline.router.aux_loss import global_batch_loss
from ranktest import run_ranks

ALONE = MoEGroups()
HIDDEN, EXPERTS, K = 8, 8, 2
ROUTERS = {
    "softmax": RouterOptions(),
    "softmax of the chosen": RouterOptions(moe_router_pre_softmax=False),
    "groups": RouterOptions(
        moe_router_score_function="sigmoid",
        n_group=4,
        topk_group=2,
        moe_router_group_score="top2_sum",
        routed_scaling_factor=2.5,
    ),
    "jitter": RouterOptions(moe_input_jitter_eps=0.1),
    "capacity by probability": RouterOptions(moe_expert_capacity_factor=0.7),
    "capacity by position": RouterOptions(
        moe_expert_capacity_factor=0.7, moe_token_drop_policy="position"
    ),
    "expert choice": RouterOptions(moe_router_selection="expert_choice"),
    "sinkhorn": RouterOptions(moe_router_selection="sinkhorn", norm_topk_prob=False),
}
# Where a router may have the bias it does, so that its own counter shows a second count.
ROUTERS = {
    name: replace(
        options,
        moe_router_enable_expert_bias=options.moe_router_selection == "token_choice",
    )
    for name, options in ROUTERS.items()
}


def config_for(router=ROUTERS["softmax"], scope="microbatch", implementation="auto"):
    return MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=6,  # so that only routers have a weight [EXPERTS, HIDDEN]
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        router=router,
        losses=RouterLosses(
            router_aux_loss_coef=0.3, moe_aux_loss_scope=scope, router_z_loss_coef=0.1
        ),
        experts=ExpertsOptions(experts_implementation=implementation),
        shared_expert=SharedExpertOptions(
            moe_shared_expert_intermediate_size=5, moe_shared_expert_gate=True
        ),
        initializer_range=0.4,
    )


@pytest.fixture(scope="module", autouse=True)
def checkpoint_is_loaded():
    """Torch imports its compiler in the first recompute; not in each forked rank again."""
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


class Block(nn.Module):
    """Two MoE layers with what a decoder has around them."""

    def __init__(self, config, groups=ALONE, dtype=torch.float64):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.layers = nn.ModuleList(MoELayer(config, groups=groups, dtype=dtype) for _ in range(2))
        with torch.no_grad():
            for layer in self.layers:
                layer.gate.weight.mul_(1e-4)  # closer to each other than the noise
        self.token_ids_T, self.nested = None, False

    def forward(self, x):
        outs = []
        for layer in self.layers:
            way = recompute if self.nested else plainly
            outs.append(way(layer, self.norm(x), token_ids_T=self.token_ids_T))
            x = x + outs[-1].hidden
        return torch.sin(x), outs

    def loss_of(self, out, factors):
        hidden, outs = out
        return (hidden * factors).sum() + sum(each.aux_loss + each.z_loss for each in outs)


class Watched:
    """What the second forward did: noise, choices, calls over groups, exchanges of counts."""

    def __init__(self):
        self.num_noises, self.num_count_exchanges = 0, 0
        self.choices, self.calls = ([], []), Counter()

    @contextmanager
    def over(self, block, second):
        """Inject and watch; `second` says whether a forward is the second."""
        patch = pytest.MonkeyPatch()
        linear, start = F.linear, calls.Call.__init__
        learn = RankRouting.learn

        def noisy(x, weight, *args, **kwargs):
            logits = linear(x, weight, *args, **kwargs)
            if not second() or weight.shape != (EXPERTS, HIDDEN):
                return logits
            self.num_noises += 1
            return logits + 1e-3 * torch.randn_like(logits)

        def counted(call, state, name, **kwargs):
            if second() and not name.endswith(calls.BACKWARD_OF):
                self.calls[name] += 1
            start(call, state, name, **kwargs)

        def counted_exchange(routing, told):
            self.num_count_exchanges += second()
            learn(routing, told)

        def chosen(router, args, routed):
            self.choices[second()].append((router, routed.plan.topk_idx_TK.clone()))

        patch.setattr(F, "linear", noisy)
        patch.setattr(calls.Call, "__init__", counted)
        patch.setattr(RankRouting, "learn", counted_exchange)
        hooks = [layer.gate.register_forward_hook(chosen) for layer in block.layers]
        yield self
        for hook in hooks:
            hook.remove()
        patch.undo()

    def chooses_alike(self):
        """Whether each second choice of a router is its first one."""
        first = {id(router): idx for router, idx in self.choices[0]}
        return all(torch.equal(first[id(router)], idx) for router, idx in self.choices[1])


def gradients(block, x):
    return [x.grad, *(p.grad for p in block.parameters())]


def all_equal(ours, theirs):
    pairs = list(zip(ours, theirs, strict=True))
    return all(
        (a is None and b is None) or (None not in (a, b) and torch.equal(a, b)) for a, b in pairs
    )


def run(block, x, factors, way):
    """One forward and backward; output, losses and gradients; what was counted; the loads."""
    block.zero_grad()
    x.grad = None
    counters = [layer.gate for layer in block.layers if hasattr(layer.gate, "tokens_per_expert")]
    for gate in counters:
        gate.tokens_per_expert.zero_()
    out = way(block, x)
    block.loss_of(out, factors).backward()
    counts = [gate.tokens_per_expert.clone() for gate in counters]
    losses = [loss.detach() for each in out[1] for loss in (each.aux_loss, each.z_loss)]
    grads = [None if grad is None else grad.clone() for grad in gradients(block, x)]
    loads = [each.load_E for each in out[1]]
    return [out[0].detach(), *losses, *grads], counts, loads if counters else []


def test_a_caller_may_add_to_the_load_that_it_got(seed):
    layer, x = MoELayer(config_for(), dtype=torch.float64), torch.randn(9, HIDDEN).double()
    gradient = []
    for extra in (0, 100):
        layer.zero_grad()
        out = recompute(layer, x)
        out.load_E[0] += extra
        (out.hidden.sum() + out.aux_loss).backward()
        gradient.append(layer.gate.weight.grad)
    assert torch.equal(*gradient)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_noise_in_the_second_forward_changes_nothing(seed, router, implementation):
    config = config_for(ROUTERS[router], implementation=implementation)
    block = Block(config)
    block.token_ids_T = torch.arange(24)
    x = torch.randn(4, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    factors = torch.randn_like(x)
    expected = run(block, x, factors, plainly)
    with Watched().over(block, is_replaying) as watched:
        got = run(block, x, factors, recompute)
    assert watched.num_noises == len(watched.choices[1]) == 2
    assert watched.chooses_alike()
    assert all_equal(got[0], expected[0])
    for counts, loads in (got[1:], expected[1:]):
        assert all(torch.equal(*pair) for pair in zip(counts, loads, strict=True))


@pytest.mark.parametrize("router", ["softmax", "groups", "capacity by probability"])
def test_plain_checkpoint_chooses_others_and_counts_twice(seed, router):
    """The noise is large enough, and the watch sees what it has to see."""
    block = Block(config_for(ROUTERS[router], implementation="fused"))
    x = torch.randn(4, 60, HIDDEN, dtype=torch.float64)
    runs = []

    def function(x):
        runs.append(None)
        return block(x)

    with Watched().over(block, lambda: len(runs) == 2) as watched:
        try:
            hidden, outs = checkpoint(function, x, use_reentrant=False)
            hidden.sum().backward()
        except RuntimeError as error:  # torch may notice that shapes differ
            assert "different metadata" in str(error)
    assert watched.num_noises > 0
    assert not watched.chooses_alike()
    assert int(block.layers[0].gate.tokens_per_expert.sum()) > int(outs[0].load_E.sum())


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
@pytest.mark.parametrize("shape", [(4, 6), (2, 0), (0, 3)])
def test_every_scope_and_no_tokens(seed, scope, shape):
    block = Block(config_for(scope=scope))
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    factors = torch.randn_like(x)
    expected = run(block, x, factors, plainly)
    with Watched().over(block, is_replaying) as watched:
        got = run(block, x, factors, recompute)
    assert watched.num_noises > 0
    assert all_equal(got[0], expected[0])


def test_loss_of_the_global_batch_is_that_of_no_recompute(seed):
    """Its gradient comes after the last forward of the step, through terms of each microbatch."""
    config = config_for(scope="global_batch")
    block = Block(config)
    batches = [torch.randn(2, 5, HIDDEN, dtype=torch.float64) for _ in range(3)]

    def gradient(way):
        block.zero_grad()
        outs = [way(block, x)[1] for x in batches]
        losses = [
            global_batch_loss([out[i].balance for out in outs], config)
            for i in range(len(block.layers))
        ]
        sum(losses).backward()
        return [loss.detach() for loss in losses], [p.grad for p in block.parameters()]

    losses, expected = gradient(plainly)
    with Watched().over(block, is_replaying) as watched:
        got_losses, got = gradient(recompute)
    assert watched.num_noises > 0
    assert expected[[name for name, _ in block.named_parameters()].index("norm.weight")].any()
    assert all_equal(got_losses, losses)
    assert all_equal(got, expected)


PARTS = ["gate.", "experts.", "shared_expert", "norm.", "layers.1."]


@pytest.mark.parametrize("frozen", [[], *([part] for part in PARTS), PARTS[:3]])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_frozen_parts_and_inputs_without_gradient(seed, frozen, needs_grad):
    block = Block(config_for())
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    x = torch.randn(3, 5, HIDDEN, dtype=torch.float64, requires_grad=needs_grad)
    factors = torch.randn_like(x)
    expected = run(block, x, factors, plainly)[0]
    with Watched().over(block, is_replaying) as watched:
        got = run(block, x, factors, recompute)[0]
    assert watched.chooses_alike()
    assert watched.num_noises > 0
    assert all_equal(got, expected)
    for parameter in block.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


def test_nested_recompute_and_retained_graphs_replay(seed):
    block = Block(config_for(ROUTERS["groups"]))
    x = torch.randn(4, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    factors = torch.randn_like(x)
    expected = run(block, x, factors, plainly)[0]
    once = expected[-len(gradients(block, x)) :]
    block.nested = True
    with Watched().over(block, is_replaying) as watched:
        got, counts, loads = run(block, x, factors, recompute)
        assert all_equal(got, expected)
        assert all(torch.equal(*pair) for pair in zip(counts, loads, strict=True))
        block.zero_grad()
        x.grad = None
        loss = block.loss_of(recompute(block, x), factors)
        loss.backward(retain_graph=True)
        loss.backward()
    assert watched.num_noises > 8
    assert watched.chooses_alike()
    assert all_equal(gradients(block, x), [2 * grad for grad in once])


def test_lower_precision_recomputes_the_same_bits(seed):
    block = Block(config_for(ROUTERS["groups"]), dtype=torch.bfloat16)
    x = torch.randn(4, 6, HIDDEN).bfloat16().requires_grad_()
    factors = torch.randn_like(x)
    expected = run(block, x, factors, plainly)[0]
    with Watched().over(block, is_replaying) as watched:
        got = run(block, x, factors, recompute)[0]
    assert watched.num_noises == 2
    assert all_equal(got, expected)


def groups_of(rank, world_size, ep_size):
    """Consecutive ranks are ep; etp is across. All ranks make all groups."""
    ep, etp = None, None
    ranks = torch.arange(world_size).view(-1, ep_size)
    for line in ranks.tolist():
        group = dist.new_group(line)
        ep = group if rank in line else ep
    for line in ranks.t().tolist():
        group = dist.new_group(line)
        etp = group if rank in line else etp
    return MoEGroups(ep=ep, etp=etp, tokens=dist.group.WORLD)


@pytest.mark.parametrize(
    ("world_size", "ep_size", "implementation"),
    [(2, 2, "loop"), (2, 2, "fused"), (2, 1, "fused"), (4, 2, "fused")],
)
def test_ranks_repeat_no_collective_that_decides_on_routing(
    seed, world_size, ep_size, implementation
):
    base = torch.initial_seed()

    def fn(rank, world_size):
        groups = groups_of(rank, world_size, ep_size)
        failed = []
        for number, (name, router) in enumerate(ROUTERS.items()):
            torch.manual_seed(base + number)
            scope = ("microbatch", "sequence", "global_batch")[number % 3]
            block = Block(config_for(router, scope, implementation), groups)
            sequences = [2, 0, 3, 1][rank]
            x = torch.randn(sequences, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
            block.token_ids_T = torch.arange(sequences * 5) + 100 * rank
            factors = torch.randn_like(x)
            expected, counts, loads = run(block, x, factors, plainly)
            with Watched().over(block, is_replaying) as watched:
                got, replayed_counts, _ = run(block, x, factors, recompute)
            # Two layers: rows go out once and come back once, over etp with their weights.
            wanted = Counter(dispatch=2, combine=2) if ep_size > 1 else Counter()
            if world_size > ep_size:
                wanted.update(all_gather=4, reduce_scatter=2)
            facts = {
                "noise": watched.num_noises == 2,
                "choices": watched.chooses_alike(),
                "values and gradients": all_equal(got, expected),
                "counts": all(map(torch.equal, replayed_counts, loads)),
                "counts of no recompute": all(map(torch.equal, counts, loads)),
                f"calls {dict(watched.calls)}": watched.calls == wanted,
                "exchanges of counts": watched.num_count_exchanges == 0,
            }
            failed += [f"{name}: {fact}" for fact, holds in facts.items() if not holds]
        return failed

    assert run_ranks(fn, world_size) == [[]] * world_size


def test_rows_and_results_of_experts_are_not_kept(seed):
    block, alive = Block(config_for(implementation="fused")), []

    def watched(forward):
        def run(x, idx, weights):
            result = forward(x, idx, weights)
            alive.append([weakref.ref(each) for each in (x, weights, result)])
            return result

        return run

    for layer in block.layers:
        layer.experts.forward_tokens = watched(layer.experts.forward_tokens)
    x = torch.randn(4, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = recompute(block, x)
    assert [[each() for each in refs] for refs in alive] == [[None] * 3] * 2
    out[0].sum().backward()
    assert len(alive) == 4
