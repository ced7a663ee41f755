from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe_train.model.documents import read_documents
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layers import (
    Attention,
    AttentionContext,
    AttentionOptions,
    attention_contexts,
    explicit_attention,
    weight_dropout,
)
from moe_train.model.rotary import RotaryOptions
from moe_train.model.token_numbers import TokenNoise

OPTIONS = AttentionOptions(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="head")
ROTARY = RotaryOptions(dim=8, theta=1e4)


def make_attention(**changes: object) -> Attention:
    torch.manual_seed(0)
    options = replace(OPTIONS, **changes)  # type: ignore[arg-type]
    attention = Attention(options, hidden_size=32, layer=0, device=None, dtype=torch.float64)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def context_of(
    positions: torch.Tensor, *, window: int | None = None, cache: KeyValueCache | None = None
) -> AttentionContext:
    contexts = attention_contexts(positions, ROTARY, torch.float64, windows={window}, cache=cache)
    return contexts[window]


def test_a_packed_sequence_equals_its_documents_apart() -> None:
    attention = make_attention()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = attention(x, context_of(positions), None)
    for part in (slice(0, 4), slice(4, 9)):
        context = context_of(positions[:, part])
        alone = attention(x[:, part], context, None)
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)


def test_attention_equals_a_loop_over_heads() -> None:
    attention = make_attention()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    context = context_of(torch.arange(5).expand(2, 5))

    def rotated(t: torch.Tensor) -> torch.Tensor:
        # Each pair (i, i + half) turns by position * theta^(-i / half): complex multiplication.
        angle = torch.arange(5)[:, None] / 1e4 ** (torch.arange(4) / 4.0)
        turned = torch.complex(t[..., :4], t[..., 4:]) * torch.exp(1j * angle.double())
        return torch.cat((turned.real, turned.imag), dim=-1)

    outputs = []
    for head in range(4):
        q = attention.q_norm(attention.q_proj(x)[..., head * 8 : head * 8 + 8])
        kv = head // 2
        k = attention.k_norm(attention.k_proj(x)[..., kv * 8 : kv * 8 + 8])
        v = attention.v_proj(x)[..., kv * 8 : kv * 8 + 8]
        scores = rotated(q) @ rotated(k).transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        outputs.append(F.softmax(scores, dim=-1) @ v)
    expected = attention.o_proj(torch.cat(outputs, dim=-1))
    torch.testing.assert_close(attention(x, context, None), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_cache_gives_what_the_whole_sequence_gives(window: int | None, has_sinks: bool) -> None:
    attention = make_attention(has_sinks=has_sinks)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    positions = torch.arange(9)[None]
    context = context_of(positions, window=window)
    whole = attention(x, context, None)
    cache = KeyValueCache()
    parts = []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 8), slice(8, 9)):
        context = context_of(positions[:, piece], window=window, cache=cache)
        parts.append(attention(x[:, piece], context, cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)


def test_sinks_take_a_part_of_every_softmax() -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64)
    for mask in (None, read_documents(torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])).mask(2)):
        out = explicit_attention(q, k, v, mask, sinks_H=sinks)
        for b in range(2):
            for head in range(4):
                for i in range(5):
                    allowed = [j for j in range(i + 1) if mask is None or bool(mask[b, 0, i, j])]
                    scores = torch.stack([q[b, head, i] @ k[b, head // 2, j] for j in allowed])
                    weights = torch.cat((scores / 8**0.5, sinks[head : head + 1])).softmax(0)
                    expected = sum(
                        w * v[b, head // 2, j] for w, j in zip(weights[:-1], allowed, strict=True)
                    )
                    torch.testing.assert_close(out[b, head, i], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "none", "qkv_bias": True},
        {"qk_norm": "projection", "clip_qkv": 0.2},
        {"o_bias": True, "has_sinks": True, "num_kv_heads": 4},
        {"rope_interleaved": True, "num_kv_heads": 1},
    ],
)
def test_every_variant_keeps_packed_documents_apart(changes: dict[str, object]) -> None:
    attention = make_attention(**changes)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = attention(x, context_of(positions), None)
    for part in (slice(0, 4), slice(4, 9)):
        alone = attention(x[:, part], context_of(positions[:, part]), None)
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)


def test_heads_that_do_not_divide_and_unknown_norms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads=4 .*num_key_value_heads=3"):
        replace(OPTIONS, num_kv_heads=3)
    with pytest.raises(ValueError, match="qk_norm='layer'"):
        replace(OPTIONS, qk_norm="layer")


@pytest.mark.parametrize("has_sinks", [False, True])
def test_dropout_drops_its_share_of_attention_weights_and_keeps_their_mean(has_sinks: bool) -> None:
    attention = make_attention(has_sinks=has_sinks, dropout=0.3)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    exact = attention.eval()(x, context_of(positions), None)
    attention.train()

    def dropped(step: int) -> torch.Tensor:
        ids = torch.arange(9)[None] + 9 * step
        return attention(x, replace(context_of(positions), noise=TokenNoise(0, ids)), None)

    outs = torch.stack([dropped(step) for step in range(800)])
    assert torch.equal(outs[0], dropped(0)) and not torch.equal(outs[0], outs[1])
    error = (outs.mean(0) - exact) / (outs.std(0) / 800**0.5)
    assert error.abs().max() < 5, "the mean over many draws is not the value without dropout"
    with pytest.raises(ValueError, match="give the context noise"):
        attention(x, context_of(positions), None)


def test_the_share_that_is_dropped_is_that_of_the_option() -> None:
    noise = TokenNoise(0, torch.arange(50)[None])
    context = replace(context_of(torch.arange(50)[None]), noise=noise)
    drop = weight_dropout(0.3, 7, context)
    assert drop is not None and weight_dropout(0.0, 7, context) is None
    weights = drop(torch.ones(1, 2, 3, 50, 50))
    assert weights.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs(float((weights == 0).float().mean()) - 0.3) < 5 * (0.21 / weights.numel()) ** 0.5
    heads = weights.flatten(0, 2)
    assert not any(torch.equal(heads[0], head) for head in heads[1:]), "heads drop alike"
