"""Calls of comm_shm: frames by rank, heads, and what becomes of a call that not all ranks make."""

import pytest
import torch
import torch.distributed as dist

from comm_collectives.base.streams import ShmStreams
from comm_collectives.call.frames import NO_SIGNATURE
from comm_collectives.errors import MismatchError, PeerFailedError
from comm_collectives.shm.calls import REFUSED, Calls, Head, Operation
from ranktest import run_ranks

HEAD = Head("all_to_all", torch.uint8)


def _open(rank, size):
    def all_gather(message):
        gathered = [None] * size
        dist.all_gather_object(gathered, message)
        return gathered

    return Calls(ShmStreams.open(rank, size, all_gather), [10 + r for r in range(size)])


def _flat(num_bytes, value):
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def _make(calls, run, head=HEAD):
    calls.carry_out(Operation(head, run, limit_s=30.0))


def test_each_rank_gets_what_the_others_have_for_it_in_every_step():
    def fn(rank, size):
        calls = _open(rank, size)
        for num_bytes in (0, 1, 20_000, 3_000_001):

            def run(call, num_bytes=num_bytes):
                for step in range(3):
                    sends = [_flat(num_bytes, 50 * step + 10 * rank + r) for r in range(size)]
                    receives = [_flat(num_bytes, 255) for _ in range(size)]
                    call.exchange(sends, receives)
                    receives[rank] = sends[rank]
                    want = [_flat(num_bytes, 50 * step + 10 * r + rank) for r in range(size)]
                    assert all(torch.equal(a, b) for a, b in zip(receives, want, strict=True))

            _make(calls, run)

    run_ranks(fn, 3)


def _error_of(calls, head, run):
    with pytest.raises(RuntimeError) as caught:
        _make(calls, run, head)
    return caught.value


def test_a_rank_in_another_call_is_an_error_on_all_and_the_group_goes_on():
    def fn(rank, size):
        calls, big = _open(rank, size), _flat(2_000_000, rank)
        texts = []
        for _ in range(3):
            head = HEAD if rank else Head("barrier")
            sends = [big] * size if rank else None
            error = _error_of(calls, head, lambda call, sends=sends: call.exchange(sends, None))
            assert isinstance(error, MismatchError), error
            texts.append(str(error))
            got = [torch.empty_like(big) for _ in range(size)]
            _make(calls, lambda call, got=got: call.exchange([big] * size, got))
            assert [x.unique().tolist() for r, x in enumerate(got) if r != rank] == [
                [r] for r in range(size) if r != rank
            ]
        return texts

    texts = run_ranks(fn, 3)
    assert texts[0] == texts[1] == texts[2]
    assert "rank 10: barrier(0 bytes); rank 11: all_to_all(0 bytes, uint8)" in texts[0][0]


def test_sizes_that_do_not_fit_are_an_error_on_all():
    def fn(rank, size):
        calls = _open(rank, size)
        sizes = [4, 4, 5] if rank == 1 else [4, 4, 4]
        sends, receives = [_flat(n, 1) for n in sizes], [_flat(4, 0) for _ in range(size)]
        error = _error_of(calls, HEAD, lambda call: call.swap(sends, receives))
        _make(calls, lambda call: call.exchange(None, None))
        return type(error).__name__, str(error)

    said = ("MismatchError", "rank 11 sends 5 bytes to rank 12, which expects 4")
    assert run_ranks(fn, 3) == [said] * 3


def test_a_rank_that_gives_up_is_told_to_the_others_and_the_group_goes_on():
    def fn(rank, size):
        calls, big = _open(rank, size), _flat(2_000_000, rank)
        got = [torch.empty_like(big) for _ in range(size)]

        def run(call):
            if rank == 0:
                raise RuntimeError("out of memory, say")
            call.exchange([big] * size, got)

        error = _error_of(calls, HEAD, run)
        _make(calls, lambda call: call.exchange([big] * size, got))
        return type(error), str(error), got[1 - rank].unique().tolist()

    (_, _, first), (kind, text, second) = run_ranks(fn, 2)
    assert (first, second, kind) == ([1], [0], PeerFailedError)
    assert "rank 10 gave up in this call (RuntimeError: out of memory, say)" in text


def test_heads_differ_in_every_field():
    base = Head("reduce", torch.float32, "sum", 8, 0)
    others = [
        base._replace(operation="all_reduce"),
        base._replace(dtype=torch.int32),
        base._replace(reduction="min"),
        base._replace(num_bytes=12),
        base._replace(root=1),
    ]
    assert len({head.pack() for head in (base, *others)}) == 6


def test_heads_of_operations_with_long_names_differ_and_fit():
    names = ("reduce_scatter_single_coalesced", "all_gather_single_coalesced", "all_gather_single")
    packed = {Head(name).pack() for name in names}
    assert len(packed) == 3
    assert max(len(head) for head in packed) <= len(NO_SIGNATURE)


def test_a_head_in_words_is_the_call_of_its_rank():
    assert str(Head("all_reduce", torch.bfloat16, "max", 8)) == (
        "all_reduce(8 bytes, bfloat16, op=max)"
    )
    assert str(Head("broadcast", torch.int8, "", 7, 3)) == "broadcast(7 bytes, int8, root=3)"
    assert str(Head(REFUSED)) == "refused its own arguments"
