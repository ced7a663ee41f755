"""Arguments and results of DeepEP's calls, against its signatures written down here.

And what they deliver on its way to the local experts, against loops in plain Python.

Source: github.com/deepseek-ai/DeepEP, version 2.1.0 (commit dd758ca, July 2026),
deep_ep/buffers/legacy.py and deep_ep/buffers/elastic.py. DeepEP itself needs GPUs; see
test_backend.py for what is run and what is not.
"""

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_collectives.moe.deepep.calls import BufferCalls, Delivery, ElasticCalls
from comm_collectives.moe.routes import Leg, LocalRouting

_X, _IDX, _WEIGHT = torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)

# Name, then parameters; "*" before those that have no default.
_BUFFER = {
    "get_dispatch_layout": "*topk_idx *num_experts previous_event async_finish "
    "allocate_on_comm_stream",
    "dispatch": "*x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens config "
    "previous_event async_finish allocate_on_comm_stream",
    "combine": "*x *handle topk_weights bias config previous_event async_finish "
    "allocate_on_comm_stream",
}
_ELASTIC = {
    "dispatch": "*x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts "
    "num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event "
    "previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream handle "
    "do_handle_copy do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf",
    "combine": "*x *handle topk_weights bias num_sms num_qps previous_event "
    "previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream",
}


class _Recorder:
    """Binds each call to the recorded signature, keeps it, and returns what it was told to."""

    def __init__(self, signatures: dict[str, str], results: dict[str, tuple[Any, ...]]) -> None:
        self._signatures = signatures
        self._results = results
        self.num_max_tokens_per_rank = 4
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        required = inspect.Parameter.empty
        signature = inspect.Signature(
            [
                inspect.Parameter(
                    text.lstrip("*"),
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=required if text.startswith("*") else None,
                )
                for text in self._signatures[name].split()
            ]
        )

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            self.calls.append((name, dict(signature.bind(*args, **kwargs).arguments)))
            return self._results[name]

        return call


def test_v1_dispatch_passes_the_layout_on_and_names_its_results() -> None:
    buffer = _Recorder(
        _BUFFER,
        {
            "get_dispatch_layout": ("per rank", "per node", "per expert", "in rank", "event"),
            "dispatch": ("x", "idx", "weights", [2, 1], "handle", "event"),
        },
    )
    got = BufferCalls(buffer, {"config": "tuned"}, {}).dispatch(_X, _IDX, _WEIGHT, 4)
    assert buffer.calls[0] == ("get_dispatch_layout", {"topk_idx": _IDX, "num_experts": 4})
    assert buffer.calls[1] == (
        "dispatch",
        {
            "x": _X,
            "num_tokens_per_rank": "per rank",
            "num_tokens_per_rdma_rank": "per node",
            "is_token_in_rank": "in rank",
            "num_tokens_per_expert": "per expert",
            "topk_idx": _IDX,
            "topk_weights": _WEIGHT,
            "config": "tuned",
        },
    )
    assert (got.x_UD, got.expert_UK, got.weight_UK) == ("x", "idx", "weights")
    assert (got.counts_L, got.handle, got.source_U) == ((2, 1), "handle", None)


def test_v1_cached_dispatch_gives_the_handle_and_no_choices() -> None:
    buffer = _Recorder(_BUFFER, {"dispatch": ("x", None, None, None, None, "event")})
    assert BufferCalls(buffer, {"config": "tuned"}, {}).dispatch_again(_X, "handle") == "x"
    assert buffer.calls == [("dispatch", {"x": _X, "handle": "handle", "config": "tuned"})]


def test_v2_dispatch_needs_one_call_and_takes_counts_from_the_handle() -> None:
    # The first column of the metadata is the token's number over all ranks; rows beyond those that
    # arrived are unused.
    metadata = torch.tensor([[7, 0, 0], [2, 1, 1], [-5, 9, 9]])
    handle = SimpleNamespace(num_recv_tokens_per_expert_list=[2, 1], recv_src_metadata=metadata)
    rows = torch.ones(2, 8)
    buffer = _Recorder(_ELASTIC, {"dispatch": (rows, "idx", "weights", handle, "event")})
    got = ElasticCalls(buffer, {"num_sms": 24}, {}).dispatch(_X, _IDX, _WEIGHT, 4)
    want = {"x": _X, "topk_idx": _IDX, "topk_weights": _WEIGHT, "num_experts": 4, "num_sms": 24}
    assert buffer.calls == [("dispatch", want)]
    assert got.x_UD is rows
    assert (got.expert_UK, got.weight_UK) == ("idx", "weights")
    assert (got.counts_L, got.handle) == ((2, 1), handle)
    assert got.source_U is not None
    assert got.source_U.tolist() == [7, 2]


def test_v2_cached_dispatch_says_what_v2_reads_before_the_handle() -> None:
    # ElasticBuffer.dispatch computes the SM count from num_experts before it unpacks the handle.
    handle = SimpleNamespace(num_experts=4, num_sms=12)
    for options, num_sms in (({}, 12), ({"num_sms": 24}, 24)):
        buffer = _Recorder(_ELASTIC, {"dispatch": ("x", "idx", None, handle, "event")})
        assert ElasticCalls(buffer, options, {}).dispatch_again(_X, handle) == "x"
        want = {"x": _X, "handle": handle, "num_experts": 4, "num_sms": num_sms}
        assert buffer.calls == [("dispatch", want)]


@pytest.mark.parametrize(("kind", "signatures"), [(BufferCalls, _BUFFER), (ElasticCalls, _ELASTIC)])
def test_combine_is_the_same_call_in_both(kind: type[Any], signatures: dict[str, str]) -> None:
    buffer = _Recorder(signatures, {"combine": ("y", "weights", "event")})
    calls = kind(buffer, {"num_sms": 6}, {"bias": None})
    assert calls.combine(_X, "handle", _WEIGHT) == ("y", "weights")
    want = {"x": _X, "handle": "handle", "topk_weights": _WEIGHT, "bias": None}
    assert buffer.calls == [("combine", want)]


def test_v2_refuses_what_its_kernels_would_end_the_process_for() -> None:
    calls = ElasticCalls(_Recorder(_ELASTIC, {}), {}, {})
    calls.check(_X, _IDX)
    with pytest.raises(ValueError, match="x has 5 tokens but the ElasticBuffer takes 4"):
        calls.check(torch.ones(5, 8), torch.tensor([[0, 1]] * 5))
    with pytest.raises(ValueError, match="names an expert twice for one token"):
        calls.check(_X, torch.tensor([[0, 1], [3, 3], [1, 2]]))
    calls.check(_X, torch.tensor([[0, 1], [-1, -1], [1, 2]]))
    roomier = ElasticCalls(_Recorder(_ELASTIC, {}), {"num_max_tokens_per_rank": 5}, {})
    roomier.check(torch.ones(5, 8), torch.tensor([[0, 1]] * 5))
    BufferCalls(_Recorder(_BUFFER, {}), {}, {}).check(torch.ones(5, 8), torch.tensor([[3, 3]] * 5))


_K, _L, _D = 4, 3, 5
_LEG = Leg("dispatch")


def _received(rng: random.Random, tokens: int, experts: tuple[int, ...]) -> Tensor:
    """Local experts of each choice; each token has at least one here, as delivered ones have."""
    rows = [[rng.choice((-1, *experts)) for _ in range(_K)] for _ in range(tokens)]
    for row in rows:
        row[rng.randrange(_K)] = rng.choice(experts)
    return torch.tensor(rows, dtype=torch.int64).reshape(tokens, _K)


def _places(expert_UK: list[list[int]], alignment: int) -> tuple[dict[tuple[int, int], int], int]:
    """Row of each (token, choice): expert by expert, inside by token and choice, each padded."""
    place: dict[tuple[int, int], int] = {}
    row = 0
    for expert in range(_L):
        for token, choices in enumerate(expert_UK):
            for choice, wanted in enumerate(choices):
                if wanted == expert:
                    place[token, choice] = row
                    row += 1
        row = -(-row // alignment) * alignment
    return place, row


def _local(
    expert_UK: Tensor, alignment: int, source_U: Tensor | None = None, counts: Any = None
) -> LocalRouting:
    """The way on, inside this rank, of tokens that were delivered so."""
    counts = counts or [int((expert_UK == e).sum()) for e in range(_L)]
    got = Delivery(torch.empty(0), expert_UK, torch.empty(0), tuple(counts), None, source_U)
    return LocalRouting(got.choices(), alignment)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_delivered_rows_and_weights_stand_where_a_loop_puts_them(
    alignment: int, dtype: torch.dtype
) -> None:
    rng = random.Random(alignment)
    for tokens, experts in ((7, (0, 1, 2)), (9, (1,)), (5, (0, 2)), (0, (0, 1, 2))):
        expert_UK = _received(rng, tokens, experts)
        place, num_rows = _places(expert_UK.tolist(), alignment)
        local = _local(expert_UK, alignment)
        x = torch.randn(tokens, _D, dtype=torch.float64).to(dtype)
        weight = torch.rand(tokens, _K)
        want_x, want_w = torch.zeros(num_rows, _D, dtype=dtype), torch.zeros(num_rows)
        for (token, choice), row in place.items():
            want_x[row] = x[token]
            want_w[row] = weight[token, choice]
        for got, want in zip(local.to_experts((x, weight), _LEG), (want_x, want_w), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_are_summed_in_the_order_of_choices_and_weights_return(alignment: int) -> None:
    rng = random.Random(10 + alignment)
    for tokens, experts in ((7, (0, 1, 2)), (9, (1,)), (0, (0, 1, 2))):
        expert_UK = _received(rng, tokens, experts)
        place, num_rows = _places(expert_UK.tolist(), alignment)
        y, weight = torch.randn(num_rows, _D), torch.rand(num_rows)
        is_padding = torch.ones(num_rows, dtype=torch.bool)
        is_padding[list(place.values())] = False
        y[is_padding] = torch.nan
        weight[is_padding] = torch.nan
        want_y, want_w = torch.zeros(tokens, _D), torch.zeros(tokens, _K)
        for token in range(tokens):
            for choice in range(_K):
                if (token, choice) in place:
                    want_y[token] += y[place[token, choice]]
                    want_w[token, choice] = weight[place[token, choice]]
        got_y, got_w = _local(expert_UK, alignment).to_tokens((y, weight), _LEG)
        assert torch.equal(got_y, want_y)  # the same additions in the same order: same bits
        assert torch.equal(got_w, want_w)


def test_tokens_that_come_in_any_order_give_the_rows_of_the_sorted_ones() -> None:
    rng = random.Random(5)
    expert_UK = _received(rng, 9, (0, 1, 2))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    local = _local(expert_UK, 4)
    mixed = _local(expert_UK[order], 4, source_U=order * 10)
    x, weight = torch.randn(9, _D), torch.rand(9, _K)
    sent = local.to_experts((x, weight), _LEG)
    for ours, theirs in zip(mixed.to_experts((x[order], weight[order]), _LEG), sent, strict=True):
        assert torch.equal(ours, theirs)
    y = torch.randn(sent[0].shape)
    back = local.to_tokens((y, y[:, 0]), _LEG)
    for ours, theirs in zip(mixed.to_tokens((y, y[:, 0]), _LEG), back, strict=True):
        assert torch.equal(ours, theirs[order])


def test_tokens_that_nobody_here_wants_are_kept_and_get_zeros() -> None:
    # DeepEP fills up with such rows where the number of received tokens is fixed beforehand.
    expert_UK = torch.tensor([[-1, 1], [-1, -1], [0, 1]], dtype=torch.int32)
    local = _local(expert_UK, 1, counts=[1, 2])
    sent = local.to_experts((torch.tensor([[1.0], [2.0], [4.0]]),), _LEG)
    assert sent[0].flatten().tolist() == [4.0, 1.0, 4.0]
    assert local.to_tokens(sent, _LEG)[0].flatten().tolist() == [1.0, 0.0, 8.0]
