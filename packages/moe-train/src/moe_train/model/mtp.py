"""Multi-token prediction: extra decoder layers that predict the token after the next one.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). At depth k = 1 .. D, with h^0 the main model's hidden
states behind its final norm, for every position i of a document:

    h'_i = eh_proj [ enorm(Emb(t_{i+k})) ; hnorm(h^{k-1}_i) ]      (eq. 21)
    h^k  = shared_head.norm(block_k(h'))                           (eq. 22)
    p_i  = softmax(head h^k_i), which predicts t_{i+k+1}           (eq. 23)

and the loss is `mtp_loss_coef / D * sum_k mean_i -log p_i[t_{i+k+1}]` (eq. 24 and 25), the mean
over the tokens that the main model predicts. Embedding and head are those of the main model. The
paper writes [h ; Emb]; the published weights, and so this file, have the embedding first.

**The embedding** of the shared tokens is needed on the last stage. With one stage it is there. With
several the last stage holds a copy under the same name, `model.embed_tokens.weight`: it is drawn
and stored under the same key, and the gradients of both copies are summed over the ranks of the
first and of the last stage (`Parallel.embedding_group`), so that both take the same updates.

Stored keys are DeepSeek's: `model.layers.{N}.enorm.weight`, `.hnorm`, `.eh_proj`,
`.shared_head.norm`, and the decoder layer's own (`model.layers.{N}.self_attn...`) with N from
num_hidden_layers on. In the module the decoder layer is `mtp_block`, as in transformers'
`MtpLayer`; `stored_name` leaves that word out. Published checkpoints repeat the shared weights as
`model.layers.{N}.embed_tokens.weight` and `.shared_head.head.weight`; they are not read.

    layer = MTPLayer(decoder_layer, hidden_size=64, rms_norm_eps=1e-6, device=None, dtype=...)
    tokens = MTPTokens(input_ids_BS, labels_BS, position_ids_BS)
    out = mtp_loss([layer], normed_BSd, tokens, SharedWeights(embed.weight, head), context)
    loss = main_loss + mtp_loss_coef * scale * out.loss

Shape legend: B sequences, S positions, d hidden size, V vocabulary, T = B * S.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline.layer import MoEOutput
from moe_train.errors import TrainValueError
from moe_train.labels import IGNORED_LABEL
from moe_train.model.layer_recompute import KEEP_ALL, LayerRecompute
from moe_train.model.layers import AttentionContext
from moe_train.model.loss import head_loss
from moe_train.model.norm import RMSNorm
from moe_train.model.parallel import WHOLE, PositionCut

_BLOCK = ".mtp_block."


@final
class MTPLayer(nn.Module):
    """The layer of one depth: two norms, a projection, a decoder layer and the head's norm.

    Args:
        block: the decoder layer, called as `block(x_BSd, context, None)`; returns the new hidden
            states, and what its experts reported or None.
        hidden_size: width of a token.
        rms_norm_eps: of the three norms.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        block: nn.Module,
        *,
        hidden_size: int,
        rms_norm_eps: float,
        device: torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.enorm = RMSNorm(hidden_size, rms_norm_eps, device, dtype)
        self.hnorm = RMSNorm(hidden_size, rms_norm_eps, device, dtype)
        self.eh_proj = nn.Linear(
            2 * hidden_size, hidden_size, bias=False, device=device, dtype=dtype
        )
        self.mtp_block = block
        norm = RMSNorm(hidden_size, rms_norm_eps, device, dtype)
        self.shared_head = nn.ModuleDict({"norm": norm})

    def forward(
        self, hidden_BSd: Tensor, embedded_BSd: Tensor, context: AttentionContext
    ) -> tuple[Tensor, MoEOutput | None]:
        """Hidden states for the head and the next depth, and what the experts reported.

        Collective as the decoder layer is.

        Args:
            hidden_BSd: normed hidden states of the depth before; 0: of the main model.
            embedded_BSd: embeddings of the tokens k places ahead.
            context: rotary tables and mask of the main model. The shift by k places does not
                matter, because rotary scores depend on differences of positions alone.
        """
        both = torch.cat((self.enorm(embedded_BSd), self.hnorm(hidden_BSd)), dim=-1)
        out_BSd, routed = self.mtp_block(self.eh_proj(both), context, None)
        return self.shared_head["norm"](out_BSd), routed


@dataclass(frozen=True, slots=True)
class MTPTokens:
    """The tokens of a microbatch as the last stage knows them, int64 [B, S] each.

    `labels_BS` are the main model's: the next token of each place, or -100. Positions start again
    at 0 with each document. `cut`: whose tokens embedding and loss see.
    """

    input_ids_BS: Tensor
    labels_BS: Tensor
    position_ids_BS: Tensor
    cut: PositionCut = WHOLE

    def at_depth(self, depth: int) -> tuple[Tensor, Tensor]:
        """For the places of `cut` the tokens `depth` places ahead, and the labels that follow.

        A label is -100 where it lies behind the end of the sequence or in another document, or is
        ignored by the main model. Where its document has no token ahead the id is 0, whatever
        stands there: nothing that counts attends to such a place, and experts get the same row of
        it however documents are packed.
        """
        length = self.labels_BS.shape[1]
        positions = F.pad(self.position_ids_BS[:, depth:], (0, depth), value=-1)[:, :length]
        same_document = positions == self.position_ids_BS + depth
        same_document &= self.position_ids_BS >= 0
        ahead_BS = F.pad(self.input_ids_BS[:, depth:], (0, depth))[:, :length]
        ahead_BS = ahead_BS.masked_fill(~same_document, 0)
        if depth <= length:  # the last label is the first token behind the row
            ahead_BS[:, length - depth] = self.labels_BS[:, -1].clamp(min=0)
        labels_BS = F.pad(self.labels_BS[:, depth:], (0, depth), value=IGNORED_LABEL)[:, :length]
        labels_BS = labels_BS.masked_fill(~same_document, IGNORED_LABEL)
        return self.cut.take(ahead_BS), self.cut.take(labels_BS)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The main model's embedding and head, both [V, d] or some rows of that.

    `embed`: `(ids_BS, embedding_Vd)` to the embeddings at this rank's positions.
    """

    embedding_Vd: Tensor
    head_Vd: Tensor
    embed: Callable[[Tensor, Tensor], Tensor] = F.embedding


class MTPOutput(NamedTuple):
    """The cross entropies summed over tokens, averaged over depths, without coefficient; and what
    the experts of each depth reported, None for a dense layer.
    """

    loss: Tensor
    routed: list[MoEOutput | None]


def mtp_loss(
    layers: Sequence[MTPLayer],
    hidden_BSd: Tensor,
    tokens: MTPTokens,
    shared: SharedWeights,
    context: AttentionContext,
    *,
    token_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    recompute: LayerRecompute = KEEP_ALL,
) -> MTPOutput:
    """The loss of all depths; its gradient reaches the main model, the embedding and the head.

    Collective as the decoder layers are.

    Args:
        layers: of depth 1, 2, ...; at least one.
        hidden_BSd: the main model's hidden states behind its final norm.
        tokens: of this microbatch.
        shared: embedding and head.
        context: of the main model's layers.
        token_loss: `(hidden_BSd, head_Vd, labels_BS)` to a sum of cross entropies without the
            labels of -100; None: `head_loss` of all of them.
        recompute: what each depth keeps for its backward.

    Raises:
        ValueError: no layers.
    """
    if not layers:
        raise TrainValueError(
            "mtp_loss got no layers; leave it out when num_nextn_predict_layers=0"
        )
    losses, reports = [], []
    for depth, layer in enumerate(layers, start=1):
        ahead_BS, labels_BS = tokens.at_depth(depth)
        embedded_BSd = shared.embed(ahead_BS, shared.embedding_Vd)
        hidden_BSd, routed = recompute(layer, hidden_BSd, embedded_BSd, context)
        losses.append((token_loss or _head_loss)(hidden_BSd, shared.head_Vd, labels_BS))
        reports.append(routed)
    return MTPOutput(torch.stack(losses).mean(), reports)


def _head_loss(hidden_BSd: Tensor, head_Vd: Tensor, labels_BS: Tensor) -> Tensor:
    return head_loss(hidden_BSd.flatten(0, 1), head_Vd, labels_BS.flatten())


def stored_name(name: str) -> str:
    """The name under which a parameter of an `MTPLayer` is stored: without `mtp_block`."""
    return name.replace(_BLOCK, ".")
