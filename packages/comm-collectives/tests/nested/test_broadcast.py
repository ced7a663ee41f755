"""broadcast_nested over real processes: structure, dtypes, sizes, devices, refusals."""

import dataclasses
import enum
import os
import random
import signal
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.base.wire import as_bytes, bytes_of, dense
from comm_collectives.call.groups.groups import group_state
from ranktest import collect_ranks, run_ranks


class Pair(NamedTuple):
    left: object
    right: object


class Side(enum.Enum):
    LEFT = "l"


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    values: tuple[float, ...]


def _value() -> dict[object, object]:
    shared = torch.arange(6).to(torch.uint16).view(2, 3)
    return {
        "none": None,
        "numbers": [True, 3, -(2**70), 0.1, float("inf"), -0.0, 2j],
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
            torch.arange(600_000).view(2, -1).t(),  # so does this, as it lies in memory
            torch.arange(600_000)[::2],  # and this, without its gaps
            torch.nn.Parameter(torch.ones(2)),
        ],
        "kinds": [{1}, torch.Size([2]), torch.float16, torch.device("cpu"), Side.LEFT],
        "blob": bytes(range(256)) * 5000,
    }


def _flatten(value: object) -> list[object]:
    if isinstance(value, dict):
        return [type(value), *(x for k, v in value.items() for x in (k, *_flatten(v)))]
    if isinstance(value, list | tuple):
        return [type(value), *(x for item in value for x in _flatten(item))]
    if isinstance(value, torch.Tensor):
        return [type(value), value.dtype, tuple(value.shape), bytes_of(as_bytes(dense(value)))]
    return [type(value), repr(value)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_kind_of_value_arrives_as_it_was(world_size: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        src = world_size - 1
        value = _value() if rank == src else "ignored"
        got = cc.broadcast_nested(value, src=src)
        assert _flatten(got) == _flatten(_value())
        assert isinstance(got, dict)
        pair, shared, _ = got[7]
        assert pair.left is shared
        assert [x.requires_grad for x in got["tensors"]] == [False] * 7 + [True]
        assert got["tensors"][5].stride() == (1, 300_000)

    run_ranks(fn, world_size)


def test_sizes_around_the_first_messages_arrive() -> None:
    generator = random.Random(seed := random.randrange(10**9))
    sizes = [0, 1, *range(300, 400, 7), 4096, *(generator.randrange(10_000) for _ in range(10))]

    def fn(rank: int, world_size: int) -> None:
        for size in [*sizes, 262_000, 263_000, 600_000]:
            blob = bytes(i % 251 for i in range(size))
            got = cc.broadcast_nested([blob, "x" * size] if rank == 0 else None, src=0)
            assert got == [blob, "x" * size], f"seed {seed}, size {size}"

    run_ranks(fn, 2)


def test_random_state_dicts_arrive_equal() -> None:
    seed = random.randrange(10**9)

    def fn(rank: int, world_size: int) -> None:
        torch.manual_seed(seed)  # so every rank knows what has to come
        generator = random.Random(seed)
        for _ in range(10):
            dtypes = (torch.float32, torch.bfloat16, torch.int16, torch.float64)
            state = {
                f"layer.{i}": torch.randn(generator.randrange(1, 50), generator.choice([1, 7, 900]))
                .to(generator.choice(dtypes))
                .squeeze(generator.randrange(2))
                for i in range(generator.randrange(60))
            }
            src = generator.randrange(world_size)
            got = cc.broadcast_nested(state if rank == src else None, src=src)
            assert isinstance(got, dict)
            assert list(got) == list(state)
            for name, x in state.items():
                assert got[name].dtype == x.dtype, f"seed {seed}"
                assert torch.equal(got[name], x), f"seed {seed}"

    run_ranks(fn, 3)


def test_memory_and_containers_that_are_shared_stay_shared() -> None:
    def fn(rank: int, world_size: int) -> None:
        value: Any = None
        if rank == 1:
            w = torch.nn.Linear(700, 700)
            hooks: list[object] = []
            cache = torch.zeros(1000, 4000)  # not to be shipped
            value = {
                **w.state_dict(),
                "tied": w.weight.detach(),
                "transposed": w.weight.t(),
                "row": w.weight[3],
                "bias": w.bias,
                "bias again": w.bias,
                "hooks": (hooks, {"same": hooks}),
                "slices": [cache[:2, :5], cache[0, 1:3]],
            }
        got: Any = cc.broadcast_nested(value, src=1)
        assert got["bias"] is got["bias again"]
        assert got["hooks"][0] is got["hooks"][1]["same"]
        with torch.no_grad():
            got["tied"][3, 5] = 123.0
            got["slices"][0][0, 2] = 9.0
        assert got["weight"][3, 5] == got["transposed"][5, 3] == got["row"][5] == 123.0
        assert got["slices"][1].tolist() == [0.0, 9.0 if rank == 1 else 0.0]
        if rank != 1:
            assert got["weight"].untyped_storage().nbytes() == 700 * 700 * 4
            assert [x.untyped_storage().nbytes() for x in got["slices"]] == [40, 8]

    run_ranks(fn, 2)


def test_values_arrive_where_ranks_meet_over_the_network() -> None:
    def fn(rank: int, world_size: int) -> None:
        state = group_state(None)
        state.may_share_memory = False
        for value in ({}, 3, "x" * 340, _value()):
            got = cc.broadcast_nested(value if rank == 2 else None, src=2)
            assert _flatten(got) == _flatten(value)
        assert "is a bytearray" in _failure(obj=bytearray(1) if rank == 2 else None, src=2)
        assert cc.broadcast_nested(5 if rank == 0 else None, src=0) == 5

    run_ranks(fn, 3)


@pytest.mark.gpu(needs="tensors of no subclass")
def test_cuda_tensors_go_through_the_host_to_the_device_asked_for() -> None:
    def fn(rank: int, world_size: int) -> None:
        value: Any = None
        if rank == 0:
            w = torch.arange(800.0 * 800, device="cuda").view(800, 800)
            small = [torch.full((5,), i, dtype=torch.int8, device="cuda") for i in range(20)]
            value = {"w": w, "t": w.t(), "gaps": w[:, :3], "small": small, "host": torch.ones(3)}
        on_host: Any = cc.broadcast_nested(value, src=0, device="cpu")
        got: Any = cc.broadcast_nested(value, src=0, device="cuda")
        assert got["w"].is_cuda
        assert got["host"].is_cuda
        assert all(x.is_cuda for x in got["small"])
        assert [x.tolist() for x in got["small"]] == [[i] * 5 for i in range(20)]
        for name in ("w", "t", "gaps", "host"):
            assert torch.equal(got[name].cpu(), on_host[name])
        got["w"][1, 2] = -1.0
        assert got["t"][2, 1] == -1.0
        unmoved: Any = cc.broadcast_nested(value, src=0)
        assert unmoved["w"].device.type == ("cuda" if rank == 0 else "cpu")

    run_ranks(fn, 2)


def test_many_small_tensors_do_not_keep_each_other_alive() -> None:
    def fn(rank: int, world_size: int) -> None:
        tensors = [torch.full((i % 7,), i) for i in range(300)]
        got = cc.broadcast_nested(tensors if rank == 0 else None, src=0)
        assert isinstance(got, list)
        assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in got)

    run_ranks(fn, 2)


def test_source_keeps_the_memory_of_its_tensors_and_leaves_them_alone() -> None:
    def fn(rank: int, world_size: int) -> None:
        w = torch.arange(12.0).view(3, 4)
        value = [w, w.t(), w[:, :2]]
        got: Any = cc.broadcast_nested(value if rank == 0 else None, src=0, device="cpu")
        if rank == 0:
            assert got is not value
            assert [x.data_ptr() for x in got] == [w.data_ptr()] * 3
        assert torch.equal(w, torch.arange(12.0).view(3, 4))
        assert [x.stride() for x in got] == [(4, 1), (1, 4), (4, 1)]

    run_ranks(fn, 2)


def test_device_argument_places_the_tensors_of_each_rank() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        w = torch.ones(800, 800)
        value = {"x": torch.ones(2), "w": w, "t": w.t()} if rank == 0 else None
        devices = []
        cc.broadcast_nested(None, src=0)
        for device in ("meta", "meta" if rank else None):
            with torch.device("meta"):  # a default device of the program changes nothing
                got = cc.broadcast_nested(value, src=0, device=device)
            assert isinstance(got, dict)
            assert got["w"].untyped_storage()._cdata == got["t"].untyped_storage()._cdata
            devices += [x.device.type for x in got.values()]
        return devices

    assert run_ranks(fn, 2) == [["meta"] * 3 + ["cpu"] * 3, ["meta"] * 6]


def _failure(**arguments: Any) -> str:
    try:
        cc.broadcast_nested(arguments.pop("obj", None), **arguments)
    except cc.CommError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_unsupported_part_is_named_on_every_rank_and_the_group_lives_on() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        loop: dict[str, object] = {}
        loop["own"] = loop
        texts = [
            _failure(obj=obj if rank == 0 else None, src=0)
            for obj in ({"a": [1, bytearray(2)]}, loop)
        ]
        assert cc.broadcast_nested(5 if rank == 0 else None, src=0) == 5
        return texts

    for rank, texts in enumerate(run_ranks(fn, 2)):
        unknown, loop = texts  # type: ignore[misc]
        assert unknown.startswith(
            f"RefusedTypeError: rank {rank}: broadcast_nested call 1 of group"
        )
        assert "obj['a'][1] is a bytearray; supported are" in unknown
        assert loop.startswith("RefusedError")
        assert "obj['own'] is obj itself, which contains it" in loop


def test_device_that_one_rank_lacks_is_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        texts = [_failure(obj=1, src=0, device="nonsense:3" if rank == 1 else None)]
        assert cc.broadcast_nested(5 if rank == 0 else None, src=0) == 5
        return texts

    for (text,) in run_ranks(fn, 2):  # type: ignore[misc]
        assert text.startswith("RefusedError")
        assert "device='nonsense:3' cannot be used on this rank" in text


def test_source_on_which_ranks_differ_is_an_error_on_each() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        texts = [_failure(obj=1, src=rank), _failure(obj=1, src=2)]
        assert cc.broadcast_nested(5 if rank == 0 else None, src=0) == 5
        return texts

    for differ, outside in run_ranks(fn, 2):  # type: ignore[misc]
        assert differ.startswith("MismatchError")
        assert "src=0" in differ
        assert "src=1" in differ
        assert outside.startswith("RefusedError")
        assert "src=2 is not a rank of a group of 2" in outside


def test_other_call_on_the_source_does_not_go_unnoticed() -> None:
    def fn(rank: int, world_size: int) -> object:
        if rank == 0:
            return cc.all_reduce(torch.ones(1024))
        return cc.broadcast_nested(None, src=0, timeout_s=5)

    outcomes = collect_ranks(fn, 2)
    assert [outcome.error_type for outcome in outcomes] == ["MismatchError", "MismatchError"]


def test_class_that_only_the_source_knows_fails_on_the_others_alone() -> None:
    def fn(rank: int, world_size: int) -> str:
        kind = globals()["Setting"] if rank == 0 else globals().pop("Setting")
        value = kind("s", ()) if rank == 0 else None
        try:
            cc.broadcast_nested([torch.ones(500_000), value] if rank == 0 else None, src=0)
            text = "no error"
        except TypeError as error:
            text = str(error)
        assert cc.broadcast_nested(5 if rank == 0 else None, src=0) == 5
        return text

    source, receiver = run_ranks(fn, 2)
    assert source == "no error"
    assert f"{__name__}.Setting is not a namedtuple, dataclass or enum" in str(receiver)


def test_source_killed_on_the_way_is_named_by_the_receivers() -> None:
    def fn(rank: int, world_size: int) -> str:
        cc.broadcast_nested(None, src=0)
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        while True:
            text = _failure(obj=[torch.ones(1 << 22)], src=0, timeout_s=20)
            if text != "no error":
                return text

    outcomes = collect_ranks(fn, 3, timeout_s=40)
    assert outcomes[0].error_type == "Died"
    for rank in (1, 2):
        text = str(outcomes[rank].value)
        assert text.startswith("PeerFailedError"), text
        assert f"rank {rank}: broadcast_nested call" in text


def test_group_other_than_the_default_has_its_own_ranks() -> None:
    def fn(rank: int, world_size: int) -> object:
        group = dist.new_group([2, 0])
        if rank == 1:
            return None
        return cc.broadcast_nested({"from": rank}, src=1, group=group)

    assert run_ranks(fn, 3) == [{"from": 2}, None, {"from": 2}]


def test_asynchronous_broadcast_gives_the_value_at_wait() -> None:
    def fn(rank: int, world_size: int) -> object:
        value = {"step": 3, "x": [torch.full((5,), 7.0)]} if rank == 1 else None
        handle = cc.broadcast_nested(value, src=1, async_op=True)
        total = cc.all_reduce(torch.ones(1)).item()  # waits its turn behind it
        got = handle.wait()
        return total, got["step"], got["x"][0].tolist()

    assert run_ranks(fn, 2) == [(2.0, 3, [7.0] * 5)] * 2
