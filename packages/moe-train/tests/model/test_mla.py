import math

import pytest
import torch
from torch import Tensor

from moe_train.model.documents import added_mask, read_documents
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layers import AttentionContext
from moe_train.model.mla import LatentAttention, MLAOptions

HIDDEN, HEADS, LATENT, NOPE, ROPE, VALUE = 12, 3, 7, 4, 4, 5
VALUES: dict[str, object] = {
    "q_lora_rank": 6,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "softmax_scale": 0.4,
    "attention_bias": False,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,
}


def attention_of(**changes: object) -> LatentAttention:
    options = MLAOptions(**{**VALUES, **changes})  # type: ignore[arg-type]
    attention = LatentAttention(
        options, hidden_size=HIDDEN, num_heads=HEADS, layer=0, device=None, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.6)
    return attention


def context_of(positions: Tensor, width: int = ROPE) -> AttentionContext:
    angles = positions[..., None] * torch.tensor([1.0, 0.3], dtype=torch.float64)[: width // 2]
    angles = torch.cat((angles, angles), dim=-1)
    mask = read_documents(positions).mask(None)
    return AttentionContext(angles.cos(), angles.sin(), mask, added_mask(mask, torch.float32))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Each pair of neighbours as a complex number, times e^(i angle)."""
    angles = position * torch.tensor([1.0, 0.3], dtype=torch.float64)
    pairs = torch.view_as_complex(x.clone().view(-1, 2)) * torch.polar(
        torch.ones(2).double(), angles
    )
    return torch.view_as_real(pairs).flatten()


def by_the_paper(attention: LatentAttention, x: Tensor) -> Tensor:
    """DeepSeek-V2, section 2.1: one sequence, a head and a pair of places at a time."""
    queries, keys, values = [], [], []
    for position, token in enumerate(x):
        q = attention.q_b_proj.weight @ norm(
            attention.q_a_proj.weight @ token, attention.q_a_layernorm.weight
        )
        joint = attention.kv_a_proj_with_mqa.weight @ token
        latent = norm(joint[:LATENT], attention.kv_a_layernorm.weight)
        up = (attention.kv_b_proj.weight @ latent).view(HEADS, NOPE + VALUE)
        shared_key = turned(joint[LATENT:], position)
        queries.append(
            [torch.cat((h[:NOPE], turned(h[NOPE:], position))) for h in q.view(HEADS, -1)]
        )
        keys.append([torch.cat((h[:NOPE], shared_key)) for h in up])
        values.append([h[NOPE:] for h in up])
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(HEADS):
            scores = torch.stack([0.4 * queries[i][h] @ keys[j][h] for j in range(i + 1)])
            weights = scores.softmax(0)
            heads.append(sum(weights[j] * values[j][h] for j in range(i + 1)))
        rows.append(attention.o_proj.weight @ torch.cat(heads))
    return torch.stack(rows)


def test_it_is_the_papers_attention(seed: int) -> None:
    attention, x = attention_of(), torch.randn(1, 5, HIDDEN, dtype=torch.float64)
    got = attention(x, context_of(torch.arange(5)[None]), None)
    torch.testing.assert_close(got[0], by_the_paper(attention, x[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_packed_sequence_equals_its_documents_apart(seed: int, interleaved: bool) -> None:
    attention = attention_of(rope_interleave=interleaved, q_lora_rank=None, attention_bias=True)
    x = torch.randn(1, 8, HIDDEN, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    packed = attention(x, context_of(positions), None)
    for part in (slice(0, 3), slice(3, 8)):
        alone = attention(x[:, part], context_of(positions[:, part]), None)
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)


def test_the_cache_holds_one_latent_and_one_rotary_key_per_token(seed: int) -> None:
    attention, cache = attention_of(), KeyValueCache()
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    positions = torch.arange(6).expand(2, 6)
    whole = attention(x, context_of(positions), None)
    parts = [
        attention(x[:, part], context_of(positions[:, part]), cache)
        for part in (slice(0, 3), slice(3, 4), slice(4, 6))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    latent, key = cache.extend(0, torch.zeros(2, 1, 0, LATENT), torch.zeros(2, 1, 0, ROPE))
    assert latent.shape == (2, 1, 6, LATENT)
    assert key.shape == (2, 1, 6, ROPE)


def test_no_tokens_are_fine() -> None:
    attention = attention_of()
    out = attention(torch.empty(0, 4, HIDDEN).double(), context_of(torch.arange(4)[None]), None)
    assert out.shape == (0, 4, HIDDEN)


def test_rotary_tables_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="width 2 but qk_rope_head_dim=4"):
        attention_of()(
            torch.randn(1, 3, HIDDEN).double(), context_of(torch.arange(3)[None], 2), None
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_lora_rank", 0),
        ("q_lora_rank", -1),
        ("v_head_dim", 2.5),
        ("qk_rope_head_dim", 3),
        ("softmax_scale", 0.0),
        ("rms_norm_eps", math.nan),
    ],
)
def test_impossible_sizes_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        MLAOptions(**{**VALUES, name: value})  # type: ignore[arg-type]
