"""Every way of the tokens gives what the direct one gives: hidden states, gradients, counters."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from comm_collectives import MoeOptions
from moe_pipeline.config import MoEConfig, RouterLosses, SharedExpertOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.layer.token_dispatch import TOGETHER, DispatchOptions
from moe_pipeline.recomputation import recompute
from ranktest import run_ranks

SEED = random.randrange(2**32)
CONFIG = MoEConfig(
    hidden_size=12,
    moe_intermediate_size=5,
    num_experts=8,
    num_experts_per_tok=3,
    losses=RouterLosses(router_aux_loss_coef=0.3),
    shared_expert=SharedExpertOptions(
        moe_shared_expert_intermediate_size=7, moe_shared_expert_gate=True
    ),
    initializer_range=0.4,
)
WAYS = {
    "dedup": DispatchOptions(transport=MoeOptions(route="dedup")),
    "hierarchical": DispatchOptions(transport=MoeOptions(route="hierarchical", ranks_per_node=2)),
    "shared expert beside": DispatchOptions(overlaps_shared_expert=True),
    "chunks": DispatchOptions(num_chunks=2),
    "more chunks than tokens": DispatchOptions(transport=MoeOptions(route="dedup"), num_chunks=9),
}


def run_once(groups, dispatch, tokens, *, again, config=CONFIG):
    layer = MoELayer(config, groups=groups, dispatch=dispatch, dtype=torch.float64)
    with torch.no_grad():
        for number, (name, weight) in enumerate(layer.named_parameters()):
            is_expert = name.startswith("experts.")
            first = 8 if is_expert else weight.shape[0]
            draw = torch.Generator().manual_seed(number)
            whole = 0.4 * torch.randn(first, *weight.shape[1:], dtype=torch.float64, generator=draw)
            at = 0
            if is_expert and groups.ep:
                rank = dist.get_rank(groups.ep)
                at = sum(groups.ep_parts[:rank]) if groups.ep_parts else rank * len(weight)
            weight.copy_(whole[at : at + len(weight)])
    x = torch.randn(
        tokens, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens)
    )
    x.requires_grad_()
    out = recompute(layer, x) if again else layer(x)
    ((out.hidden**2).sum() + out.aux_loss).backward()
    found = {"hidden": out.hidden.detach(), "x": x.grad, "load": out.load_E}
    return found | {name: p.grad for name, p in layer.named_parameters()}


def whole_experts(found):
    """What a rank found, with the gradients of all ranks' experts."""
    told = [None] * dist.get_world_size()
    own = {name: grad for name, grad in found.items() if name.startswith("experts.")}
    dist.all_gather_object(told, own)
    return found | {name: torch.cat([each[name] for each in told]) for name in own}


def test_every_way_gives_the_numbers_of_the_direct_one_also_in_a_recompute() -> None:
    def run(rank, _):
        groups = MoEGroups(ep=dist.group.WORLD, tokens=dist.group.WORLD)
        for again in (False, True):
            want = run_once(groups, TOGETHER, rank * 2, again=again)
            for name, way in WAYS.items():
                got = run_once(groups, way, rank * 2, again=again)
                for key, value in want.items():
                    assert_close(got[key], value, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}")
        want, chance = whole_experts(want), random.Random(SEED)
        some_parts = [random_parts(chance, 8, 4), *[(3, 0, 4, 1)] * len(WAYS)]
        for parts, (name, way) in zip(
            some_parts, [("direct", TOGETHER), *WAYS.items()], strict=True
        ):
            uneven = replace(groups, ep_parts=parts)
            found = whole_experts(run_once(uneven, way, rank * 2, again=True))
            for key, value in want.items():
                case = f"seed {SEED}, {parts}, {name}, {key}"
                assert_close(found[key], value, msg=lambda m, c=case: f"{c}: {m}")

    run_ranks(run, 4, timeout_s=240)


def random_parts(chance: random.Random, total: int, ranks: int) -> tuple[int, ...]:
    cuts = sorted(chance.choices(range(total + 1), k=ranks - 1))
    ends = zip([0, *cuts], [*cuts, total], strict=True)
    return tuple(end - first for first, end in ends)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ep_parts=\(3, 4\) for 1 ranks of ep"):
        MoEGroups(ep_parts=(3, 4))
    with pytest.raises(TypeError, match=r"give a tuple of integers"):
        MoEGroups(ep_parts=[8])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ep_parts=\(7,\) are 7 experts, but num_experts=8"):
        MoELayer(CONFIG, groups=MoEGroups(ep_parts=(7,)))
    MoELayer(CONFIG, groups=MoEGroups(ep_parts=(8,)))


def test_a_rounded_payload_gives_one_rank_what_it_gives_many() -> None:
    way = DispatchOptions(transport=MoeOptions(payload="float8_e4m3"))
    rows = 5

    def run(rank, _):
        groups = MoEGroups(ep=dist.group.WORLD, tokens=dist.group.WORLD)
        got = run_once(groups, way, rows, again=False)
        want = run_once(MoEGroups(), way, rows, again=False)
        plain = run_once(groups, TOGETHER, rows, again=False)
        assert_close(got["hidden"], want["hidden"])
        assert not torch.equal(got["hidden"], plain["hidden"])

    run_ranks(run, 2)


def test_a_layer_alone_takes_every_way_for_nothing_travels() -> None:
    want = run_once(MoEGroups(), TOGETHER, 6, again=False)
    for name, way in WAYS.items():
        got = run_once(MoEGroups(), way, 6, again=False)
        assert torch.equal(got["hidden"], want["hidden"]), name


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of them"):
        DispatchOptions(num_chunks=2, overlaps_shared_expert=True)
    with pytest.raises(ValueError, match="num_chunks must be at least 1"):
        DispatchOptions(num_chunks=0)
    with pytest.raises(ValueError, match="given by the layer"):
        DispatchOptions(transport=MoeOptions(timeout_s=3.0))
    with pytest.raises(TypeError, match="transport must be a MoeOptions"):
        DispatchOptions(transport="dedup")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="overlaps_shared_expert must be a bool, got a str"):
        DispatchOptions(overlaps_shared_expert="false")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no shared expert"):
        MoELayer(
            replace(CONFIG, shared_expert=None),
            dispatch=DispatchOptions(overlaps_shared_expert=True),
        )
