import torch
import torch.nn.functional as F

from moe_train.model.config import Qwen3MoeConfig
from moe_train.model.layers import Attention, KeyValueCache, attention_context, document_mask


def tiny_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        intermediate_size=48,
    )


def make_attention() -> Attention:
    torch.manual_seed(0)
    attention = Attention(tiny_config(), 0, None, torch.float64)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def test_document_mask_is_causal_inside_each_document_only() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    mask = document_mask(positions)
    assert mask is not None
    documents = [[0, 0, 0, 1, 1, 2], [0] * 6]
    for b in range(2):
        for i in range(6):
            for j in range(6):
                allowed = j <= i and documents[b][i] == documents[b][j]
                assert bool(mask[b, 0, i, j]) == allowed, (b, i, j)


def test_sequences_of_one_document_need_no_mask() -> None:
    assert document_mask(torch.arange(5).expand(3, 5)) is None


def test_a_packed_sequence_equals_its_documents_apart() -> None:
    attention = make_attention()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = attention(x, attention_context(positions, 8, 1e4, torch.float64), None)
    for part in (slice(0, 4), slice(4, 9)):
        context = attention_context(positions[:, part], 8, 1e4, torch.float64)
        alone = attention(x[:, part], context, None)
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)


def test_attention_equals_a_loop_over_heads() -> None:
    attention = make_attention()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    context = attention_context(torch.arange(5).expand(2, 5), 8, 1e4, torch.float64)

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


def test_the_cache_gives_what_the_whole_sequence_gives() -> None:
    attention = make_attention()
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    positions = torch.arange(7)[None]
    whole = attention(x, attention_context(positions, 8, 1e4, torch.float64), None)
    cache = KeyValueCache()
    parts = []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7)):
        context = attention_context(positions[:, piece], 8, 1e4, torch.float64)
        parts.append(attention(x[:, piece], context, cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)
