"""The MoE layer: router, dispatch, experts, combine.

Parameters are named as in transformers' `Qwen3MoeSparseMoeBlock` (`gate.weight`,
`experts.gate_up_proj`, `experts.down_proj`), so that a state dict fits both.

The layer is given its process groups and asks no global for one. `ep_group`: the ranks over which
the experts are split, in equal contiguous blocks by rank in the group; each of them brings its own
tokens. `token_group`: all ranks that hold tokens of the same global micro-batch (dp x ep), over
which the auxiliary loss and the load are taken. Without groups the layer is an ordinary module.

    layer = MoELayer(config)
    out = layer(x)                       # [batch, sequence, hidden] or [tokens, hidden]
    (task_loss(out.hidden) + out.aux_loss).backward()

Dims: T tokens of this rank, R routed rows received, D hidden, E experts of the layer.
"""

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from comm_collectives import MoeOptions, combine, dispatch
from moe_pipeline.aux_loss import balancing_loss
from moe_pipeline.config import MoEConfig
from moe_pipeline.experts import Experts
from moe_pipeline.router import TopKRouter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoEOutput:
    """What an MoE layer returns.

    Attributes:
        hidden: same shape and dtype as the input.
        aux_loss: 0-d, this rank's share of the load-balancing loss, coefficient included; summed
            over the ranks of `token_group` it is the loss of the global micro-batch.
        load_E: int64 [E], routed rows per expert of the global micro-batch; no gradient.
    """

    hidden: Tensor
    aux_loss: Tensor
    load_E: Tensor


@final
class MoELayer(nn.Module):
    """A sparse block of experts; see the module's docstring.

    Args:
        config: sizes, routing rule, auxiliary loss, implementation.
        ep_group: ranks that share the experts; None: all experts are here.
        token_group: ranks that share a micro-batch's tokens; None: all tokens are here.
        device: of the parameters.
        dtype: of the parameters.
        timeout_s: limit for each exchange; None: that of the group.

    Raises:
        ValueError: `num_experts` is not divisible by the size of `ep_group`.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        ep_group: ProcessGroup | None = None,
        token_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        ep_size = 1 if ep_group is None else dist.get_world_size(ep_group)
        if config.num_experts % ep_size:
            raise ValueError(
                f"ep axis has {ep_size} ranks but num_experts={config.num_experts}; "
                f"choose a divisor of {config.num_experts}"
            )
        self.config = config
        self.ep_group = ep_group
        self.token_group = token_group
        self.timeout_s = timeout_s
        self.gate = TopKRouter(config, device=device, dtype=dtype)
        self.experts = Experts(
            config, num_local_experts=config.num_experts // ep_size, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> MoEOutput:
        """Send each token through its experts.

        Collective: every rank of `ep_group` and `token_group` must call it, and then its backward,
        in the same order, also with zero tokens.

        Args:
            x: [batch, sequence, D] or [tokens, D], in the dtype of the parameters.

        Raises:
            ValueError: another shape, or [tokens, D] under `moe_aux_loss_scope="sequence"`.
        """
        if x.dim() not in (2, 3):
            raise ValueError(
                "an MoE layer expects [batch, sequence, hidden] or [tokens, hidden], "
                f"got shape {tuple(x.shape)}"
            )
        x_TD = x.reshape(-1, x.shape[-1])
        routed = self.gate(x_TD)
        aux_loss, load_E = balancing_loss(
            routed,
            self.config,
            sequence_shape=(x.shape[0], x.shape[1]) if x.dim() == 3 else None,
            token_group=self.token_group,
            timeout_s=self.timeout_s,
        )
        dispatched = dispatch(
            x_TD,
            routed.plan.topk_idx_TK,
            routed.topk_weights_TK,
            num_experts=self.config.num_experts,
            group=self.ep_group,
            options=MoeOptions(timeout_s=self.timeout_s),
        )
        y_RD = self.experts(dispatched.x, dispatched.num_tokens_per_expert, dispatched.topk_weights)
        out_TD = combine(y_RD, dispatched.handle, timeout_s=self.timeout_s)
        return MoEOutput(hidden=out_TD.view(x.shape), aux_loss=aux_loss, load_E=load_E)
