import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig, RouterLosses, RouterOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.layer.router_replay import record_routing, replay_routing
from moe_pipeline.recomputation.recomputing import recompute
from ranktest import run_ranks

HIDDEN, EXPERTS, K = 6, 7, 2


def config_for(**options):
    return MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=4,
        num_experts=options.pop("num_experts", EXPERTS),
        num_experts_per_tok=K,
        router=RouterOptions(**options),
        losses=RouterLosses(router_aux_loss_coef=0.3),
        initializer_range=0.4,
    )


class Model(nn.Module):
    def __init__(self, *configs, dtype=torch.float64):
        super().__init__()
        self.first = nn.ModuleList(MoELayer(each, dtype=dtype) for each in configs[:1])
        self.mlp = MoELayer(configs[-1], dtype=dtype)

    def forward(self, x):
        loss = 0
        for layer in [*self.first, self.mlp]:
            out = layer(x)
            loss = loss + out.aux_loss
            x = x + out.hidden
        return x, loss


def two_layers(**options):
    return Model(config_for(**options), config_for(**options))


def saved_and_loaded(choices):
    buffer = io.BytesIO()
    torch.save(choices, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def grads_of(model, x, with_loss=True):
    hidden, loss = model(x)
    total = hidden.square().sum() + with_loss * loss
    return torch.autograd.grad(total, list(model.parameters()))


def test_a_pass_is_recorded_under_the_names_of_its_layers(seed):
    model = two_layers()
    with record_routing(model) as choices:
        outs = [model.mlp(torch.randn(2, 3, HIDDEN, dtype=torch.float64)) for _ in range(2)]
        assert list(choices) == ["mlp.0", "mlp.1"]
        model(torch.randn(4, HIDDEN, dtype=torch.float64))
    model(torch.randn(4, HIDDEN, dtype=torch.float64))
    shapes = {key: tuple(idx.shape) for key, idx in choices.items()}
    assert shapes == {"mlp.0": (6, K), "mlp.1": (6, K), "first.0.0": (4, K), "mlp.2": (4, K)}
    for number, out in enumerate(outs):
        assert torch.equal(choices[f"mlp.{number}"], out.topk_idx_TK)


def test_a_layer_alone_is_recorded_under_the_number_of_its_call():
    layer = MoELayer(config_for())
    with record_routing(layer) as choices:
        layer(torch.randn(3, HIDDEN))
    assert list(choices) == ["0"]
    with replay_routing(layer, choices):
        assert torch.equal(layer(torch.randn(3, HIDDEN)).topk_idx_TK, choices["0"])


ROUTERS = {
    "softmax": {},
    "softmax of the chosen": dict(moe_router_pre_softmax=False),
    "sigmoid": dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    "capacity": dict(moe_expert_capacity_factor=0.6),
    "sinkhorn": dict(moe_router_selection="sinkhorn", norm_topk_prob=False),
    "expert choice": dict(moe_router_selection="expert_choice"),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_replay_of_the_same_pass_gives_the_same_bits(seed, router):
    model, x = two_layers(**ROUTERS[router]), torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    # What a capacity dropped is no choice any more: the loss of the replay does not count it.
    with_loss = router != "capacity"
    with record_routing(model) as choices:
        expected = grads_of(model, x, with_loss)
    with replay_routing(model, saved_and_loaded(choices)), record_routing(model) as replayed:
        got = grads_of(model, x, with_loss)
    assert all(torch.equal(choices[key], replayed[key]) for key in choices)
    assert len(replayed) == len(choices) == 2
    assert_close(got, expected, atol=0, rtol=0)


def test_another_program_is_given_the_choices_and_learns_by_its_own_weights(seed):
    """The choices are forced, the weights follow from the logits of the one that replays."""
    model, other = two_layers(), two_layers()
    x = torch.randn(8, HIDDEN, dtype=torch.float64)
    with record_routing(model) as choices:
        model(x)
    with record_routing(other) as own:
        other(x)
    with replay_routing(other, choices), record_routing(other) as forced:
        hidden, loss = other(x)
    assert not all(torch.equal(own[key], choices[key]) for key in choices)
    assert all(torch.equal(forced[key], choices[key]) for key in choices)
    (hidden.square().sum() + loss).backward()
    assert all(layer.gate.weight.grad.any() for layer in [*other.first, other.mlp])
    # Oracle for the first layer: each token through the recorded experts, one at a time.
    layer, idx_TK = other.first[0], choices["first.0.0"]
    probs = torch.softmax(x @ layer.gate.weight.t(), dim=1).gather(1, idx_TK)
    weights = probs / probs.sum(1, keepdim=True)
    with replay_routing(layer, {"0": idx_TK}):
        got = layer(x).hidden
    for token in range(8):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token], idx_TK[token], strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            expected = expected + weight * (
                layer.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)
            )
        assert_close(got[token], expected, atol=1e-12, rtol=1e-12)


def test_recompute_is_recorded_and_replayed_once(seed):
    model, x = two_layers(), torch.randn(5, HIDDEN, dtype=torch.float64)
    with record_routing(model) as choices:
        hidden, loss = recompute(model, x)
        (hidden.square().sum() + loss).backward()
    assert sorted(choices) == ["first.0.0", "mlp.0"]
    other = two_layers()
    expected = None
    for way in (lambda model, x: model(x), recompute):
        with replay_routing(other, choices), record_routing(other) as replayed:
            hidden, loss = way(other, x)
            grads = torch.autograd.grad(hidden.square().sum() + loss, list(other.parameters()))
        assert all(torch.equal(replayed[key], choices[key]) for key in choices)
        expected = grads if expected is None else expected
    assert_close(grads, expected, atol=0, rtol=0)


def test_zero_tokens_are_recorded_and_replayed():
    model, x = two_layers(), torch.empty(0, HIDDEN, dtype=torch.float64)
    with record_routing(model) as choices:
        model(x)
    assert {tuple(idx.shape) for idx in choices.values()} == {(0, K)}
    with replay_routing(model, saved_and_loaded(choices)):
        hidden, _ = model(x)
    assert hidden.shape == x.shape


def test_choices_may_be_dropped_ones(seed):
    layer, x = MoELayer(config_for(), dtype=torch.float64), torch.randn(3, HIDDEN).double()
    with replay_routing(layer, {"0": torch.full((3, K), -1)}):
        out = layer(x)
    assert not out.hidden.any()
    assert not out.load_E.any()


def test_after_the_context_layers_choose_by_themselves(seed):
    model, x = two_layers(), torch.randn(6, HIDDEN, dtype=torch.float64)
    with record_routing(model) as choices:
        expected, _ = model(x)
    forced = {key: torch.zeros_like(idx) + torch.arange(K) for key, idx in choices.items()}
    with pytest.raises(KeyError, match="of the caller"), replay_routing(model, forced):
        assert not torch.equal(model(x)[0], expected)
        raise KeyError("of the caller")
    assert torch.equal(model(x)[0], expected)
    assert len(choices) == 2


def test_a_record_of_other_layers_is_refused():
    model = two_layers()
    good = {"first.0.0": torch.zeros(3, K, dtype=torch.int64)}
    good["mlp.0"] = good["first.0.0"].clone()
    with (
        pytest.raises(ValueError, match=r"Linear has no MoELayer"),
        record_routing(nn.Linear(1, 1)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"lacks 'mlp.0', the first call of MoE layer 'mlp'"),
        replay_routing(model, {"first.0.0": good["first.0.0"]}),
    ):
        pass
    for extra in ("mlp.2", "mlp", "head.0", "mlp.x"):
        with (
            pytest.raises(ValueError, match=rf"the record has \['{extra}'\].*'first.0', 'mlp'"),
            replay_routing(model, {**good, extra: good["mlp.0"]}),
        ):
            pass


@pytest.mark.parametrize(
    ("choices", "error", "match"),
    [
        (torch.zeros(3, K), TypeError, r"'mlp.0' is torch.float32; choices are an int64"),
        ([[0, 1]], TypeError, r"'mlp.0' is list; choices are an int64"),
        (torch.zeros(3, K + 1, dtype=torch.int64), ValueError, r"\(3, 3\); .*\[tokens, 2\]"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"shape \(3,\); .*\[tokens, 2\]"),
        (torch.full((3, K), EXPERTS), ValueError, r"from 7 to 7; .*num_experts=7, so give 0 to 6"),
        (torch.full((3, K), -2), ValueError, r"from -2 to -2"),
    ],
)
def test_choices_that_do_not_fit_the_layer_are_refused(choices, error, match):
    model = two_layers()
    recorded = {"first.0.0": torch.zeros(3, K, dtype=torch.int64), "mlp.0": choices}
    with pytest.raises(error, match=match), replay_routing(model, recorded):
        pass


def test_calls_that_do_not_fit_the_record_are_refused(seed):
    layer, x = MoELayer(config_for()), torch.randn(3, HIDDEN)
    with record_routing(layer) as choices:
        layer(x)
        layer(x)
    with (
        pytest.raises(ValueError, match=r"'1' has choices of 3 tokens, but the layer got 4"),
        replay_routing(layer, choices),
    ):
        layer(x)
        layer(torch.randn(2, 2, HIDDEN))
    with (
        pytest.raises(ValueError, match=r"call 3 of the MoE layer, but its record has 2"),
        replay_routing(layer, choices),
    ):
        for _ in range(3):
            layer(x)
    with (
        pytest.raises(ValueError, match=r"the MoE layer was called 1 times, but its record has 2"),
        replay_routing(layer, choices),
    ):
        layer(x)
    assert torch.equal(layer(x).topk_idx_TK, choices["0"])


def test_choices_of_one_process_are_replayed_by_ranks_that_share_experts(seed):
    config = config_for(num_experts=8)
    whole = MoELayer(config, dtype=torch.float64)
    sizes = [3, 0]
    x = torch.randn(sum(sizes), HIDDEN, dtype=torch.float64)
    with record_routing(whole) as choices:
        whole(x)
    other = torch.randn_like(x)
    with replay_routing(whole, choices):
        expected = whole(other)

    def fn(rank, world_size):
        world = torch.distributed.group.WORLD
        layer = MoELayer(config, groups=MoEGroups(ep=world, tokens=world), dtype=torch.float64)
        mine = slice(rank * 4, rank * 4 + 4)
        with torch.no_grad():
            layer.gate.weight.copy_(whole.gate.weight)
            layer.experts.gate_up_proj.copy_(whole.experts.gate_up_proj[mine])
            layer.experts.down_proj.copy_(whole.experts.down_proj[mine])
        own = {"0": choices["0"].split(sizes)[rank]}
        with replay_routing(layer, own):
            out = layer(other.split(sizes)[rank])
        return out.hidden.tolist(), out.load_E.tolist()

    (hidden, load), (none, same_load) = run_ranks(fn, 2)
    assert none == []
    assert_close(torch.tensor(hidden, dtype=torch.float64), expected.hidden, atol=1e-12, rtol=0)
    assert load == same_load == expected.load_E.tolist()
