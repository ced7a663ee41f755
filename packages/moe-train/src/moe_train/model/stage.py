"""One pipeline stage of the decoder: the unit that the executor drives.

The first stage takes `(input_ids, position_ids)`, every other `(hidden, position_ids)`; the last
turns hidden states into the loss. Parameter names are transformers', with global layer numbers, so
a parameter has one name in every layout.

    stage = DecoderStage(config, StageOptions(layers=range(0, 2), first=True, last=False))
    output = stage(input_ids_BS, position_ids_BS)      # StageOutput(tensors=(hidden, positions))

Where the last of several stages needs the embedding (a tied head, multi-token prediction) it holds
a copy under the same name. Both copies are drawn and stored under one key, and their gradients are
summed (`Parallel.embedding_group`), so that they stay equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline import MoEGroups, StageOutput, chunked_cross_entropy
from moe_pipeline.layer import MoEOutput
from moe_pipeline.recomputation import ActivationOffload
from moe_train.errors import TrainTypeError, TrainValueError
from moe_train.model.balance import DeferredBalance
from moe_train.model.config import DecoderConfig
from moe_train.model.decoder_layer import DecoderLayer, LayerOptions, moe_config
from moe_train.model.init import Undrawn
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layer_recompute import KEEP_ALL, Form, LayerRecompute, kept_operations
from moe_train.model.layers import AttentionContext, attention_contexts
from moe_train.model.loss import head_loss
from moe_train.model.mtp import MTPLayer, MTPTokens, SharedWeights, mtp_loss
from moe_train.model.norm import RMSNorm
from moe_train.model.parallel import (
    WHOLE,
    HeadExchange,
    PositionCut,
    RingAttention,
    SampleShare,
    VocabularyShare,
)
from moe_train.model.token_numbers import TokenNumbers

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions(LayerOptions):
    """What part of the decoder a rank builds, and with whom it shares tokens and experts.

    Args:
        layers: global numbers of the decoder layers of this stage.
        sample_rank, num_sample_ranks: which of the equal parts of a microbatch this rank has.
        first, last: whether the stage holds the embedding, and the norm and head.
        num_microbatches: microbatches of a step; the auxiliary loss is their mean.
        mtp_loss_coef: weight of the multi-token prediction loss, where the decoder has its layers;
            0: they are kept as they are, without gradients.
        recompute, recompute_keep: what layers keep for their backward in training; the second
            names operations (`moe_train.model.layer_recompute`).
        offload_activations: what is kept waits in the host's memory; only on CUDA.
        loss_chunk_tokens: tokens whose logits are there at a time; None: all of a microbatch.
    """

    layers: range
    first: bool
    last: bool
    sample_rank: int = 0
    num_sample_ranks: int = 1
    num_microbatches: int = 1
    mtp_loss_coef: float = 0.3
    recompute: Form | None = None
    recompute_keep: tuple[str, ...] = ()
    offload_activations: bool = False

    @staticmethod
    def check_kept(names: Sequence[str]) -> None:
        """Refuse names of no operation (ValueError)."""
        kept_operations(names)

    loss_chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What the last stage needs of a microbatch.

    `labels_BS` (-100 is ignored), 1 / (predicted tokens), and the tokens, which are needed for
    multi-token prediction.
    """

    labels_BS: Tensor
    scale: float
    input_ids_BS: Tensor | None = None


@dataclass(slots=True)
class StageRecord:
    """Sums over the microbatches of one step, read by the training loop and then replaced.

    `loss`: this rank's share of the mean token loss. `aux_loss`, `z_loss`, `mtp_loss`: its shares
    of the losses of load balancing, router logits and multi-token prediction, with coefficients.
    `load_E[layer]`: routed rows of each expert over all ranks that share the microbatch.
    """

    loss: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    mtp_loss: Tensor
    load_E: dict[int, Tensor]


class _Body(nn.Module):
    """Holds what transformers keeps under `model.`, so that names agree."""

    def __init__(self, config: DecoderConfig, options: StageOptions) -> None:
        super().__init__()
        device, dtype = options.device, options.dtype
        size, eps = config.hidden_size, config.rms_norm_eps
        if options.first or (options.last and config.shares_embedding(options.mtp_loss_coef)):
            rows = len(VocabularyShare(size=config.vocab_size, tp=options.tp).rows)
            self.embed_tokens = nn.Embedding(rows, size, device=device, dtype=dtype)
        layers: dict[str, nn.Module] = {
            str(layer): DecoderLayer(config, layer, options) for layer in options.layers
        }
        if options.last:
            self.norm = RMSNorm(size, eps, device, dtype)
            for layer in config.mtp_layers:
                layers[str(layer)] = MTPLayer(
                    DecoderLayer(config, layer, options),
                    hidden_size=size,
                    rms_norm_eps=eps,
                    device=device,
                    dtype=dtype,
                ).requires_grad_(options.mtp_loss_coef > 0)
        self.layers = nn.ModuleDict(layers)


class DecoderStage(nn.Module):
    """A contiguous range of decoder layers with the embedding or the head where they belong."""

    def __init__(self, config: DecoderConfig, options: StageOptions) -> None:
        super().__init__()
        self.config = config
        self.options = options
        self.model = _Body(config, options)
        self._vocabulary = VocabularyShare(size=config.vocab_size, tp=options.tp)
        if options.last and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(
                config.hidden_size,
                len(self._vocabulary.rows),
                bias=False,
                device=options.device,
                dtype=options.dtype,
            )
        self.record = self._empty_record()
        self._numbers = TokenNumbers(
            seed=options.seed,
            sample_rank=options.sample_rank,
            num_sample_ranks=options.num_sample_ranks,
        )
        self._cut = options.cut
        self._deferred, self._deferred_mtp = self._balance(), self._balance()
        self._layer_recompute = LayerRecompute(
            form=options.recompute, keep=kept_operations(options.recompute_keep)
        )
        self._offload: ActivationOffload | None = None
        if options.offload_activations:
            self._offload = ActivationOffload(self.parameters())

    @classmethod
    def without_memory(cls, config: DecoderConfig) -> "DecoderStage":
        """All layers as one stage whose tensors have names and shapes alone."""
        layers = range(config.num_hidden_layers)
        options = StageOptions(layers=layers, first=True, last=True, device=torch.device("meta"))
        with Undrawn():
            return cls(config, options)

    def begin_step(self, step: int) -> None:
        """Number the tokens of the microbatches that follow as those of this step of training.

        Random numbers are drawn by them; without dropout and jitter it changes nothing.
        """
        self._numbers.begin_step(step)

    def take_record(self) -> StageRecord:
        """Return the sums since the last call and start new ones."""
        record, self.record = self.record, self._empty_record()
        return record

    def forward(self, *inputs: Tensor, target: object | None = None) -> StageOutput:
        """Run one microbatch.

        Args:
            inputs: `(input_ids or hidden, position_ids)`, shapes [B, S] or [B, S, d], and [B, S];
                a position of -1 is padding. With a `cut` the hidden states are those of this
                rank's positions, everything else that of whole samples, the target's too.
            target: a `Target` on the last stage, otherwise None.
        """
        if self._offload is None or not torch.is_grad_enabled():
            return self._forward(inputs, target)
        with self._offload:
            return self._forward(inputs, target)

    def _forward(self, inputs: Sequence[Tensor], target: object | None) -> StageOutput:
        first_BS = self._seen.take(inputs[0]) if self.options.first else inputs[0]
        x_BSd = self._embedded(first_BS)
        contexts = self._contexts(inputs[1], x_BSd.dtype, None)
        hidden_BSd, aux_loss = self._through_layers(x_BSd, contexts, None)
        if not self.options.last:
            return StageOutput(tensors=(hidden_BSd, inputs[1]), loss=aux_loss)
        if not isinstance(target, Target):
            raise TrainTypeError(f"the last stage needs a Target, got {type(target).__name__}")
        normed_BSd = self.model.norm(hidden_BSd)
        labels_BS = self._seen.take(target.labels_BS)
        loss = self._token_loss(normed_BSd, self.head, labels_BS) * target.scale
        self.record.loss += loss.detach()
        parts = [loss, aux_loss]
        if self.training and self.config.mtp_layers and self.options.mtp_loss_coef:
            parts += self._mtp_losses(normed_BSd, inputs[1], target, contexts[None])
        present = [part for part in parts if part is not None]
        return StageOutput(tensors=(), loss=torch.stack(present).sum())

    def hidden_states(
        self, first_BS: Tensor, position_ids_BS: Tensor, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after this stage's layers, and its auxiliary loss while training.

        Args:
            cache: of the positions so far, which these continue.
        """
        x_BSd = self._embedded(first_BS)
        return self._through_layers(
            x_BSd, self._contexts(position_ids_BS, x_BSd.dtype, cache), cache
        )

    def _embedded(self, first_BS: Tensor) -> Tensor:
        if not self.options.first:
            return first_BS
        return self._vocabulary.embedded(first_BS, self.model.embed_tokens.weight)

    def _through_layers(
        self,
        x_BSd: Tensor,
        contexts: dict[int | None, AttentionContext],
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        reports: dict[int, MoEOutput | None] = {}
        for number in self.options.layers:
            layer, context = self.model.layers[str(number)], contexts[self.config.window(number)]
            if cache is None:
                x_BSd, reports[number] = self._recompute(layer, x_BSd, context, None)
            else:
                x_BSd, reports[number] = layer(x_BSd, context, cache)
        return x_BSd, self._router_loss(reports, self._deferred)

    def logits(self, hidden_BSd: Tensor) -> Tensor:
        """Vocabulary logits [B, S, V] in the weights' dtype; last stage only."""
        return F.linear(self.model.norm(hidden_BSd), self.head)

    @property
    def head(self) -> Tensor:
        """The head's weight [V, d], of tensor-parallel ranks their rows; last stage only."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    @property
    def _recompute(self) -> LayerRecompute:
        has_backward = self.training and torch.is_grad_enabled()
        return self._layer_recompute if has_backward else KEEP_ALL

    def _contexts(
        self, position_ids_BS: Tensor, dtype: torch.dtype, cache: KeyValueCache | None
    ) -> dict[int | None, AttentionContext]:
        """What the layers of each window share."""
        windows = {self.config.window(number) for number in self.options.layers}
        if self.options.last and self.config.mtp_layers:
            windows.add(None)
        noise = None
        # The order of tokens is that of their numbers where ranks share samples.
        if (self.training and self.config.is_random) or self._cut != WHOLE:
            noise = self._numbers.next_microbatch(position_ids_BS)
        return attention_contexts(
            position_ids_BS,
            self.config.rotary,
            dtype,
            windows=windows,
            cache=cache,
            noise=noise,
            share=self._share(position_ids_BS.shape[1]),
        )

    def _share(self, num_positions: int) -> SampleShare:
        """What this rank has of its samples, and how attention sees the rest."""
        group, cut = self.options.cp_group, self.options.cut
        if group is None:
            return SampleShare(cut=cut)
        kind = RingAttention if self.options.cp_attention == "ring" else HeadExchange
        across = kind(group=group, cut=cut.outer, num_positions=num_positions)
        return SampleShare(cut=cut, across=across)

    def _mtp_losses(
        self,
        normed_BSd: Tensor,
        position_ids_BS: Tensor,
        target: Target,
        context: AttentionContext,
    ) -> list[Tensor | None]:
        """The multi-token prediction loss and the auxiliary loss of its experts."""
        if target.input_ids_BS is None:
            raise TrainValueError(
                f"num_nextn_predict_layers={len(self.config.mtp_layers)} needs the tokens on the "
                "last stage; give Target(..., input_ids_BS=...)"
            )
        layers = [self.model.layers[str(number)] for number in self.config.mtp_layers]
        out = mtp_loss(
            [layer for layer in layers if isinstance(layer, MTPLayer)],
            normed_BSd,
            MTPTokens(target.input_ids_BS, target.labels_BS, position_ids_BS, self._seen),
            SharedWeights(self.model.embed_tokens.weight, self.head, self._vocabulary.embedded),
            context,
            token_loss=self._token_loss,
            recompute=self._recompute,
        )
        loss = self.options.mtp_loss_coef * target.scale * out.loss
        self.record.mtp_loss += loss.detach()
        reports = dict(zip(self.config.mtp_layers, out.routed, strict=True))
        return [loss, self._router_loss(reports, self._deferred_mtp)]

    @property
    def _seen(self) -> PositionCut:
        """Whose tokens embedding and loss see: those of all ranks that share the vocabulary."""
        return self._cut if self.options.tp.size == 1 else self._cut.outer

    def _token_loss(self, hidden_BSd: Tensor, head_Vd: Tensor, labels_BS: Tensor) -> Tensor:
        """Sum of the cross entropies of the labels of own positions that are not -100."""
        chunk = self.options.loss_chunk_tokens
        if self.options.tp.size > 1:
            return self._vocabulary.loss(hidden_BSd, head_Vd, labels_BS, chunk)
        hidden_Td, labels_T = hidden_BSd.flatten(0, 1), labels_BS.flatten()
        if chunk is None:
            return head_loss(hidden_Td, head_Vd, labels_T)
        itemsize = torch.promote_types(head_Vd.dtype, torch.float32).itemsize
        chunk_bytes = chunk * head_Vd.shape[0] * itemsize
        return chunked_cross_entropy(hidden_Td, head_Vd, labels_T, chunk_bytes=chunk_bytes)

    def _router_loss(
        self, reports: dict[int, MoEOutput | None], deferred: DeferredBalance
    ) -> Tensor | None:
        """This rank's share of the layers' router losses, while training; counts their loads."""
        options = self.options
        sparse = {n: routed for n, routed in reports.items() if routed is not None}
        if not self.training or not sparse:
            return None
        for number, routed in sparse.items():
            previous = self.record.load_E.get(number, 0)
            self.record.load_E[number] = previous + routed.load_E
        losses: list[Tensor] = []
        if options.aux_loss_coef:
            losses.append(self._aux_loss(sparse, deferred))
        if options.z_loss_coef:
            z_losses = torch.stack([routed.z_loss for routed in sparse.values()])
            losses.append(z_losses.sum() / options.num_microbatches)
            self.record.z_loss += losses[-1].detach()
        return torch.stack(losses).sum() if losses else None

    def _aux_loss(self, sparse: dict[int, MoEOutput], deferred: DeferredBalance) -> Tensor:
        terms = {n: routed.balance for n, routed in sparse.items() if routed.balance is not None}
        if self.options.aux_loss_scope == "global_batch":
            later = deferred.add(terms)
            total = deferred.take_loss()
            if total is not None:
                self.record.aux_loss += total
            return later
        aux_losses = torch.stack([routed.aux_loss for routed in sparse.values()])
        aux_loss = aux_losses.sum() / self.options.num_microbatches
        self.record.aux_loss += aux_loss.detach()
        return aux_loss

    def _balance(self) -> DeferredBalance:
        options = self.options
        return DeferredBalance(
            moe_config(self.config, options),
            MoEGroups(tokens=options.token_group),
            num_microbatches=options.num_microbatches,
        )

    def _empty_record(self) -> StageRecord:
        zero = torch.zeros((), dtype=torch.float64, device=self.options.device)
        return StageRecord(
            loss=zero, aux_loss=zero.clone(), z_loss=zero.clone(), mtp_loss=zero.clone(), load_E={}
        )
