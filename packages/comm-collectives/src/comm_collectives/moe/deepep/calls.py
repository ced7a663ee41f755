"""DeepEP's calls: which arguments go where, and what comes back, for both of its interfaces.

Facts are from the sources of DeepEP 2.1.0: `deep_ep/buffers/legacy.py`, `elastic.py` beside it, and
the kernels. Only the normal kernels are used, on the current stream: `async_finish` and its like
stay off, so that the stream waits for the kernels; the host waits for their counts alone.

Legend: T tokens, D hidden size, K choices per token, U received tokens, L local experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch

from comm_collectives.errors import CommValueError
from comm_collectives.moe.rows import SortedChoices


class Delivery(NamedTuple):
    """What a dispatch brought: tokens, their local experts (-1: elsewhere) and weights.

    `counts_L` are the rows of each local expert as DeepEP counted them, `handle` what its combine
    and later dispatches need. `source_U` numbers the tokens by source rank and place there; None
    where they already come in that order.
    """

    x_UD: torch.Tensor
    expert_UK: torch.Tensor
    weight_UK: torch.Tensor
    counts_L: tuple[int, ...]
    handle: Any
    source_U: torch.Tensor | None = None

    def choices(self) -> SortedChoices:
        """Sort what came by local expert, inside by source; no copy to the host."""
        num_tokens, num_choices = self.expert_UK.shape
        order_U = torch.arange(num_tokens, device=self.expert_UK.device)
        if self.source_U is not None:
            order_U = self.source_U.argsort()
        flat = self.expert_UK.index_select(0, order_U).reshape(-1).long()
        # Choices of experts elsewhere sort behind all local ones.
        key = torch.where(flat < 0, len(self.counts_L), flat)
        sorted_N = torch.argsort(key, stable=True)[: sum(self.counts_L)]
        token_N = order_U[sorted_N.div(num_choices, rounding_mode="floor")]
        return SortedChoices(
            order_N=token_N * num_choices + sorted_N % num_choices,
            num_tokens=num_tokens,
            num_choices=num_choices,
            counts_E=self.counts_L,
        )


class DeepEpCalls(ABC):
    """DeepEP's calls in one generation of its interface; collective over the buffer's group."""

    def __init__(
        self, buffer: Any, dispatch_options: Mapping[str, Any], combine_options: Mapping[str, Any]
    ) -> None:
        self._buffer = buffer
        self._dispatch_options = dict(dispatch_options)
        self._combine_options = dict(combine_options)

    @abstractmethod
    def dispatch(
        self, x_TD: torch.Tensor, idx_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int
    ) -> Delivery:
        """Send tokens to the ranks of their experts; -1 in `idx_TK` chooses none."""

    @abstractmethod
    def dispatch_again(self, x_TD: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send other rows the way of an earlier dispatch: [U, D]."""

    def combine(
        self, y_UD: torch.Tensor, handle: Any, weight_UK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum rows back into their tokens [T, D], and weights into [T, K]."""
        y_TD, weight_TK, _ = self._buffer.combine(
            y_UD, handle=handle, topk_weights=weight_UK, **self._combine_options
        )
        return y_TD, weight_TK

    def check(self, x_TD: torch.Tensor, idx_TK: torch.Tensor) -> None:  # noqa: B027 - if any
        """Raise a ValueError for tokens that this generation, or its buffer, cannot take."""


@final
class BufferCalls(DeepEpCalls):
    """`deep_ep.Buffer` (V1)."""

    def dispatch(
        self, x_TD: torch.Tensor, idx_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int
    ) -> Delivery:
        """See `DeepEpCalls.dispatch`; one call for the layout and one for the rows."""
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            idx_TK, num_experts
        )
        x_UD, expert_UK, weight_UK, counts, handle, _ = self._buffer.dispatch(
            x_TD,
            topk_idx=idx_TK,
            topk_weights=weight_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            **self._dispatch_options,
        )
        return Delivery(x_UD, expert_UK, weight_UK, tuple(counts), handle)

    def dispatch_again(self, x_TD: torch.Tensor, handle: Any) -> torch.Tensor:
        """See `DeepEpCalls.dispatch_again`."""
        x_UD: torch.Tensor = self._buffer.dispatch(x_TD, handle=handle, **self._dispatch_options)[0]
        return x_UD


@final
class ElasticCalls(DeepEpCalls):
    """`deep_ep.ElasticBuffer` (V2), in the form with one row per received token."""

    def dispatch(
        self, x_TD: torch.Tensor, idx_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int
    ) -> Delivery:
        """See `DeepEpCalls.dispatch`."""
        x_UD, expert_UK, weight_UK, handle, _ = self._buffer.dispatch(
            x_TD,
            topk_idx=idx_TK,
            topk_weights=weight_TK,
            num_experts=num_experts,
            **self._dispatch_options,
        )
        counts_L = tuple(handle.num_recv_tokens_per_expert_list)
        # Rows come in no fixed order unless the buffer was made deterministic.
        source_U = handle.recv_src_metadata[: x_UD.shape[0], 0]
        return Delivery(x_UD, expert_UK, weight_UK, counts_L, handle, source_U)

    def dispatch_again(self, x_TD: torch.Tensor, handle: Any) -> torch.Tensor:
        """See `DeepEpCalls.dispatch_again`.

        DeepEP 2.1.0 chooses the number of SMs before it reads the number of experts from the
        handle, so both are given.
        """
        given = {"num_experts": handle.num_experts, "num_sms": handle.num_sms}
        x_UD: torch.Tensor = self._buffer.dispatch(
            x_TD, handle=handle, **{**given, **self._dispatch_options}
        )[0]
        return x_UD

    def check(self, x_TD: torch.Tensor, idx_TK: torch.Tensor) -> None:
        """See `DeepEpCalls.check`; waits for the device, since a kernel that objects ends it."""
        most = self._dispatch_options.get("num_max_tokens_per_rank")
        most = self._buffer.num_max_tokens_per_rank if most is None else most
        if x_TD.shape[0] > most:
            raise CommValueError(
                f"x has {x_TD.shape[0]} tokens but the ElasticBuffer takes {most}; make it with a "
                f"num_max_tokens_per_rank of at least {x_TD.shape[0]}"
            )
        sorted_TK = idx_TK.sort(1).values
        is_twice = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
        if bool(is_twice.any()):
            raise CommValueError(
                "topk_idx names an expert twice for one token; ElasticBuffer takes each expert at "
                "most once per token"
            )
