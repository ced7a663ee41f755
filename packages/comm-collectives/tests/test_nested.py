"""broadcast_nested over real processes: structure, dtypes, sizes, devices, refusals."""

import dataclasses
import random
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from ranktest import collect_ranks, run_ranks


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    values: tuple[float, ...]


def _value() -> dict[object, object]:
    shared = torch.arange(6).to(torch.uint16).view(2, 3)
    return {
        "none": None,
        "numbers": [True, 3, -(2**70), 0.1, float("inf"), -0.0],
        "text": 'é "quoted" \n\u4e2d',
        ("a", 1): b"\x00\xff",
        7: (Pair(left=shared, right=[]), shared, b""),
        "ordered": OrderedDict(z=1, a=Setting(name="s", values=(1.5, 2.5))),
        "tensors": [
            torch.tensor(3),
            torch.empty(0, 4),
            torch.ones(3).to(torch.float8_e5m2),
            torch.arange(12.0).view(3, 4).t()[1::2],
            torch.arange(300_000),  # travels by itself
            torch.nn.Parameter(torch.ones(2)),
        ],
    }


def _flatten(value: object) -> list[object]:
    if isinstance(value, dict):
        return [type(value), *(x for k, v in value.items() for x in (k, *_flatten(v)))]
    if isinstance(value, list | tuple):
        return [type(value), *(x for item in value for x in _flatten(item))]
    if isinstance(value, torch.Tensor):
        return [value.dtype, tuple(value.shape), value.to(torch.float64).tolist()]
    return [type(value), repr(value)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_kind_of_value_arrives_as_it_was(world_size: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        src = world_size - 1
        got = cc.broadcast_nested(_value() if rank == src else "ignored", src=src)
        assert _flatten(got) == _flatten(_value())
        assert isinstance(got, dict)
        pair, shared, _ = got[7]
        assert pair.left is shared
        assert not got["tensors"][5].requires_grad

    run_ranks(fn, world_size)


def test_sizes_around_the_first_message_arrive() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    sizes = [0, 1, 4000, 4072, 4073, 5000, *(generator.randrange(10_000) for _ in range(10))]

    def fn(rank: int, world_size: int) -> None:
        for size in sizes:
            blob = bytes(i % 251 for i in range(size))
            got = cc.broadcast_nested([blob, "x" * size] if rank == 0 else None, src=0)
            assert got == [blob, "x" * size], f"seed {seed}, size {size}"

    run_ranks(fn, 2)


def test_many_small_tensors_do_not_keep_each_other_alive() -> None:
    def fn(rank: int, world_size: int) -> None:
        tensors = [torch.full((i % 7,), i) for i in range(300)]
        got = cc.broadcast_nested(tensors if rank == 0 else None, src=0)
        assert isinstance(got, list)
        assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in got)

    run_ranks(fn, 2)


def test_device_argument_places_the_tensors() -> None:
    def fn(rank: int, world_size: int) -> str:
        got = cc.broadcast_nested({"x": torch.ones(2)} if rank == 0 else None, src=0, device="meta")
        assert isinstance(got, dict)
        return str(got["x"].device)

    assert run_ranks(fn, 2) == ["meta", "meta"]


def test_unsupported_part_is_named_on_every_rank_and_the_group_lives_on() -> None:
    def fn(rank: int, world_size: int) -> str:
        try:
            cc.broadcast_nested({"a": [1, {2}]} if rank == 0 else None, src=0)
        except (TypeError, cc.PeerFailedError) as error:
            text = f"{type(error).__name__}: {error}"
        assert cc.broadcast_nested(5 if rank == 0 else None, src=0) == 5
        return text

    source, receiver = run_ranks(fn, 2)
    assert str(source).startswith("TypeError: obj['a'][1] is a set; supported are")
    assert "from rank 0: the source refused its value: obj['a'][1] is a set" in str(receiver)


def test_other_call_on_the_source_does_not_go_unnoticed() -> None:
    def fn(rank: int, world_size: int) -> object:
        if rank == 0:
            dist.broadcast(torch.ones(1024), src=0)
            return None
        return cc.broadcast_nested(None, src=0, timeout_s=5)

    assert collect_ranks(fn, 2)[1].error_type == "MismatchError"


def test_source_outside_the_group_is_refused() -> None:
    def fn(rank: int, world_size: int) -> None:
        dist.barrier()
        with pytest.raises(ValueError, match="src=2 is not a rank of a group of 2"):
            cc.broadcast_nested(1, src=2)

    run_ranks(fn, 2)
