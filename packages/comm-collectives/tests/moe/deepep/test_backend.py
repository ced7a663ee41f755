"""The DeepEP backend, as far as it can be run without GPUs.

DeepEP needs at least two GPUs that see each other; `test_movements_over_deepep_equal_brute_force`
runs it where they are. Everywhere else a stand-in, in this file, takes its place: it does
what DeepEP's docstrings and tests say of one row per token and rank, over gloo, and refuses what
DeepEP's sources refuse. It shows that the adapter is right if DeepEP is as documented.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import comm_collectives as cc
from comm_collectives.errors import CommError, RefusedTypeError
from comm_collectives.moe.deepep import backend as deepep
from comm_collectives.moe.deepep.backend import (
    DeepEpBackend,
    DeepEpRouting,
    check_device,
    check_inputs,
    require_deep_ep,
)
from comm_collectives.moe.deepep.calls import BufferCalls, DeepEpCalls, ElasticCalls
from comm_collectives.moe.options import MoeOptions
from comm_collectives.moe.routes.routing import Leg, Routing
from ranktest import run_ranks

_W, _E, _K, _D = 2, 8, 3, 16
_LOCAL = _E // _W
_TRAVEL = Leg(movement="dispatch")


class _StandIn:
    """One row per token and rank by all_gather_object; rows arrive by source, or the other way."""

    num_max_tokens_per_rank = 100

    def __init__(self, group: object = None) -> None:
        self.group = group

    def send(
        self, x: Tensor, idx: Tensor, weights: Tensor | None, is_reversed: bool = False
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert idx.is_contiguous()
        assert x.shape[0] == idx.shape[0] > 0
        assert weights is None or (weights.dtype == torch.float32 and weights.shape == idx.shape)
        everyone: list[Any] = [None] * _W
        dist.all_gather_object(everyone, (x, idx, weights))
        first = dist.get_rank() * _LOCAL
        rows, local, carried, sources = [], [], [], []
        for rank, (x_TD, idx_TK, weight_TK) in enumerate(everyone):
            is_here = (idx_TK >= first) & (idx_TK < first + _LOCAL)
            for token in is_here.any(1).nonzero().flatten().tolist():
                rows.append(x_TD[token])
                local.append(torch.where(is_here[token], idx_TK[token] - first, -1))
                carried.append(None if weight_TK is None else weight_TK[token])
                sources.append((rank, token))
        if is_reversed:
            for kept in (rows, local, carried, sources):
                kept.reverse()
        x_UD = torch.stack(rows) if rows else x.new_empty(0, x.shape[1])
        idx_UK = torch.stack(local) if local else idx.new_empty(0, idx.shape[1])
        weight_UK = None
        if weights is not None:
            weight_UK = torch.stack(carried) if carried else weights.new_empty(0, idx.shape[1])
        counts = [int((idx_UK == e).sum()) for e in range(_LOCAL)]
        return x_UD, idx_UK, weight_UK, counts, (sources, idx)

    def sum_back(self, x: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Any]:
        sources, idx = handle
        assert x.dtype == torch.bfloat16
        assert x.shape[0] == len(sources)
        assert weights is None or weights.shape == (len(sources), idx.shape[1])
        everyone: list[Any] = [None] * _W
        dist.all_gather_object(everyone, (sources, x, weights))
        y = torch.zeros(idx.shape[0], x.shape[1])
        weight_TK = torch.zeros(idx.shape)
        for their_sources, their_x, their_weights in everyone:
            for row, (rank, token) in enumerate(their_sources):
                if rank == dist.get_rank():
                    y[token] += their_x[row]
                    if their_weights is not None:
                        weight_TK[token] += their_weights[row]
        return y.bfloat16(), None if weights is None else weight_TK


class _BufferStandIn(_StandIn):
    """In the form of `deep_ep.Buffer`."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert num_experts == _E
        return "per rank", None, "per expert", topk_idx, None

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        handle: Any = None,
        **layout: Any,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert not layout
            return self.send(x, handle[1], None)[0], None, None, None, None, None
        assert layout.pop("is_token_in_rank") is topk_idx
        assert list(layout.values()) == ["per rank", None, "per expert"]
        return (*self.send(x, topk_idx, topk_weights), None)

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None) -> tuple[Any, ...]:
        return (*self.sum_back(x, handle, topk_weights), None)


class _ElasticStandIn(_StandIn):
    """In the form of `deep_ep.ElasticBuffer`; every other dispatch delivers in another order."""

    is_reversed = False

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_sms: int = 0,
        handle: Any = None,
    ) -> tuple[Any, ...]:
        assert num_experts == _E
        if handle is not None:
            assert topk_idx is None
            assert num_sms == handle.num_sms
            x_UD, idx_UK, *_ = self.send(x, handle.back[1], None, handle.is_reversed)
            return x_UD, idx_UK, None, handle, None
        self.is_reversed = not self.is_reversed
        x_UD, idx_UK, weight_UK, counts, back = self.send(
            x, topk_idx, topk_weights, self.is_reversed
        )
        numbers = [rank * self.num_max_tokens_per_rank + token for rank, token in back[0]]
        made = SimpleNamespace(
            num_recv_tokens_per_expert_list=counts,
            num_experts=_E,
            num_sms=12,
            recv_src_metadata=torch.tensor([[n] + [0] * (_K + 1) for n in numbers]).view(
                -1, _K + 2
            ),
            is_reversed=self.is_reversed,
            back=back,
        )
        return x_UD, idx_UK, weight_UK, made, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None) -> tuple[Any, ...]:
        return (*self.sum_back(x, handle.back, topk_weights), None)


def _make_calls(kind: str) -> DeepEpCalls:
    if kind == "elastic":
        return ElasticCalls(_ElasticStandIn(), {}, {})
    return BufferCalls(_BufferStandIn(), {}, {})


_ROUTINGS = {
    "random": (7, 5),
    "a rank without tokens": (0, 6),
    "no tokens at all": (0, 0),
    "some choices name nobody": (6, 5),
    "one expert takes all": (4, 4),
}


def _inputs(name: str, rank: int, repeats: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are binary numbers, unique over all ranks; exact in bfloat16."""
    tokens = _ROUTINGS[name][rank]
    number = rank * 64 + torch.arange(tokens)
    x = (((number[:, None] >> torch.arange(_D)) & 1).bfloat16() + 1).repeat(1, repeats)
    generator = torch.Generator().manual_seed(rank)
    idx = torch.rand(tokens, _E, generator=generator).topk(_K, dim=1).indices
    if name == "one expert takes all":
        idx = torch.full((tokens, _K), 6)
    if name == "some choices name nobody":
        idx[::2, 1:] = -1
        idx[1] = -1
    weight = torch.randint(1, 100, (tokens, _K), generator=generator).float()
    return x, idx, weight


def _everyone(name: str, repeats: int) -> list[tuple[int, int, Tensor, int, float]]:
    """All (expert, source rank, row, choice, weight), by expert and then as they are sent."""
    routed = []
    for rank in range(_W):
        x, idx, weight = _inputs(name, rank, repeats)
        for token in range(x.shape[0]):
            for k in range(_K):
                routed.append((int(idx[token, k]), rank, x[token], k, float(weight[token, k])))
    return sorted((r for r in routed if r[0] >= 0), key=lambda r: r[0])


def _check_movements(
    make: Callable[[Tensor, list[int]], Routing],
    name: str,
    alignment: int,
    *,
    repeats: int = 1,
) -> None:
    """`make` routes the choices."""
    device = "cpu" if repeats == 1 else "cuda"
    rank = dist.get_rank()
    x, idx, weight = (t.to(device) for t in _inputs(name, rank, repeats))
    want = [r for r in _everyone(name, repeats) if rank * _LOCAL <= r[0] < (rank + 1) * _LOCAL]
    counts = [sum(r[0] == rank * _LOCAL + e for r in want) for e in range(_LOCAL)]
    routing = make(idx, counts)
    with pytest.raises(CommError, match="the dispatch that it belongs to has failed"):
        routing.to_experts((x,), _TRAVEL)
    x_RD, weight_R = routing.to_experts((x, weight), _TRAVEL)
    sizes = tuple(-(-c // alignment) * alignment for c in counts)
    assert routing.num_tokens_per_expert == sizes
    expert_R = torch.arange(_LOCAL).repeat_interleave(torch.tensor(sizes)).to(device)
    assert x_RD.shape[0] == weight_R.shape[0] == expert_R.numel()
    is_row = weight_R > 0
    assert bool((x_RD[~is_row] == 0).all())
    got = [
        (int(expert) + rank * _LOCAL, row.tolist(), float(w))
        for expert, row, w in zip(expert_R[is_row], x_RD[is_row], weight_R[is_row], strict=True)
    ]
    expected = [(e, row.tolist(), w) for e, _, row, _, w in want]
    assert got == expected
    # The way back: each expert multiplies by its number; padding may hold anything.
    factor_R = (expert_R + rank * _LOCAL + 1).float()
    y_RD = (x_RD * factor_R[:, None]).bfloat16()
    y_RD[~is_row] = torch.nan
    want_TD = x * (idx + 1).sum(1, keepdim=True)
    assert torch.equal(routing.to_tokens((y_RD,), _TRAVEL)[0], want_TD.bfloat16())
    y_TD, back_TK = routing.to_tokens((y_RD, weight_R * factor_R), _TRAVEL)
    assert torch.equal(y_TD, want_TD.bfloat16())
    assert torch.equal(back_TK, weight * (idx + 1))
    assert torch.equal(routing.to_experts((x * 2,), _TRAVEL)[0], x_RD * 2)
    # A second dispatch of the same choices gives the same order, and the way back stays.
    assert torch.equal(routing.to_experts((x * 2, weight), _TRAVEL)[0], x_RD * 2)
    assert torch.equal(routing.to_tokens((y_RD,), _TRAVEL)[0], want_TD.bfloat16())


def _layer(name: str, options: MoeOptions, repeats: int = 1) -> list[Tensor]:
    """A layer whose experts multiply by their number, forward and backward; exact in bfloat16."""
    device = "cpu" if repeats == 1 else "cuda"
    x, idx, weight = (t.to(device) for t in _inputs(name, dist.get_rank(), repeats))
    x.requires_grad_()
    weight = (weight % 3 + 1).requires_grad_()
    sent = cc.dispatch(
        x,
        idx,
        weight,
        num_experts=_E,
        group=dist.group.WORLD,
        expert_alignment=4,
        options=options,
    )
    counts = torch.tensor(sent.num_tokens_per_expert)
    expert_R = torch.arange(_LOCAL).repeat_interleave(counts) + dist.get_rank() * _LOCAL
    factor_R = (expert_R + 1).to(device) * sent.topk_weights
    out = cc.combine(sent.x * factor_R[:, None].bfloat16(), sent.handle)
    out.backward(x.detach().flip(1))
    assert x.grad is not None
    assert weight.grad is not None
    return [t.detach() for t in (out, x.grad, weight.grad, sent.x, sent.topk_weights)]


def _learnt(routing: Routing, counts_L: list[int]) -> Routing:
    """A routing to whose local experts all ranks together send so many rows."""
    routing.learn([counts_L])
    return routing


@pytest.mark.parametrize("kind", ["buffer", "elastic"])
def test_movements_over_what_deepep_documents_equal_brute_force(kind: str) -> None:
    def fn(rank: int, world_size: int) -> None:
        for name, alignment in product(_ROUTINGS, (1, 4)):
            if kind == "elastic" and name == "one expert takes all":
                continue  # ElasticBuffer refuses the same expert twice

            def make(idx: Tensor, counts: list[int], alignment: int = alignment) -> Routing:
                return _learnt(
                    DeepEpRouting(_make_calls(kind), idx, [[0] * _LOCAL] * _W, alignment), counts
                )

            _check_movements(make, name, alignment)

    run_ranks(fn, _W, timeout_s=100)


def _install_stand_ins() -> None:
    """Let this process believe that DeepEP is installed and that its rows are on a GPU."""
    module = ModuleType("deep_ep")
    module.__spec__ = ModuleSpec("deep_ep", loader=None)
    vars(module).update(Buffer=_BufferStandIn, ElasticBuffer=_ElasticStandIn)
    sys.modules["deep_ep"] = module
    deepep.check_device = lambda x: None


@pytest.mark.parametrize("stand_in", [_BufferStandIn, _ElasticStandIn])
def test_training_over_what_deepep_documents_equals_the_torch_backend(stand_in: Any) -> None:
    def fn(rank: int, world_size: int) -> None:
        _install_stand_ins()
        backend = DeepEpBackend(stand_in(dist.group.WORLD))
        for name in _ROUTINGS:
            if stand_in is _ElasticStandIn and name == "one expert takes all":
                continue
            ours = _layer(name, MoeOptions(timeout_s=30))
            theirs = _layer(name, MoeOptions(timeout_s=30, backend=backend))
            for got, want in zip(theirs, ours, strict=True):
                assert torch.equal(got, want)

    run_ranks(fn, _W, timeout_s=100)


def test_what_one_rank_may_not_send_is_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        _install_stand_ins()
        group = dist.group.WORLD
        backend = DeepEpBackend(_ElasticStandIn(group))
        x, idx, weight = _inputs("random", rank)
        with pytest.raises(RefusedTypeError, match=r"rank 1.*DeepEP moves and sums torch.bfloat16"):
            cc.dispatch(
                x if rank == 0 else x.float(),
                idx,
                weight,
                num_experts=_E,
                group=group,
                options=MoeOptions(backend=backend, timeout_s=30),
            )
        with pytest.raises(ValueError, match="made for another group"):
            DeepEpBackend(_BufferStandIn("other")).check(x, idx, weight, group=group)
        with pytest.raises(TypeError, match=r"buffer is a str; give a deep_ep.Buffer"):
            DeepEpBackend("buffer")
        with pytest.raises(ValueError, match="do_expand, num_experts cannot be chosen"):
            DeepEpBackend(
                _BufferStandIn(group), dispatch_options={"num_experts": 8, "do_expand": True}
            )

    run_ranks(fn, _W, timeout_s=60)


def test_what_deepep_raises_names_the_call() -> None:
    class _Failing(_BufferStandIn):
        def dispatch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            raise RuntimeError("DeepEP error: timeout (dispatch CPU)")

    calls = BufferCalls(_Failing(), {}, {})
    made = DeepEpRouting(calls, torch.zeros(2, _K, dtype=torch.int64), [[0] * _LOCAL] * _W, 1)
    routing = _learnt(made, [6, 0, 0, 0])
    with pytest.raises(CommError, match=r"dispatch: DeepEP failed: DeepEP error: timeout"):
        routing.to_experts((torch.ones(2, _D), torch.ones(2, _K)), _TRAVEL)


def test_counts_that_differ_from_the_announced_ones_are_an_error() -> None:
    class _Lossy(_BufferStandIn):
        def send(self, x: Tensor, idx: Tensor, *_: Any) -> tuple[Any, ...]:
            return x[:1], idx[:1], idx[:1], [3, 0, 0, 0], None

    calls = BufferCalls(_Lossy(), {}, {})
    made = DeepEpRouting(calls, torch.zeros(2, _K, dtype=torch.int64), [[0] * _LOCAL] * _W, 1)
    routing = _learnt(made, [6, 0, 0, 0])
    with pytest.raises(CommError, match=r"delivered \(3, 0, 0, 0\) rows .* announced \(6, 0, 0"):
        routing.to_experts((torch.ones(2, _D), torch.ones(2, _K)), _TRAVEL)


def test_inputs_that_deepep_does_not_take_are_refused_with_the_remedy() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    idx, weight = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"x is torch.float32; DeepEP moves and sums torch.bfloat1"):
        check_inputs(x.float(), idx, weight)
    with pytest.raises(ValueError, match="x has hidden size 12; DeepEP takes multiples of 8"):
        check_inputs(x[:, :12], idx, weight)
    with pytest.raises(TypeError, match=r"topk_weights is torch.bfloat16; DeepEP takes torch.flo"):
        check_inputs(x, idx, weight.bfloat16())
    with pytest.raises(ValueError, match="33 choices per token; DeepEP takes 1 to 32"):
        check_inputs(x, torch.zeros(2, 33, dtype=torch.int64), torch.ones(2, 33))
    check_inputs(x, idx, weight)
    with pytest.raises(ValueError, match="x is on cpu; DeepEP moves CUDA tensors"):
        check_device(x)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_without_deepep_the_backend_says_so_before_anything_else() -> None:
    for ask in (require_deep_ep, lambda: DeepEpBackend(object())):
        with pytest.raises(ImportError, match=r"deep_ep, which is not installed; build it from"):
            ask()


@pytest.mark.gpu(needs="deep_ep")
@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs deep_ep")
@pytest.mark.skipif(torch.cuda.device_count() < _W, reason=f"needs {_W} GPUs")
@pytest.mark.parametrize("kind", ["buffer", "elastic"])
def test_movements_over_deepep_equal_brute_force(kind: str, tmp_path: Path) -> None:
    repeats = 1024 // _D

    def fn(rank: int, world_size: int) -> None:
        module = require_deep_ep()
        torch.cuda.set_device(rank)
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
        group = dist.group.WORLD
        if kind == "elastic":
            buffer = module.ElasticBuffer(
                group, num_max_tokens_per_rank=8, hidden=1024, num_topk=_K
            )
        else:
            config = module.Buffer.get_dispatch_config(world_size)
            size = config.get_nvl_buffer_size_hint(2 * 1024, world_size)
            buffer = module.Buffer(group, num_nvl_bytes=size)
        backend = DeepEpBackend(buffer)
        for name, alignment in product(_ROUTINGS, (1, 4)):
            if kind == "elastic" and name == "one expert takes all":
                continue
            inputs = [t.cuda() for t in _inputs(name, rank, repeats)]
            backend.check(*inputs, group=group)

            def make(idx: Tensor, counts: list[int], alignment: int = alignment) -> Routing:
                told = [[0] * _LOCAL] * _W
                return _learnt(backend.routing(idx, told=told, alignment=alignment), counts)

            _check_movements(make, name, alignment, repeats=repeats)
            ours = _layer(name, MoeOptions(), repeats)
            theirs = _layer(name, MoeOptions(backend=backend), repeats)
            for got, want in zip(theirs, ours, strict=True):
                assert torch.equal(got, want)
        dist.destroy_process_group()

    run_ranks(fn, _W, timeout_s=300, init=False)
