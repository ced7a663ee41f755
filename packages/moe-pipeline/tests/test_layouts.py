"""One process against every way to lay four: dp x ep x etp x tp x microbatches.

tp is sequence parallel: each of its ranks holds a part of every sequence.

The oracle is the layer itself in one process, which test_layer.py holds against brute force.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from moe_pipeline.config import (
    ExpertsOptions,
    MoEConfig,
    RouterLosses,
    RouterOptions,
    SharedExpertOptions,
)
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.folding import fold_experts
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.recomputation.recomputing import recompute
from moe_pipeline.router.aux_loss import global_batch_loss
from moe_pipeline.router.expert_bias import update_expert_bias
from ranktest import run_ranks

WORLD = 4
SEQUENCES, LENGTH, HIDDEN, INTERMEDIATE, EXPERTS, K = 6, 5, 6, 4, 12, 3
LOSSES = dict(router_aux_loss_coef=0.3, router_z_loss_coef=0.1)
# Unequal parts; with four ranks one has none. By ranks, then by sequences of a microbatch.
SPLITS = {
    1: {6: [6], 3: [3], 2: [2]},
    2: {6: [2, 4], 3: [2, 1], 2: [0, 2]},
    4: {6: [2, 0, 3, 1], 3: [1, 0, 2, 0], 2: [0, 1, 0, 1]},
}
POSITIONS = {1: [5], 2: [3, 2], 4: [2, 0, 1, 2]}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; `order` is that in which the experts' axes are laid over the ranks."""

    dp: int
    tp: int
    ep: int
    etp: int
    microbatches: int
    order: tuple = (0, 1, 2, 3)

    def own_tokens(self, rank, sequences):
        """Which sequences, and which of their positions, the rank holds of a microbatch."""
        dp_rank, tp_rank = divmod(rank, self.tp)
        parts = SPLITS[self.dp][sequences], POSITIONS[self.tp]
        return tuple(
            slice(sum(sizes[:place]), sum(sizes[: place + 1]))
            for sizes, place in zip(parts, (dp_rank, tp_rank), strict=True)
        )

    def groups(self, rank, make):
        axes = fold_experts(self.order, ep_size=self.ep, etp_size=self.etp)
        tp_ranks = tuple(range(rank // self.tp * self.tp, (rank // self.tp + 1) * self.tp))
        return MoEGroups(
            ep=make(axes.ep, rank),
            etp=make(axes.etp, rank),
            tokens=dist.group.WORLD,
            sequence=make((tp_ranks,), rank),
        )

    def place(self, rank):
        """The rank's places on ep and etp."""
        axes = fold_experts(self.order, ep_size=self.ep, etp_size=self.etp)
        return tuple(
            next(tuple(sorted(group)).index(rank) for group in groups if rank in group)
            for groups in (axes.ep, axes.etp)
        )


TOKEN_GRIDS = [(4, 1), (2, 2), (1, 4)]
EXPERT_GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]
ALL_LAYOUTS = [
    Layout(dp, tp, ep, etp, microbatches)
    for (dp, tp), (ep, etp), microbatches in product(TOKEN_GRIDS, EXPERT_GRIDS, (1, 2, 3))
] + [
    Layout(2, 2, 2, 1, 2, order=(0, 2, 1, 3)),
    Layout(2, 2, 1, 2, 1, order=(0, 2, 1, 3)),
]
SOME_LAYOUTS = [
    Layout(4, 1, 4, 1, 2),
    Layout(4, 1, 1, 4, 1),
    Layout(4, 1, 2, 1, 1),
    Layout(2, 2, 2, 2, 1),
    Layout(2, 2, 1, 2, 2, order=(0, 2, 1, 3)),
    Layout(1, 4, 2, 1, 2),
]


def config_for(*, scope="microbatch", router=None, experts=None, **kwargs):
    return MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        router=router or RouterOptions(),
        losses=RouterLosses(moe_aux_loss_scope=scope, **LOSSES),
        experts=ExpertsOptions(**{"experts_implementation": "fused", **(experts or {})}),
        initializer_range=0.4,
        **kwargs,
    )


def whole_layer(config):
    """A layer whose routing is far from balanced: its last expert gets nothing."""
    layer = MoELayer(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)  # biases too
        layer.gate.weight[0, 0] += 2
        layer.gate.weight[-1, 0] -= 50
    return layer


def train_step(layer, inputs, factors, token_ids, *, style="plain"):
    """What comes out of forwards and backwards of all microbatches.

    One backward after all forwards, of the mean of the losses; "1f1b": the backward of a
    microbatch before the next but one forward; "recompute": as plain; "padding": as recompute, with
    places that hold no token.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    call = layer if style in ("plain", "1f1b") else partial(recompute, layer)
    outs, losses = [], []
    for x, f, ids in zip(leaves, factors, token_ids, strict=True):
        kept = tokens_of(ids) if style == "padding" else None
        out = call(x, token_ids_T=ids.reshape(-1), token_idx_N=kept)
        outs.append(out)
        losses.append((out.hidden * f).sum() + (out.aux_loss + out.z_loss) / len(inputs))
        if style == "1f1b" and len(losses) > 1:
            losses[-2].backward()
    aux = sum(out.aux_loss for out in outs) / len(outs)
    if layer.config.losses.moe_aux_loss_scope == "global_batch":
        assert aux.item() == 0
        aux = global_batch_loss([out.balance for out in outs], layer.config, layer.groups)
        losses.append(aux)
    (losses[-1] if style == "1f1b" else sum(losses)).backward()
    z = sum(out.z_loss for out in outs) / len(outs)
    loads = torch.stack([out.load_E for out in outs])
    if layer.config.router.moe_router_enable_expert_bias:
        assert torch.equal(layer.gate.tokens_per_expert, loads.sum(0))
        update_expert_bias([layer.gate])
    return dict(
        hidden=[out.hidden.detach() for out in outs],
        load=loads,
        aux=aux.detach(),
        z=z.detach(),
        grad_x=[x.grad for x in leaves],
        grads={name: p.grad for name, p in layer.named_parameters()},
        bias=layer.gate.state_dict().get("e_score_correction_bias", torch.zeros(())).clone(),
    )


def tokens_of(ids):
    """Places that are no padding: the first and fourth sequence have none; None if all are."""
    ids = ids.reshape(-1)
    is_padding = (ids % 7 == 4) | (ids // LENGTH == 0) | (ids // LENGTH == 3)
    return (~is_padding).nonzero().flatten() if is_padding.any() else None


def data(microbatches):
    """The same sequences, whatever the number of microbatches they come in."""
    generator = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    shape = (SEQUENCES, LENGTH, HIDDEN)
    x, factors = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    x[..., 0] = 1
    ids = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    return [t.chunk(microbatches) for t in (x, factors, ids)]


def expert_slice(name, whole, place, sizes):
    """The part of a whole expert parameter for a place on ep and etp."""
    (ep_rank, etp_rank), (ep, etp) = place, sizes
    part = whole.chunk(ep)[ep_rank]
    if name.startswith("gate_up_proj"):  # slices of the gate, then of the up projection
        return torch.cat([half.chunk(etp, dim=1)[etp_rank] for half in part.chunk(2, dim=1)], 1)
    if name == "down_proj_bias":
        return part
    return part.chunk(etp, dim=2 if name == "down_proj" else 1)[etp_rank]


def load_slices(layer, whole, place, sizes):
    state = {}
    for name, value in whole.state_dict().items():
        owner, _, rest = name.partition(".")
        if owner == "experts":
            value = expert_slice(rest, value, place, sizes)
        if name != "experts.down_proj_bias" or place[1] == 0:  # the first slice alone has it
            state[name] = value
    layer.load_state_dict(state)


def run_layouts(whole, layouts, style):
    """What every layout gives on every rank: list by rank of lists by layout."""
    config = whole.config

    def fn(rank, world_size):
        made = {}

        def make(groups, rank):
            # Every rank makes every group, once, in the same order.
            own = next(tuple(sorted(group)) for group in groups if rank in group)
            return made[own] if len(own) > 1 else None

        pairs = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]
        made.update({ranks: dist.new_group(list(ranks)) for ranks in pairs})
        results = []
        for layout in layouts:
            layer = MoELayer(config, groups=layout.groups(rank, make), dtype=torch.float64)
            load_slices(layer, whole, layout.place(rank), (layout.ep, layout.etp))
            own = [
                [t[layout.own_tokens(rank, len(t))] for t in each]
                for each in data(layout.microbatches)
            ]
            result = train_step(layer, *own, style=style)
            results.append(_map(lambda t: t.numpy(), result))
        return results

    ranks = run_ranks(fn, WORLD, timeout_s=120)
    return _map(torch.as_tensor, ranks)


def _map(function, tree):
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_map(function, value) for value in tree]
    return function(tree)


def check_layout(layout, got, expected):
    close = dict(atol=1e-12, rtol=1e-12)
    for index, hidden in enumerate(expected["hidden"]):
        for rank, result in enumerate(got):
            own = layout.own_tokens(rank, len(hidden))
            assert_close(result["hidden"][index], hidden[own], **close)
            assert_close(result["grad_x"][index], expected["grad_x"][index][own], **close)
    for name in ("aux", "z"):
        assert_close(sum(result[name] for result in got), expected[name], **close)
    for result in got:
        assert torch.equal(result["load"], expected["load"])
        assert torch.equal(result["bias"], expected["bias"])
    for name, grad in expected["grads"].items():
        owner, _, rest = name.partition(".")
        if owner != "experts":
            assert_close(sum(result["grads"][name] for result in got), grad, **close)
            continue
        by_place = {}
        for rank, result in enumerate(got):
            if name in result["grads"]:
                by_place.setdefault(layout.place(rank), []).append(result["grads"][name])
        for place, parts in by_place.items():
            wanted = expert_slice(rest, grad, place, (layout.ep, layout.etp))
            assert_close(sum(parts), wanted, **close)


def check_layouts(config, layouts, *, one_microbatch=False, style="plain"):
    """Compare all layouts with one process that has the same global microbatches, or only one."""
    whole = whole_layer(config)
    wanted = {}
    for microbatches in {1} if one_microbatch else {layout.microbatches for layout in layouts}:
        alone = MoELayer(config, dtype=torch.float64)
        alone.load_state_dict(whole.state_dict())
        alone_style = "padding" if style == "padding" else "plain"
        wanted[microbatches] = train_step(alone, *data(microbatches), style=alone_style)
        if config.router.moe_router_selection == "token_choice":
            assert not wanted[microbatches]["load"][:, -1].any()
    ranks = run_layouts(whole, layouts, style)
    for index, layout in enumerate(layouts):
        got = [results[index] for results in ranks]
        if one_microbatch:
            got, expected = as_one_microbatch(got, wanted[1], layout.microbatches)
        else:
            expected = wanted[layout.microbatches]
        try:
            check_layout(layout, got, expected)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


def as_one_microbatch(got, expected, microbatches):
    """Tokens of the one microbatch as several would give them, and loads of several summed."""
    cut = {name: expected[name][0].chunk(microbatches) for name in ("hidden", "grad_x")}
    return [{**result, "load": result["load"].sum(0, True)} for result in got], {**expected, **cut}


@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_every_layout_gives_the_numbers_of_one_process(seed, implementation):
    experts = {"experts_implementation": implementation}
    layouts = ALL_LAYOUTS if implementation == "fused" else SOME_LAYOUTS
    check_layouts(config_for(experts=experts), layouts)


def test_sequence_scope_is_the_same_in_every_layout_and_number_of_microbatches(seed):
    check_layouts(config_for(scope="sequence"), ALL_LAYOUTS, one_microbatch=True)


def test_global_batch_scope_is_that_of_one_microbatch_in_every_layout(seed):
    check_layouts(config_for(scope="global_batch"), ALL_LAYOUTS, one_microbatch=True)


def test_backwards_between_forwards_change_nothing(seed):
    layouts = [replace(layout, microbatches=3) for layout in SOME_LAYOUTS]
    check_layouts(config_for(), layouts, style="1f1b")


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
def test_padding_counts_nowhere_in_every_layout(seed, scope):
    config = config_for(scope=scope, router=RouterOptions(moe_router_enable_expert_bias=True))
    check_layouts(config, SOME_LAYOUTS, style="padding")


def test_bf16_slices_of_experts_are_close_to_whole_ones(seed):
    config = config_for()
    whole = MoELayer(config, dtype=torch.bfloat16)
    x = torch.randn(40, HIDDEN).bfloat16()

    def fn(rank, world_size):
        groups = MoEGroups(etp=dist.group.WORLD, tokens=dist.group.WORLD)
        layer = MoELayer(config, groups=groups, dtype=torch.bfloat16)
        load_slices(layer, whole, (0, rank), (1, 2))
        own = x[:30] if rank == 0 else x[30:]
        own = own.clone().requires_grad_()
        out = layer(own).hidden
        out.float().square().sum().backward()
        return [t.detach().float().numpy() for t in (out, own.grad)]

    parts = [
        torch.cat([torch.from_numpy(t) for t in each])
        for each in zip(*run_ranks(fn, 2), strict=True)
    ]
    x.requires_grad_()
    out = whole(x).hidden
    out.float().square().sum().backward()
    for got, wanted in zip(parts, (out, x.grad), strict=True):
        assert (got - wanted.float()).norm() < 2e-2 * wanted.float().norm()


SIGMOID = dict(
    moe_router_score_function="sigmoid",
    n_group=4,
    topk_group=2,
    moe_router_group_score="top2_sum",
    routed_scaling_factor=2.5,
)
FAMILIES = {
    "group-limited sigmoid with bias, latent, gated shared expert": dict(
        router=RouterOptions(**SIGMOID, moe_router_enable_expert_bias=True),
        shared_expert=SharedExpertOptions(
            moe_shared_expert_intermediate_size=5, moe_shared_expert_gate=True
        ),
        moe_latent_size=3,
    ),
    "biases and clamps": dict(
        router=RouterOptions(moe_router_pre_softmax=False, moe_router_bias=True),
        experts=dict(has_bias=True, swiglu_limit=0.5),
    ),
    "no gate": dict(experts=dict(has_gate=False, hidden_act="gelu", has_bias=True)),
    "capacity by probability": dict(router=RouterOptions(moe_expert_capacity_factor=0.7)),
    "capacity by position": dict(
        router=RouterOptions(moe_expert_capacity_factor=0.7, moe_token_drop_policy="position"),
        scope="sequence",
    ),
    "expert choice": dict(router=RouterOptions(moe_router_selection="expert_choice")),
    "sinkhorn": dict(router=RouterOptions(moe_router_selection="sinkhorn")),
    "jitter": dict(router=RouterOptions(moe_input_jitter_eps=0.3)),
}


@pytest.fixture(scope="module")
def checkpoint_imported():
    """torch's checkpoint imports much on first use: here, once, and not in each forked rank."""
    recompute(torch.sin, torch.ones(1, requires_grad=True))


@pytest.mark.usefixtures("checkpoint_imported")
@pytest.mark.parametrize("style", ["plain", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_of_the_families_give_the_numbers_of_one_process(seed, family, style):
    check_layouts(config_for(**FAMILIES[family]), SOME_LAYOUTS, style=style)
