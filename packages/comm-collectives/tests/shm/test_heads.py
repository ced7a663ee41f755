"""Heads of calls: every difference is told, and a head says in words what its rank does."""

import torch

from comm_collectives.call.frames import NO_SIGNATURE
from comm_collectives.shm.heads import REFUSED, Head


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
