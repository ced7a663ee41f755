import pytest
import torch
from torch import Tensor, nn

from moe_pipeline import MoEConfig, MoELayer, chunked_cross_entropy
from moe_pipeline.layer import MoEOutput
from moe_train.model.documents import added_mask, read_documents
from moe_train.model.layer_recompute import Form, LayerRecompute
from moe_train.model.layers import AttentionContext
from moe_train.model.mla import LatentAttention, MLAOptions
from moe_train.model.mtp import MTPLayer, MTPTokens, SharedWeights, mtp_loss, stored_name

VOCABULARY, HIDDEN, EPS = 23, 16, 1e-6
# Two sequences of 9 tokens; documents of 4 and 5 tokens, and one that goes on behind the end.
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
DOCUMENTS = [(0, slice(0, 4), False), (0, slice(4, 9), True), (1, slice(0, 9), True)]


class Block(nn.Module):
    """A decoder layer without norms; depth 2 has no experts."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        options = MLAOptions(
            q_lora_rank=None,
            kv_lora_rank=6,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=4,
            softmax_scale=0.3,
            attention_bias=False,
            rope_interleave=True,
            rms_norm_eps=EPS,
        )
        self.self_attn = LatentAttention(
            options, hidden_size=HIDDEN, num_heads=2, layer=depth, device=None, dtype=torch.float64
        )
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        config = MoEConfig(hidden_size=HIDDEN, **sizes)
        self.mlp = None if depth == 2 else MoELayer(config, dtype=torch.float64)

    def forward(
        self, x: Tensor, context: AttentionContext, cache: None
    ) -> tuple[Tensor, MoEOutput | None]:
        x = x + self.self_attn(x, context, cache)
        if self.mlp is None:
            return x, None
        routed = self.mlp(x)
        return x + routed.hidden, routed


def context_of(positions: Tensor) -> AttentionContext:
    angles = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=torch.float64)
    mask = read_documents(positions).mask(None)
    return AttentionContext(angles.cos(), angles.sin(), mask, added_mask(mask, torch.float32))


def layers_of(depths: int) -> list[MTPLayer]:
    layers = []
    for depth in range(1, depths + 1):
        layer = MTPLayer(
            Block(depth), hidden_size=HIDDEN, rms_norm_eps=EPS, device=None, dtype=torch.float64
        )
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=0.5)
        layers.append(layer)
    return layers


def random_inputs() -> tuple[Tensor, SharedWeights, MTPTokens]:
    tokens = torch.randint(0, VOCABULARY, (2, 10))
    labels = tokens[:, 1:].clone()
    labels[0, 3] = -100  # the next token is another document's
    hidden = torch.randn(2, 9, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64) for _ in range(2)]
    shared = SharedWeights(*(weight.requires_grad_() for weight in weights))
    return hidden, shared, MTPTokens(tokens[:, :-1], labels, POSITIONS)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


def brute_force(
    layers: list[MTPLayer], hidden: Tensor, shared: SharedWeights, tokens: MTPTokens
) -> Tensor:
    """Equations 21 to 25 of the paper, a document and a place at a time; sums, not means."""
    total = hidden.new_zeros(())
    for row, part, goes_on in DOCUMENTS:
        t = tokens.input_ids_BS[row, part].tolist()
        if goes_on:
            t.append(int(tokens.labels_BS[row, -1]))
        h = list(hidden[row, part])
        for k, layer in enumerate(layers, start=1):
            places = range(min(len(h), len(t) - k))
            joined = [
                layer.eh_proj.weight
                @ torch.cat(
                    (
                        norm(shared.embedding_Vd[t[i + k]], layer.enorm.weight),
                        norm(h[i], layer.hnorm.weight),
                    )
                )
                for i in places
            ]
            if not joined:
                break
            context = context_of(torch.arange(len(joined))[None])
            out = layer.mtp_block(torch.stack(joined)[None], context, None)[0][0]
            h = [norm(x, layer.shared_head["norm"].weight) for x in out]
            for i in range(len(t) - k - 1):
                probabilities = torch.softmax(shared.head_Vd @ h[i], dim=0)
                total = total - probabilities[t[i + k + 1]].log()
    return total / len(layers)


@pytest.mark.parametrize("depths", [1, 2, 4])
@pytest.mark.parametrize("form", [None, "layers", "outputs"])
def test_loss_and_gradients_are_those_of_the_papers_equations(
    seed: int, depths: int, form: Form | None
) -> None:
    layers = layers_of(depths)
    hidden, shared, tokens = random_inputs()
    leaves = [hidden, shared.embedding_Vd, shared.head_Vd]
    leaves += [parameter for layer in layers for parameter in layer.parameters()]
    expected = brute_force(layers, hidden, shared, tokens)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True)
    context = context_of(POSITIONS)
    out = mtp_loss(layers, hidden, tokens, shared, context, recompute=LayerRecompute(form=form))
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    out.loss.backward()
    for leaf, gradient in zip(leaves, wanted, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-11)
    assert [routed is not None for routed in out.routed] == [d != 2 for d in range(1, depths + 1)]


def test_another_token_loss_can_be_used(seed: int) -> None:
    layers = layers_of(1)
    hidden, shared, tokens = random_inputs()
    context = context_of(POSITIONS)
    plain = mtp_loss(layers, hidden, tokens, shared, context).loss
    chunked = mtp_loss(
        layers,
        hidden,
        tokens,
        shared,
        context,
        token_loss=lambda h, head, labels: chunked_cross_entropy(
            h.flatten(0, 1), head, labels.flatten()
        ),
    ).loss
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)


def test_labels_lie_in_the_same_document_and_in_the_sequence() -> None:
    tokens = MTPTokens(
        torch.arange(9).expand(2, 9) + torch.tensor([[100], [200]]),
        torch.arange(1, 10).expand(2, 9) + torch.tensor([[100], [200]]),
        POSITIONS,
    )
    ahead, labels = tokens.at_depth(1)
    assert ahead[0, :4].tolist() == [101, 102, 103, 0]  # 104 is of another document
    assert labels[0].tolist() == [102, 103, 104, -100, 106, 107, 108, 109, -100]
    assert ahead[1].tolist() == list(range(201, 210))
    ahead, labels = tokens.at_depth(2)
    assert labels[0].tolist() == [103, 104, -100, -100, 107, 108, 109, -100, -100]
    assert ahead[1, -1] == 0
    ahead, labels = tokens.at_depth(12)
    assert labels.shape == ahead.shape == (2, 9)
    assert (labels == -100).all()


def test_labels_that_the_main_model_ignores_are_ignored_and_their_tokens_seen() -> None:
    labels = torch.tensor([[-100, -100, 13, 14]])
    tokens = MTPTokens(torch.tensor([[10, 11, 12, 13]]), labels, torch.arange(4)[None])
    ahead, shifted = tokens.at_depth(1)
    assert ahead.tolist() == [[11, 12, 13, 14]]
    assert shifted.tolist() == [[-100, 13, 14, -100]]


def test_stored_names_are_deepseeks() -> None:
    layer = layers_of(1)[0]
    names = {stored_name(f"model.layers.61.{name}") for name, _ in layer.named_parameters()}
    assert {
        "model.layers.61.enorm.weight",
        "model.layers.61.hnorm.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.shared_head.norm.weight",
        "model.layers.61.self_attn.o_proj.weight",
        "model.layers.61.mlp.gate.weight",
    } <= names


def test_no_layers_are_refused() -> None:
    hidden, shared, tokens = random_inputs()
    context = context_of(POSITIONS)
    with pytest.raises(ValueError, match="no layers"):
        mtp_loss([], hidden, tokens, shared, context)
