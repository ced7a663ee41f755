"""Dispatch and combine over DeepEP's kernels, which move rows between GPUs faster than anyone else.

Counts, checks, autograd and the form of the results are those of the torch backend. What differs:
combine sums a token's rows of one rank first, in the order of its choices; DeepEP then sums over
ranks in an order of its own, so results are not the same bits for every number of ranks. A time
limit bounds the exchange of counts alone: DeepEP's kernels have limits of their own. Between nodes,
rows of one expert stand in the order in which V1 delivers them.

**What has been run**: all but DeepEP itself, which needs at least two GPUs: a stand-in did what its
docstrings say.

Legend: T tokens, D hidden size, K choices per token, U received tokens, R rows with padding, L
local experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, final

import torch

from comm_collectives.errors import CommError, CommTypeError, CommValueError
from comm_collectives.moe.deepep.calls import BufferCalls, DeepEpCalls, ElasticCalls
from comm_collectives.moe.routes import Carried, Leg, LocalRouting, Routing
from comm_collectives.units import round_up

_MOST_CHOICES = 32  # DeepEP's kernels hold one choice in each lane of a warp
_ELEMENTS_PER_LOAD = 8  # rows are moved in units of 16 bytes
_INSIDE = Leg("dispatch")  # within a rank, where rows are as they are


@final
class DeepEpRouting(Routing):
    """The movements of one dispatch over DeepEP: its way between ranks, and ours from there."""

    def __init__(
        self,
        calls: DeepEpCalls,
        idx_TK: torch.Tensor,
        told: Sequence[Sequence[int]],
        alignment: int,
    ) -> None:
        self._calls, self._idx_TK, self._alignment = calls, idx_TK, alignment
        self.told = told
        self._counts_L: tuple[int, ...] = ()
        self._delivered: tuple[Any, LocalRouting] | None = None

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`: the choices for each local expert."""
        self._counts_L = tuple(map(sum, zip(*told_W, strict=True)))
        self.num_tokens_per_expert = tuple(round_up(n, self._alignment) for n in self._counts_L)

    def to_experts(self, sent: Carried, leg: Leg) -> Carried:
        """See `Routing.to_experts`; the first time keeps DeepEP's handle for all others."""
        leg.agree()
        x_TD = _at_least_one_row(sent[0], 0)
        if len(sent) == 1:
            handle, local = self._handle(leg)
            with _named(leg):
                return local.to_experts((self._calls.dispatch_again(x_TD, handle),), _INSIDE)
        idx_TK, weight_TK = _at_least_one_row(self._idx_TK, -1), _at_least_one_row(sent[1], 0)
        with _named(leg):
            got = self._calls.dispatch(x_TD, idx_TK, weight_TK, sum(map(len, self.told)))
        if got.counts_L != self._counts_L:
            raise CommError(
                f"{leg}: DeepEP delivered {got.counts_L} rows to the local experts but the "
                f"ranks announced {self._counts_L}; is the buffer used by another thread?"
            )
        local = LocalRouting(got.choices(), self._alignment)
        self._delivered = got.handle, local
        return local.to_experts((got.x_UD, got.weight_UK), _INSIDE)

    def to_tokens(self, sent: Carried, leg: Leg) -> Carried:
        """See `Routing.to_tokens`; sums each token's rows of this rank, DeepEP over the ranks."""
        leg.agree()
        handle, local = self._handle(leg)
        _check_rows(sent[0], "y_RD")
        y_UD, *weights = local.to_tokens(sent, _INSIDE)
        with _named(leg):
            y_TD, weight_TK = self._calls.combine(y_UD, handle, weights[0] if weights else None)
        num_tokens = self._idx_TK.shape[0]  # without the row that stood in for no token
        if not weights:
            return (y_TD[:num_tokens],)
        if weight_TK is None:
            raise CommError(f"{leg}: DeepEP gave no weights although it was given some")
        return y_TD[:num_tokens], weight_TK[:num_tokens]

    def _handle(self, leg: Leg) -> tuple[Any, LocalRouting]:
        if self._delivered is None:
            raise CommError(f"{leg}: the dispatch that it belongs to has failed")
        return self._delivered


@final
class DeepEpBackend:
    """A DeepEP buffer as the transport of dispatch and combine.

    backend = DeepEpBackend(deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes))

    Args:
        buffer: `deep_ep.Buffer` or `deep_ep.ElasticBuffer`, made by the user for the group of the
            dispatch, large enough for its rows.
        dispatch_options: further keyword arguments of every `buffer.dispatch`, for example
            {"config": tuned} (V1) or {"num_sms": 24} (V2).
        combine_options: the same for every `buffer.combine`.

    Raises:
        ImportError: deep_ep is not installed.
        TypeError: `buffer` is not one of its buffers.
        ValueError: an option that this adapter sets itself.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        dispatch_options: Mapping[str, Any] | None = None,
        combine_options: Mapping[str, Any] | None = None,
    ) -> None:
        module = require_deep_ep()
        options = dict(dispatch_options or {}), dict(combine_options or {})
        _check_options({**options[0], **options[1]})
        # V1 had neither the second class nor a choice of the index dtype.
        elastic: Any = vars(module).get("ElasticBuffer")
        self._idx_dtype: torch.dtype = vars(module).get("topk_idx_t", torch.int64)
        self._buffer = buffer
        self._calls: DeepEpCalls
        if elastic is not None and isinstance(buffer, elastic):
            self._calls = ElasticCalls(buffer, *options)
        elif isinstance(buffer, module.Buffer):
            self._calls = BufferCalls(buffer, *options)
        else:
            raise CommTypeError(
                f"buffer is a {type(buffer).__name__}; give a deep_ep.Buffer or ElasticBuffer"
            )

    def check(
        self,
        x_TD: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        group: object,
    ) -> None:
        """Check that DeepEP takes these inputs, beyond what every dispatch checks.

        Raises:
            ValueError, TypeError: it would refuse them, or end the process.
        """
        if self._buffer.group is not group:
            raise CommValueError(
                "the DeepEP buffer was made for another group; make one for the group of the "
                "dispatch, with the same ProcessGroup object"
            )
        check_inputs(x_TD, topk_idx_TK, topk_weights_TK)
        check_device(x_TD)
        self._calls.check(x_TD, topk_idx_TK)

    def routing(
        self, topk_idx_TK: torch.Tensor, *, told: Sequence[Sequence[int]], alignment: int
    ) -> Routing:
        """Route a dispatch of checked choices; `told` are those for each expert of each rank."""
        idx_TK = topk_idx_TK.to(self._idx_dtype).contiguous()
        return DeepEpRouting(self._calls, idx_TK, told, alignment)


def require_deep_ep() -> ModuleType:
    """Import DeepEP, which sets up its compiler and looks at the loaded NCCL when imported.

    Raises:
        ImportError: it is not installed.
    """
    if find_spec("deep_ep") is None:
        raise ImportError(
            "the DeepEP backend needs the package deep_ep, which is not installed; build it from "
            "github.com/deepseek-ai/DeepEP, or leave backend='torch'"
        )
    return import_module("deep_ep")


def check_inputs(x_TD: torch.Tensor, idx_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
    """Check what both generations of DeepEP demand of a dispatch."""
    _check_rows(x_TD, "x")
    if weight_TK.dtype != torch.float32:
        raise CommTypeError(f"topk_weights is {weight_TK.dtype}; DeepEP takes torch.float32")
    if not 1 <= idx_TK.shape[1] <= _MOST_CHOICES:
        raise CommValueError(
            f"topk_idx has {idx_TK.shape[1]} choices per token; DeepEP takes 1 to {_MOST_CHOICES}"
        )


def check_device(x_TD: torch.Tensor) -> None:
    """Check that the rows are where DeepEP's kernels run."""
    if not x_TD.is_cuda:
        raise CommValueError(f"x is on {x_TD.device}; DeepEP moves CUDA tensors; use 'torch'")


def _check_rows(x_ND: torch.Tensor, name: str) -> None:
    if x_ND.dtype != torch.bfloat16:
        raise CommTypeError(f"{name} is {x_ND.dtype}; DeepEP moves and sums torch.bfloat16")
    if x_ND.shape[1] % _ELEMENTS_PER_LOAD:
        raise CommValueError(
            f"{name} has hidden size {x_ND.shape[1]}; "
            f"DeepEP takes multiples of {_ELEMENTS_PER_LOAD}"
        )


_OURS = """
topk_idx topk_weights num_experts expert_alignment num_worst_tokens handle num_tokens_per_rank
num_tokens_per_rdma_rank num_tokens_per_expert is_token_in_rank async_finish previous_event
async_with_compute_stream allocate_on_comm_stream do_expand do_cpu_sync do_zero_padding bias
"""


def _check_options(options: Mapping[str, Any]) -> None:
    taken = sorted(set(options) & set(_OURS.split()))
    if taken:
        raise CommValueError(f"{', '.join(taken)} cannot be chosen: the adapter depends on it")


def _at_least_one_row(x: torch.Tensor, value: int) -> torch.Tensor:
    """Let a rank without tokens send one that chooses no expert: kernels need not take 0 rows."""
    return x.contiguous() if x.shape[0] else x.new_full((1, *x.shape[1:]), value)


@contextmanager
def _named(leg: Leg) -> Iterator[None]:
    """Name the call in what DeepEP raises."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise CommError(f"{leg}: DeepEP failed: {error}") from error
