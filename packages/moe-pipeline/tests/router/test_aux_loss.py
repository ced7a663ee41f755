from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from moe_pipeline.config import AUX_LOSS_SCOPES, MoEConfig, RouterLosses, RouterOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.aux_loss import (
    count_load,
    global_batch_loss,
    global_batch_shares,
    router_losses,
)
from moe_pipeline.router.top_k import TopKRouter
from moe_pipeline.routing_plan import Routed, RoutingPlan
from ranktest import collect_ranks, run_ranks

HIDDEN = 8
ALONE = MoEGroups()
EXACT = {"atol": 1e-14, "rtol": 1e-12}


def config_for(scope="microbatch", *, aux=0.1, z=0.0, experts=6, k=2):
    losses = RouterLosses(router_aux_loss_coef=aux, router_z_loss_coef=z, moe_aux_loss_scope=scope)
    return MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=k,
        losses=losses,
    )


def unbalanced_weight(experts=6):
    """A router [E, D] that likes its first experts; the last one gets nothing."""
    weight = torch.randn(experts, HIDDEN, dtype=torch.float64)
    weight[-1] = 0
    weight[:, 0] += torch.linspace(1.0, -1.0, experts, dtype=torch.float64)
    return weight.requires_grad_()


def tokens(*shape):
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64)
    x[..., 0] = x[..., 0].abs() + 1.0
    return x


def scores_of(x_TD, weight, score="softmax"):
    logits = x_TD @ weight.t()
    if score == "softmax":
        return logits, torch.softmax(logits, dim=-1)
    sigmoid = torch.sigmoid(logits)
    return logits, sigmoid / sigmoid.sum(dim=-1, keepdim=True)


def route(x_TD, weight, k=2, score="softmax", idx=None):
    """What a router returns, or would if it chose `idx`."""
    logits, probs = scores_of(x_TD, weight, score)
    idx = probs.detach().topk(k, dim=1).indices if idx is None else idx
    counts = torch.bincount(idx[idx >= 0], minlength=len(weight))
    plan = RoutingPlan(topk_idx_TK=idx, counts_E=counts, logits_TE=logits.detach())
    chosen = probs.gather(1, idx.clamp(min=0)) * (idx >= 0)
    return Routed(plan=plan, topk_weights_TK=chosen, probs_TE=probs, logits_TE=logits)


def balance_of(x_TD, weight, k, score="softmax", choices=None):
    """`E * sum_e f_e P_e` over one set of tokens, counted one by one; also the counts."""
    _, probs = scores_of(x_TD, weight, score)
    choices = probs.topk(k, dim=1).indices.tolist() if choices is None else choices
    counts = [0] * len(weight)
    for expert in (expert for row in choices for expert in row if expert >= 0):
        counts[expert] += 1
    total = probs.new_zeros(())
    for expert, count in enumerate(counts):
        total = total + count / sum(counts) * probs[:, expert].mean()
    return len(weight) * total, counts


def expected_aux(scope, microbatches, weight, config, score="softmax"):
    """The balancing loss of a step, as DESIGN.md section 4 defines it, on one process."""
    k = config.num_experts_per_tok
    if scope == "global_batch":
        rows = torch.cat([x.reshape(-1, HIDDEN) for x in microbatches])
        total = balance_of(rows, weight, k, score)[0]
    elif scope == "microbatch":
        parts = [balance_of(x.reshape(-1, HIDDEN), weight, k, score)[0] for x in microbatches]
        total = sum(parts) / len(parts)
    else:
        means = [sum(balance_of(s, weight, k, score)[0] for s in x) / len(x) for x in microbatches]
        total = sum(means) / len(means)
    return config.losses.router_aux_loss_coef * total


def expected_z(microbatches, weight, config):
    means = []
    for x in microbatches:
        rows = (x.reshape(-1, HIDDEN) @ weight.t()).exp().sum(dim=1)
        means.append(sum(row.log() ** 2 for row in rows) / len(rows))
    return config.losses.router_z_loss_coef * sum(means) / len(means)


def step_share(microbatches, weight, config, groups=ALONE, score="softmax"):
    """What a trainer adds up over a step, and the loads of its microbatches."""
    total, terms, loads = weight.new_zeros(()), [], []
    for x in microbatches:
        routed = route(x.reshape(-1, HIDDEN), weight, config.num_experts_per_tok, score)
        shares = router_losses(routed, config, sequence_shape=tuple(x.shape[:2]), groups=groups)
        total = total + (shares.aux_loss + shares.z_loss) / len(microbatches)
        terms.append(shares.balance)
        loads.append(shares.load_E.tolist())
    if config.losses.moe_aux_loss_scope == "global_batch":
        total = total + global_batch_loss(terms, config, groups)
    return total, loads


def check_equal(ours, expected, *wrt):
    assert_close(ours, expected, **EXACT)
    grads = (torch.autograd.grad(v, wrt, retain_graph=True) for v in (ours, expected))
    for own, other in zip(*grads, strict=True):
        assert_close(own, other, atol=1e-14, rtol=1e-10)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_loss_and_gradients_equal_the_formula(seed, scope, k, score):
    config, weight = config_for(scope, k=k, z=0.03), unbalanced_weight()
    # Microbatches of unequal numbers of sequences.
    batches = [tokens(3, 7).requires_grad_(), tokens(2, 7).requires_grad_()]
    ours, loads = step_share(batches, weight, config, score=score)
    expected = expected_aux(scope, batches, weight, config, score)
    check_equal(ours, expected + expected_z(batches, weight, config), weight, *batches)
    for x, load in zip(batches, loads, strict=True):
        assert load == balance_of(x.reshape(-1, HIDDEN), weight, k, score)[1]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_losses_of_the_real_router_equal_the_formula(seed, scope, score):
    options = RouterOptions(moe_router_score_function=score)
    config = replace(config_for(scope, z=0.03), router=options)
    router, x = TopKRouter(config, dtype=torch.float64), tokens(4, 5).requires_grad_()
    router.load_state_dict({"weight": unbalanced_weight()}, strict=False)
    shares = router_losses(router(x.flatten(0, 1)), config, sequence_shape=(4, 5))
    expected = expected_aux(scope, [x], router.weight, config, score)
    expected_sum = expected + expected_z([x], router.weight, config)
    check_equal(shares.aux_loss + shares.z_loss, expected_sum, router.weight, x)


def test_scopes_are_different_mathematics(seed):
    batches, weight = [tokens(3, 7), tokens(2, 7)], unbalanced_weight()
    losses = [step_share(batches, weight, config_for(s))[0].item() for s in AUX_LOSS_SCOPES]
    assert min(abs(a - b) for a, b in zip(losses, losses[1:] + losses[:1], strict=True)) > 1e-5


@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_balanced_routing_costs_the_coefficient(scope):
    config = config_for(scope, experts=4, k=4, aux=0.25)
    loss, _ = step_share([tokens(2, 5)] * 3, torch.zeros(4, HIDDEN).double(), config)
    assert_close(loss.item(), 0.25)


def test_z_loss_of_equal_logits_is_the_squared_logarithm_of_their_number():
    config = config_for(aux=0.0, z=0.5)
    routed = route(tokens(9), torch.zeros(6, HIDDEN).double())
    shares = router_losses(routed, config, sequence_shape=None)
    assert_close(shares.z_loss.item(), 0.5 * torch.tensor(6.0).double().log().square().item())


def test_z_loss_of_large_logits_is_finite():
    routed = route(tokens(9) * 1e4, unbalanced_weight())
    shares = router_losses(routed, config_for(z=1.0), sequence_shape=None)
    assert shares.z_loss.isfinite()
    assert shares.z_loss > 1e6


@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_coefficients_of_zero_leave_the_router_alone(scope):
    config, weight = config_for(scope, aux=0.0), unbalanced_weight()
    loss, loads = step_share([tokens(2, 5)], weight, config)
    assert loss.item() == 0.0
    assert not loss.requires_grad
    assert sum(loads[0]) == 2 * 5 * 2


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_no_tokens_cost_nothing_and_stay_differentiable(scope, shape):
    weight = unbalanced_weight()
    loss, loads = step_share([tokens(*shape)], weight, config_for(scope, z=1.0))
    loss.backward()
    assert loss.item() == 0.0
    assert loads == [[0] * 6]
    assert not weight.grad.any()


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_what_is_not_chosen_is_not_counted(seed, scope):
    weight, x = unbalanced_weight(), tokens(2, 4)
    idx = torch.tensor([[0, 3], [-1, 2], [5, -1], [-1, -1]] + [[-1, -1]] * 3 + [[1, 0]])
    routed = route(x.reshape(8, HIDDEN), weight, idx=idx)
    ours = router_losses(routed, config_for(scope, aux=1.0), sequence_shape=(2, 4)).aux_loss
    sets = [(x[0], idx[:4]), (x[1], idx[4:])] if scope == "sequence" else [(x.flatten(0, 1), idx)]
    parts = [balance_of(part, weight, 2, choices=chosen.tolist())[0] for part, chosen in sets]
    check_equal(ours, sum(parts) / len(parts), weight)


def test_a_sequence_of_which_nothing_is_chosen_costs_nothing(seed):
    weight, x = unbalanced_weight(), tokens(2, 3)
    idx = torch.tensor([[-1, -1]] * 3 + [[0, 1]] * 3)
    routed = route(x.reshape(6, HIDDEN), weight, idx=idx)
    ours = router_losses(routed, config_for("sequence"), sequence_shape=(2, 3)).aux_loss
    expected = 0.1 * balance_of(x[1], weight, 2, choices=[[0, 1]] * 3)[0] / 2
    check_equal(ours, expected, weight)


@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_dropped_rows_are_counted_as_the_router_sent_them(seed, scope):
    config, weight, x = config_for(scope), unbalanced_weight(), tokens(3, 5)
    routed = route(x.reshape(15, HIDDEN), weight)
    full = routed.plan.topk_idx_TK
    dropped = full.masked_fill(torch.rand(full.shape) < 0.5, -1)
    plan = replace(routed.plan, topk_idx_TK=dropped, undropped_idx_TK=full)
    shares = router_losses(replace(routed, plan=plan), config, sequence_shape=(3, 5))
    ours = shares.aux_loss
    if shares.balance is not None:
        ours = global_batch_loss([shares.balance], config)
    check_equal(ours, expected_aux(scope, [x], weight, config), weight)


def test_autocast_does_not_lower_the_precision(seed):
    weight, x = unbalanced_weight().float().detach(), tokens(4, 9).float()
    routed = route(x.reshape(36, HIDDEN), weight)
    for scope in ("microbatch", "sequence"):
        config = config_for(scope, z=1.0)
        expected = router_losses(routed, config, sequence_shape=(4, 9))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = router_losses(routed, config, sequence_shape=(4, 9))
        assert torch.equal(ours.aux_loss, expected.aux_loss)
        assert torch.equal(ours.z_loss, expected.z_loss)


def test_gradient_may_be_expanded_and_probabilities_strided(seed):
    weight, x = unbalanced_weight(), tokens(2, 5)
    routed = route(x.reshape(10, HIDDEN), weight)
    strided = torch.empty(6, 10, dtype=torch.float64).t()
    strided = strided.copy_(routed.probs_TE)
    assert not strided.is_contiguous()
    for scope in ("microbatch", "sequence"):
        config = config_for(scope)
        shares = router_losses(replace(routed, probs_TE=strided), config, sequence_shape=(2, 5))
        (grad,) = torch.autograd.grad(shares.aux_loss.expand(3).sum(), weight, retain_graph=True)
        (own,) = torch.autograd.grad(expected_aux(scope, [x], weight, config), weight)
        assert_close(grad, 3 * own, **EXACT)


def test_shares_of_a_global_batch_can_go_backward_one_by_one(seed):
    config, weight = config_for("global_batch"), unbalanced_weight()
    batches = [tokens(2, 3), tokens(0, 3), tokens(4, 1)]
    terms = [
        router_losses(route(x.reshape(-1, HIDDEN), weight), config, sequence_shape=None).balance
        for x in batches
    ]
    for share in global_batch_shares(terms, config):
        share.backward()
    (expected,) = torch.autograd.grad(expected_aux("global_batch", batches, weight, config), weight)
    assert_close(weight.grad, expected, **EXACT)


def test_a_global_batch_without_terms_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        global_batch_loss([], config_for("global_batch"))
    with pytest.raises(TypeError, match="each term must be a BalanceTerms"):
        global_batch_loss([None], config_for("global_batch"))


@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_one_microbatch_is_its_own_global_batch(seed, scope):
    config, weight, x = config_for(scope), unbalanced_weight(), tokens(1, 11)
    loss, _ = step_share([x], weight, config)
    assert_close(loss, expected_aux("microbatch", [x], weight, config), **EXACT)


def test_sequence_scope_without_sequences_is_refused():
    with pytest.raises(ValueError, match=r"pass the layer \[batch, sequence, hidden\]"):
        router_losses(
            route(tokens(4), unbalanced_weight()), config_for("sequence"), sequence_shape=None
        )


def test_sequences_of_another_number_of_tokens_are_refused():
    routed = route(tokens(4), unbalanced_weight())
    with pytest.raises(ValueError, match=r"\(2, 3\) holds 6 tokens, the router got 4"):
        router_losses(routed, config_for("sequence"), sequence_shape=(2, 3))


def test_a_plan_with_a_part_of_its_counts_is_refused():
    plan = route(tokens(4), unbalanced_weight()).plan
    config = config_for("sequence")
    counted = count_load(plan, config_for(), sequence_shape=None)
    with pytest.raises(ValueError, match="keep the plan that count_load returns"):
        count_load(counted, config, sequence_shape=(2, 2))
    with pytest.raises(ValueError, match="keep the plan that count_load returns"):
        count_load(replace(plan, load_E=plan.counts_E), config_for(), sequence_shape=None)


# Layouts: (copies, dp, sp). Copies hold the same tokens; dp ranks have unequal numbers of
# sequences, the last of four none; sp ranks unequal parts of each, the second of four nothing.
LAYOUTS = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 1, 1),
    (1, 4, 1),
    (1, 2, 2),
    (1, 1, 4),
    (2, 2, 1),
    (2, 1, 2),
]
DP_STARTS = {1: [0, 6], 2: [0, 5, 6], 4: [0, 3, 4, 6, 6]}
SP_STARTS = {1: [0, 5], 2: [0, 4, 5], 4: [0, 2, 2, 4, 5]}


def own_slice(rank, dp, sp):
    d, s = rank // sp % dp, rank % sp
    return (
        slice(DP_STARTS[dp][d], DP_STARTS[dp][d + 1]),
        slice(SP_STARTS[sp][s], SP_STARTS[sp][s + 1]),
    )


def groups_of(rank, copies, dp, sp):
    """Every rank makes every group, in the same order, and keeps its own."""
    made = {}
    for name, size in (("tokens", dp * sp), ("sequence", sp)):
        for start in range(0, copies * dp * sp, size):
            ranks = list(range(start, start + size))
            group = dist.new_group(ranks)
            if rank in ranks:
                made[name] = group
    return MoEGroups(timeout_s=30.0, **made)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shares_and_gradients_of_ranks_sum_to_those_of_one_process(seed, layout):
    copies, dp, sp = layout
    weight = unbalanced_weight()
    batches = [tokens(6, 5).requires_grad_() for _ in range(3)]
    cases = [(scope, count) for scope in AUX_LOSS_SCOPES for count in (1, 3)]

    def fn(rank, world_size):
        groups, results = groups_of(rank, *layout), []
        for scope, count in cases:
            own = [x[own_slice(rank, dp, sp)].detach().requires_grad_() for x in batches[:count]]
            share, loads = step_share(own, weight, config_for(scope, z=0.03), groups)
            grads = torch.autograd.grad(share, [weight, *own])
            results.append((share.item(), loads, [grad.numpy() for grad in grads]))
        return results

    ranks = run_ranks(fn, copies * dp * sp)
    for case, (scope, count) in enumerate(cases):
        config, used = config_for(scope, z=0.03), batches[:count]
        expected = expected_aux(scope, used, weight, config) + expected_z(used, weight, config)
        grads = torch.autograd.grad(expected, [weight, *used])
        loads = [balance_of(x.flatten(0, 1), weight, 2)[1] for x in used]
        for copy in range(copies):
            own = ranks[copy * dp * sp : (copy + 1) * dp * sp]
            assert_close(sum(r[case][0] for r in own), expected.item(), **EXACT)
            weight_grad = sum(torch.from_numpy(r[case][2][0]) for r in own)
            assert_close(weight_grad, grads[0], **EXACT)
            for rank, results in enumerate(own):
                assert results[case][1] == loads
                for ours, whole in zip(results[case][2][1:], grads[1:], strict=True):
                    part = whole[own_slice(rank, dp, sp)]
                    assert_close(torch.from_numpy(ours), part, **EXACT)


@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_a_counted_plan_gives_the_same_losses_and_meets_nobody(seed, scope):
    weight, x = unbalanced_weight(), tokens(4, 5)

    def fn(rank, world_size):
        world = dist.group.WORLD
        groups = MoEGroups(tokens=world, sequence=world, timeout_s=20.0)
        config, own = config_for(scope, z=0.03), x[:, : 2 + rank]
        kwargs = {"sequence_shape": tuple(own.shape[:2]), "groups": groups}
        routed = route(own.reshape(-1, HIDDEN), weight)
        first = router_losses(routed, config, **kwargs)
        # Rank 0 alone does it again: a collective would wait for rank 1 in vain.
        if rank == 0:
            again = router_losses(replace(routed, plan=first.plan), config, **kwargs)
            assert again.plan is first.plan
            assert torch.equal(again.aux_loss, first.aux_loss)
            assert torch.equal(again.z_loss, first.z_loss)
            again.z_loss.backward(retain_graph=True)
            if scope != "global_batch":
                again.aux_loss.backward()
        return first.load_E.tolist(), first.plan.num_parts

    results = run_ranks(fn, 2)
    assert results[0] == results[1]
    # Both ranks hold parts of the same 4 sequences of 2 + 3 tokens.
    assert results[0][1] == (4 if scope == "sequence" else 20)


@pytest.mark.parametrize("scope", AUX_LOSS_SCOPES)
def test_evaluation_meets_nobody_and_has_no_loss(seed, scope):
    weight, x = unbalanced_weight(), tokens(4, 5)

    def fn(rank, world_size):
        groups = MoEGroups(tokens=dist.group.WORLD, timeout_s=20.0)
        for _ in range(1 + rank):
            routed = route(x.reshape(-1, HIDDEN), weight)
            out = router_losses(
                routed, config_for(scope, z=1.0), sequence_shape=None, groups=groups, training=False
            )
            assert torch.equal(out.load_E, routed.plan.counts_E)
            assert out.balance is None
        return out.aux_loss.item(), out.z_loss.item(), out.aux_loss.requires_grad

    assert run_ranks(fn, 2) == [(0.0, 0.0, False)] * 2


def test_ranks_of_a_global_batch_may_differ_in_their_number_of_microbatches(seed):
    config, weight = config_for("global_batch"), unbalanced_weight()
    batches = [tokens(2, 3), tokens(1, 3), tokens(5, 3)]

    def fn(rank, world_size):
        own = batches[:1] if rank == 0 else batches[1:]
        terms = [
            router_losses(route(x.flatten(0, 1), weight), config, sequence_shape=None).balance
            for x in own
        ]
        share = global_batch_loss(terms, config, MoEGroups(tokens=dist.group.WORLD))
        return share.item(), torch.autograd.grad(share, weight)[0].numpy()

    ranks = run_ranks(fn, 2)
    expected = expected_aux("global_batch", batches, weight, config)
    assert_close(sum(r[0] for r in ranks), expected.item(), **EXACT)
    grad = torch.from_numpy(sum(r[1] for r in ranks))
    assert_close(grad, torch.autograd.grad(expected, weight)[0], **EXACT)


def test_different_numbers_of_sequences_in_a_sequence_group_are_found():
    def fn(rank, world_size):
        groups = MoEGroups(tokens=dist.group.WORLD, sequence=dist.group.WORLD, timeout_s=20.0)
        plan = route(tokens(6), unbalanced_weight()).plan
        shape = [(2, 3), (3, 2)][rank]
        count_load(plan, config_for("sequence"), sequence_shape=shape, groups=groups)

    outcomes = collect_ranks(fn, 2)
    assert [outcome.error_type for outcome in outcomes] == ["MismatchError"] * 2
