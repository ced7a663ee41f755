"""One pipeline stage of the decoder: the unit that the executor drives.

The first stage takes `(input_ids, position_ids)`, every other `(hidden, position_ids)`; the last
turns hidden states into the loss. Parameter names are transformers', with global layer numbers, so
a parameter has one name in every layout.

    stage = DecoderStage(config, StageOptions(layers=range(0, 2), first=True, last=False))
    output = stage(input_ids_BS, position_ids_BS)      # StageOutput(tensors=(hidden, positions))
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline import (
    ExpertsOptions,
    MoEConfig,
    MoEGroups,
    MoELayer,
    MoEOutput,
    RouterLosses,
    RouterOptions,
    StageOutput,
    recompute,
)
from moe_train.model.config import Qwen3MoeConfig
from moe_train.model.layers import (
    Attention,
    AttentionContext,
    DenseMLP,
    KeyValueCache,
    attention_context,
)
from moe_train.model.loss import head_loss
from moe_train.model.norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """What part of the decoder a rank builds, and with whom it shares tokens and experts.

    Args:
        layers: global numbers of the decoder layers of this stage.
        first, last: whether the stage holds the embedding, and the norm and head.
        ep_group: ranks that share the experts; None when this rank holds all of them.
        token_group: ranks that hold other tokens of the same micro-batch (auxiliary loss).
        num_microbatches: micro-batches of a step; the auxiliary loss is their mean.
        recompute: in training, keep each layer's input only and compute the rest again.
    """

    layers: range
    first: bool
    last: bool
    ep_group: dist.ProcessGroup | None = None
    token_group: dist.ProcessGroup | None = None
    num_microbatches: int = 1
    aux_loss_coef: float = 0.0
    aux_loss_scope: str = "micro_batch"
    experts_implementation: str = "auto"
    recompute: bool = False
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Target:
    """What the last stage needs: `labels_BS` (-100 is ignored) and 1 / (predicted tokens)."""

    labels_BS: Tensor
    scale: float


@dataclass(slots=True)
class StageRecord:
    """Sums over the micro-batches of one step, read by the training loop and then replaced.

    `loss`: this rank's share of the mean token loss. `aux_loss`: its share of the auxiliary loss.
    `load_E[layer]`: routed rows of each expert over all ranks that share the micro-batch.
    """

    loss: Tensor
    aux_loss: Tensor
    load_E: dict[int, Tensor]


class DecoderLayer(nn.Module):
    """Attention and MLP (dense or experts), each behind a norm and a residual."""

    def __init__(self, config: Qwen3MoeConfig, layer: int, options: StageOptions) -> None:
        super().__init__()
        device, dtype = options.device, options.dtype
        self.self_attn = Attention(config, layer, device, dtype)
        self.mlp: MoELayer | DenseMLP
        if config.is_sparse(layer):
            self.mlp = MoELayer(
                moe_config(config, options),
                groups=MoEGroups(ep=options.ep_group, tokens=options.token_group),
                device=device,
                dtype=dtype,
            )
        else:
            self.mlp = DenseMLP(config, device, dtype)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, device, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, device, dtype)

    def forward(
        self, x_BSd: Tensor, context: AttentionContext, cache: KeyValueCache | None
    ) -> tuple[Tensor, MoEOutput | None]:
        """Return the new hidden states, and what the experts reported if the layer has any."""
        x_BSd = x_BSd + self.self_attn(self.input_layernorm(x_BSd), context, cache)
        normed_BSd = self.post_attention_layernorm(x_BSd)
        if isinstance(self.mlp, DenseMLP):
            return x_BSd + self.mlp(normed_BSd), None
        routed = self.mlp(normed_BSd)
        return x_BSd + routed.hidden, routed


class _Body(nn.Module):
    """Holds what transformers keeps under `model.`, so that names agree."""

    def __init__(self, config: Qwen3MoeConfig, options: StageOptions) -> None:
        super().__init__()
        device, dtype = options.device, options.dtype
        if options.first or (options.last and config.tie_word_embeddings):
            self.embed_tokens = nn.Embedding(
                config.vocab_size, config.hidden_size, device=device, dtype=dtype
            )
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(config, layer, options) for layer in options.layers}
        )
        if options.last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device, dtype)


class DecoderStage(nn.Module):
    """A contiguous range of decoder layers with the embedding or the head where they belong."""

    def __init__(self, config: Qwen3MoeConfig, options: StageOptions) -> None:
        super().__init__()
        if config.tie_word_embeddings and not (options.first and options.last):
            raise ValueError(
                "config.json: tie_word_embeddings=true needs the embedding and the head on one "
                "stage; set parallel.pp=1 or untie the embeddings"
            )
        self.config = config
        self.options = options
        self.model = _Body(config, options)
        if options.last and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(
                config.hidden_size,
                config.vocab_size,
                bias=False,
                device=options.device,
                dtype=options.dtype,
            )
        self.record = self._empty_record()

    def take_record(self) -> StageRecord:
        """Return the sums since the last call and start new ones."""
        record, self.record = self.record, self._empty_record()
        return record

    def forward(self, *inputs: Tensor, target: object | None = None) -> StageOutput:
        """Run one micro-batch.

        Args:
            inputs: `(input_ids or hidden, position_ids)`, shapes [B, S] or [B, S, d], and [B, S].
            target: a `Target` on the last stage, otherwise None.
        """
        hidden_BSd, aux_loss = self.hidden_states(inputs[0], inputs[1])
        if not self.options.last:
            return StageOutput(tensors=(hidden_BSd, inputs[1]), loss=aux_loss)
        if not isinstance(target, Target):
            raise TypeError(f"the last stage needs a Target, got {type(target).__name__}")
        normed_BSd = self.model.norm(hidden_BSd)
        loss = head_loss(normed_BSd.flatten(0, 1), self.head, target.labels_BS.flatten())
        loss = loss * target.scale
        self.record.loss += loss.detach()
        return StageOutput(tensors=(), loss=loss if aux_loss is None else loss + aux_loss)

    def hidden_states(
        self, first_BS: Tensor, position_ids_BS: Tensor, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after this stage's layers, and its auxiliary loss while training."""
        options, config = self.options, self.config
        x_BSd = self.model.embed_tokens(first_BS) if options.first else first_BS
        context = attention_context(
            position_ids_BS, config.head_dim, config.rope_theta, x_BSd.dtype
        )
        aux_losses: list[Tensor] = []
        for name, layer in self.model.layers.items():
            if options.recompute and self.training and torch.is_grad_enabled():
                x_BSd, routed = recompute(layer, x_BSd, context, None)
            else:
                x_BSd, routed = layer(x_BSd, context, cache)
            if routed is not None and self.training:
                aux_losses.append(routed.aux_loss)
                self._count(int(name), routed.load_E)
        if not aux_losses or options.aux_loss_coef == 0:
            return x_BSd, None
        aux_loss = torch.stack(aux_losses).sum() / options.num_microbatches
        self.record.aux_loss += aux_loss.detach()
        return x_BSd, aux_loss

    def logits(self, hidden_BSd: Tensor) -> Tensor:
        """Vocabulary logits [B, S, V] in the weights' dtype; last stage only."""
        return F.linear(self.model.norm(hidden_BSd), self.head)

    @property
    def head(self) -> Tensor:
        """The head's weight [V, d]; last stage only."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def _count(self, layer: int, load_E: Tensor) -> None:
        previous = self.record.load_E.get(layer)
        self.record.load_E[layer] = load_E if previous is None else previous + load_E

    def _empty_record(self) -> StageRecord:
        zero = torch.zeros((), dtype=torch.float64, device=self.options.device)
        return StageRecord(loss=zero, aux_loss=zero.clone(), load_E={})


def moe_config(config: Qwen3MoeConfig, options: StageOptions) -> MoEConfig:
    """The experts' configuration of one layer."""
    return MoEConfig(
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        router=RouterOptions(norm_topk_prob=config.norm_topk_prob),
        losses=RouterLosses(
            router_aux_loss_coef=options.aux_loss_coef, moe_aux_loss_scope=options.aux_loss_scope
        ),
        experts=ExpertsOptions(experts_implementation=options.experts_implementation),
    )


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of stage `stage`.

    Raises:
        ValueError: the layers do not divide by the stages.
    """
    if num_layers % num_stages:
        raise ValueError(
            f"num_hidden_layers={num_layers} is not divisible by parallel.pp={num_stages} stages; "
            f"choose pp among {_divisors(num_layers)}"
        )
    size = num_layers // num_stages
    return range(stage * size, (stage + 1) * size)


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
