import pytest
import torch
import torch.distributed as dist

from comm_collectives import all_reduce
from moe_pipeline.config import MoEConfig, RouterOptions
from moe_pipeline.router.expert_bias import update_expert_bias
from moe_pipeline.router.top_k import TopKRouter
from ranktest import run_ranks


def make(experts=4, rate=0.25, bias=True, dtype=None):
    config = MoEConfig(
        hidden_size=6,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=2,
        router=RouterOptions(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=bias,
            moe_router_bias_update_rate=rate,
        ),
        initializer_range=0.5,
    )
    return TopKRouter(config, dtype=dtype)


def test_bias_follows_the_sign_of_the_missing_load_and_counts_restart():
    router, other = make(), make()
    router.count(torch.tensor([3, 1, 2, 0]))
    router.count(torch.tensor([3, 0, 0, 3]))
    update_expert_bias([router, other])
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0.25, 0.0]
    assert router.tokens_per_expert.tolist() == [0] * 4
    assert other.e_score_correction_bias.tolist() == [0.0] * 4
    router.count(torch.tensor([0, 1, 0, 0]))
    update_expert_bias(iter([router]))
    assert router.e_score_correction_bias.tolist() == [0.0, 0.0, 0.5, 0.25]


def test_loads_of_one_row_apart_are_told_apart():
    router, load = make(rate=1.0), 10**15
    router.count(torch.tensor([load, load + 1, load - 1, load]))
    update_expert_bias([router])
    assert router.e_score_correction_bias.tolist() == [0.0, -1.0, 1.0, 0.0]


def test_updates_balance_the_load(seed):
    router, x = make(experts=8, rate=0.01), torch.randn(512, 6)
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(-2, 2, 8)
        x[:, 0] = 1
    loads = []
    for _ in range(300):
        loads.append(router(x).plan.counts_E)
        router.count(loads[-1])
        update_expert_bias([router])
    mean = 512 * 2 / 8
    # The bias keeps stepping to and fro, so single steps are not even.
    late = torch.stack(loads[-100:]).double().mean(0)
    assert loads[0].max() > 1.5 * mean
    assert late.max() < 1.1 * mean
    assert late.min() > 0.9 * mean


def test_ranks_with_the_global_load_make_the_update_of_one_process(seed):
    router, x = make(experts=6, dtype=torch.float64), torch.randn(40, 6, dtype=torch.float64)
    router.count(router(x).plan.counts_E)
    state = router.state_dict()
    update_expert_bias([router])
    expected = router.e_score_correction_bias.tolist()

    def fn(rank, world_size):
        own = make(experts=6, dtype=torch.float64)
        own.load_state_dict({**state, "e_score_correction_bias": torch.zeros(6)})
        own_x = x.split([7, 0, 33])[rank]
        own.count(all_reduce(own(own_x).plan.counts_E, group=dist.group.WORLD))
        update_expert_bias([own])
        return own.e_score_correction_bias.tolist()

    assert run_ranks(fn, 3) == [expected] * 3


def test_routers_whose_bias_cannot_be_updated_are_refused_before_any_update():
    good = make()
    good.count(torch.tensor([1, 0, 0, 0]))
    with pytest.raises(ValueError, match="moe_router_enable_expert_bias=True"):
        update_expert_bias([good, make(bias=False)])
    with pytest.raises(TypeError, match=r"build the layer with dtype=torch\.bfloat16"):
        update_expert_bias([good, make().bfloat16()])
    assert good.e_score_correction_bias.tolist() == [0.0] * 4
    update_expert_bias([make(dtype=torch.bfloat16)])


@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_a_router_that_was_made_on_meta_counts_after_its_state_was_loaded(way):
    options = RouterOptions(moe_router_enable_expert_bias=True)
    config = MoEConfig(
        hidden_size=4,
        moe_intermediate_size=4,
        num_experts=3,
        num_experts_per_tok=1,
        router=options,
    )
    state = TopKRouter(config).state_dict()
    router = TopKRouter(config, device="meta")
    if way == "to_empty":
        router.to_empty(device="cpu")
        router.tokens_per_expert.fill_(1 << 40)  # whatever lay there
    router.load_state_dict(state, assign=way == "assign")
    assert router.tokens_per_expert.tolist() == [0, 0, 0]
    router.count(torch.tensor([5, 1, 0]))
    update_expert_bias([router])
    rate = options.moe_router_bias_update_rate
    assert router.e_score_correction_bias.tolist() == pytest.approx([-rate, rate, rate])
