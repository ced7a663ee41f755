"""Heads of shared calls: nothing is lost on the way, and every difference is told."""

import pytest
import torch

from comm_collectives.errors import MismatchError
from comm_collectives.shm.heads import HEAD_BYTES, REFUSED, Head, check_heads

HEADS = [
    Head("barrier"),
    Head("all_reduce", torch.bfloat16, "max", 2**40),
    Head("broadcast", torch.float8_e4m3fn, "", 7, 3),
    Head("all_to_all", torch.float32),
    Head(REFUSED),
]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_packed_head_comes_back(head):
    packed = head.pack()
    assert len(packed) == HEAD_BYTES
    assert Head.unpack(packed + b"more") == head


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


def test_equal_heads_pass_and_others_name_each_rank_and_its_call():
    packed = [head.pack() for head in HEADS]
    check_heads(packed[1], [packed[1]] * 3, (0, 4, 5))
    with pytest.raises(MismatchError) as caught:
        check_heads(packed[0], [packed[0], packed[1], packed[4]], (0, 4, 5))
    assert str(caught.value) == (
        "the ranks make different calls: rank 0: barrier(0 bytes); "
        f"rank 4: all_reduce({2**40} bytes, bfloat16, op=max); "
        "rank 5: refused its own arguments"
    )
