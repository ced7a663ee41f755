"""States of objects, saved and loaded into fresh ones: equal in value and type, or refused."""

import collections
import copy
import datetime
import enum
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from ranktest import run_ranks
from ranktest.stateful import Holder
from unified_ckpt import load, save
from unified_ckpt.errors import LoadError
from unified_ckpt.options import LoadOptions, SaveOptions


class Color(enum.Enum):
    RED = "r"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    A = 1
    B = 2


class Batch(NamedTuple):
    ids: torch.Tensor
    kind: str


class Odd(dict):
    """A dict of a class that nothing says how to make."""


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


STATES: dict[str, Callable[[], Any]] = {
    "numbers": lambda: {"i": 5, "f": 0.1, "big": 2**80, "b": True, "n": None, "nan": float("nan")},
    "text": lambda: {"s": "é\n", "empty": "", "mark": {"@items": 1}, "": "no name"},
    "list of tensors": lambda: {"buffer": [t(1, 2), t(3)]},
    "lists in lists": lambda: {"a": [[t(1)], [], [[t(2), None]]]},
    "empty collections": lambda: {"l": [], "d": {}, "t": (), "s": set()},
    "tuple of tensors": lambda: {"pair": (t(1), t(2, 3))},
    "tuples and lists mixed": lambda: {"a": ([1, (2,)], (t(1), [t(2)], 3))},
    "named tuple": lambda: {"batch": Batch(t(4), "x"), "of": Batch(t(5), "y")},
    "torch.Size": lambda: {"shape": torch.Size([2, 3]), "t": t(1)},
    "enums": lambda: {"c": Color.RED, "n": Color.BLUE, "i": Level.LOW},
    "flags": lambda: {"m": Mode.A | Mode.B, "none": Mode(0), "t": t(1)},
    "enums as keys": lambda: {"seen": {Color.RED: 1, Level.LOW: t(2)}},
    "bytes": lambda: {"b": b"\x00\xff", "a": bytearray(b"xy")},
    "files in memory": lambda: {"f": _read(io.BytesIO(b"abc")), "t": t(1), "l": [io.BytesIO()]},
    "sets": lambda: {"s": {"b", "a", 3, (1, 2)}, "f": frozenset({1.5})},
    "tuples as keys": lambda: {"grid": {(1, 2): "x", (3, (4,)): [5]}},
    "tuples as keys of tensors": lambda: {"grid": {(0, 1): t(1), (0, 2): t(2)}},
    "numbers as keys of tensors": lambda: {"steps": {10: t(1), 20: {30: t(2)}}},
    "none as a key": lambda: {"d": {None: 1, True: 2}, "t": t(0)},
    "ordered dict": lambda: collections.OrderedDict(b=t(1), a=2),
    "counter": lambda: {"seen": collections.Counter({30: 2, "a": 1})},
    "defaultdict of lists": lambda: {"d": collections.defaultdict(list, a=[1], b=[t(2)])},
    "defaultdict without": lambda: {"d": collections.defaultdict(None, a=1)},
    "deque": lambda: {"last": collections.deque([1, 2], maxlen=5)},
    "deque of tensors": lambda: {"last": collections.deque([t(1), t(2)], maxlen=2)},
    "complex, dtype, device": lambda: {
        "z": 1 + 2j, "d": torch.bfloat16, "where": torch.device("cuda", 1)
    },
    "numpy scalars": lambda: {
        "f": numpy.float32(0.1), "i": numpy.int64(2**60), "b": numpy.bool_(True),
        "u": numpy.uint8(3), "s": numpy.str_("x"), "d": numpy.datetime64("2026-01-02"),
    },
    "numpy arrays": lambda: {
        "a": numpy.arange(6.0).reshape(2, 3), "i": numpy.arange(3, dtype="u4")
    },
    "numpy arrays of no tensor's dtype": lambda: {
        "z": numpy.array([1j, 2]), "s": numpy.array(["ab", "c"]),
        "big": numpy.arange(3, dtype=">i4"),
        "empty": numpy.zeros((0, 2)), "zero": numpy.array(3.5),
    },
    "numpy's generator": lambda: numpy.random.RandomState(3).get_state(legacy=False),
    "arrays in lists": lambda: {"a": [numpy.ones(2), (numpy.zeros(1, dtype=bool), t(1))]},
    "tensors of all kinds": lambda: {
        "b": torch.tensor([True]), "h": t(1).bfloat16(), "z": torch.tensor([1j]),
        "empty": torch.zeros(0, 3), "zero": torch.tensor(7), "f8": t(1, 2).to(torch.float8_e4m3fn),
    },
    "strided tensors": lambda: {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(1).expand(3)},
    "parameters": lambda: {
        "p": nn.Parameter(t(1.5)), "l": [nn.Parameter(t(3), requires_grad=False)]
    },
    "one tensor": lambda: t(1, 2, 3),
    "one list": lambda: [t(1), 2, (3,)],
    "one number": lambda: 7,
    "generator": lambda: {"rng": torch.Generator().manual_seed(5).get_state()},
    "keys with dots": lambda: {"a.b": t(1), "c.d": [t(2), {"e.f": t(3)}]},
    "twenty levels": lambda: _deep(20),
    "a buffer of samples": lambda: {
        "pos": 5, "rng": torch.arange(4), "meta": {"k": 1},
        "buffer": [{"ids": torch.arange(n), "text": "x" * n} for n in range(4)],
    },
    "objects in objects": lambda: {"inner": {"x": [t(1)], "y": {"z": (2,)}}},
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a path": (lambda: {"a": [Path("x")]}, "data.a.0: a PosixPath"),
    "a date": (lambda: {"when": datetime.date(2026, 1, 2)}, "data.when: a date"),
    "a function": (lambda: {"f": len}, "data.f: a builtin_function_or_method"),
    "a dict's class": (lambda: {"d": Odd(a=1)}, "data.d: a Odd"),
    "a tensor's key": (lambda: {"d": {t(1): 2}}, "data.d key: a tensor in a set, or as a key"),
    "tensors in a set": (lambda: {"s": {t(1)}}, r"data.s.\d: a tensor in a set"),
    "objects of numpy": (lambda: {"a": numpy.array([None])}, "data.a: a ndarray of object"),
    "sparse": (lambda: {"s": torch.eye(2).to_sparse()}, "'s': tensor is not a plain strided"),
    "complex128": (lambda: {"z": torch.zeros(1, dtype=torch.complex128)}, "cannot hold"),
    "itself": (lambda: _cycle(), "'data' of the state dict nests too deep"),
    "two of one key": (lambda: {1: t(1), "1": t(2)}, "have the key '1'"),
    "half a character": (lambda: {"s": "\ud800"}, "data.s: half a character"),
}


def _deep(levels: int) -> Any:
    return {"in": _deep(levels - 1), "t": t(levels)} if levels else [t(0)]


def _read(file: io.BytesIO) -> io.BytesIO:
    file.read(2)
    return file


def _cycle() -> Any:
    state: dict[str, Any] = {"t": t(1)}
    state["again"] = [state]
    return state


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bytes = a.element_size() == 1  # which torch.equal does not compare for all dtypes
        bits = [x.detach().contiguous().view(torch.uint8) if as_bytes else x for x in (a, b)]
        alike = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return alike and torch.equal(*bits)
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and a.shape == b.shape and numpy.array_equal(a, b)
    if isinstance(a, dict):
        extra = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return extra and [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        bound = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return bound and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_an_object_comes_back_whatever_a_fresh_one_holds(
    name: str, tmp_path: Path
) -> None:
    state = {"model": {"w": torch.ones(2)}, "data": Holder(STATES[name]())}
    save(state, checkpoint_id=tmp_path / "c")
    others: list[Any] = [{}, STATES[name](), {"pos": 0, "buffer": [t(9)], "rng": torch.zeros(9)}]
    for other in others:
        back = Holder(other)
        report = load({"data": back}, checkpoint_id=tmp_path / "c")
        assert same(back.state, STATES[name]()), other
        assert report.missing == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_load_could_make_again_is_refused_at_save_by_path_and_type(
    name: str, tmp_path: Path
) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        save({"data": Holder(make())}, checkpoint_id=tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_lists_and_arrays_of_a_plain_state_dict_come_back_too(tmp_path: Path) -> None:
    state = {"data": {"n": 1, "l": [t(1), {"a": t(2)}], "a": numpy.arange(3), "t": t(5)}}
    save(state, checkpoint_id=tmp_path / "c")
    for given in ([], None, [t(0), t(0), t(0)], {}):
        back: dict[str, Any] = {"data": {"n": 0, "l": given, "a": None, "t": t(0)}}
        load(back, checkpoint_id=tmp_path / "c")
        assert same(back, state), given
    only: dict[str, Any] = {"data": {"l": None}}  # a plain dict says which keys are wanted
    load(only, checkpoint_id=tmp_path / "c")
    assert same(only, {"data": {"l": state["data"]["l"]}})


@pytest.mark.parametrize("given", [{}, {"x": {}}, {"x": None}], ids=repr)
def test_the_values_of_a_list_are_not_loaded_without_its_tensors(
    given: dict[str, Any], tmp_path: Path
) -> None:
    state = {"data": {"x": {"l": [1, (2, t(3))], "n": 4}}}
    save(state, checkpoint_id=tmp_path / "c")
    back: dict[str, Any] = {"data": copy.deepcopy(given)}
    with pytest.raises(LoadError, match=r"saved with 'data\.x\.l'.* None for what is to be made"):
        load(back, checkpoint_id=tmp_path / "c")
    report = load(back, checkpoint_id=tmp_path / "c", strict=False)
    assert back == {"data": given} and "data.x.l" in report.missing
    back = {"data": {"x": {"l": None, "n": None}}}
    load(back, checkpoint_id=tmp_path / "c")
    assert same(back, state)


def test_a_tensor_that_fits_is_filled_in_place_and_ignored_items_stay(tmp_path: Path) -> None:
    save({"data": Holder({"a": t(1), "l": [t(2)], "n": 3})}, checkpoint_id=tmp_path / "c")
    mine, kept = t(0), [t(7), t(8)]
    back = Holder({"a": mine, "l": kept, "n": 0})
    options = LoadOptions(ignored_keys=(r"data\.l", r"^l\."))
    load({"data": back}, checkpoint_id=tmp_path / "c", options=options)
    assert back.state["a"] is mine and mine == 1 and back.state["n"] == 3
    assert back.state["l"] is kept
    save(
        {"data": Holder({"a": t(1), "drop": t(2), "n": 3})},
        checkpoint_id=tmp_path / "d",
        options=SaveOptions(ignored_keys=("drop", "n$")),
    )
    back = Holder({})
    load({"data": back}, checkpoint_id=tmp_path / "d")
    assert same(back.state, {"a": t(1)})


def test_an_object_inside_of_an_object_takes_its_own_state(tmp_path: Path) -> None:
    class Outer(Holder):
        def state_dict(self) -> Any:
            return {"inner": self.state, "n": 1}

        def load_state_dict(self, state: Any) -> None:
            self.got = state

    save({"data": Outer(Holder({"x": [t(1)]}))}, checkpoint_id=tmp_path / "c")
    inner = Holder({})
    outer = Outer(inner)
    load({"data": outer}, checkpoint_id=tmp_path / "c")
    assert same(inner.state, {"x": [t(1)]}) and outer.got["inner"] is inner
    gone = Holder({})
    load({"data": gone}, checkpoint_id=tmp_path / "c")
    assert same(gone.state, {"inner": {"x": [t(1)]}, "n": 1})


def test_ranks_may_hold_different_keys_of_a_state_but_not_lists_of_different_length(
    tmp_path: Path,
) -> None:
    def fn(rank: int, world_size: int) -> None:
        mine = {"same": [t(1)], f"of{rank}": t(rank)}
        save({"data": Holder(mine)}, checkpoint_id=tmp_path / "c")
        back = Holder({"same": [], f"of{rank}": t(9)})
        load({"data": back}, checkpoint_id=tmp_path / "c")
        assert same(back.state, mine)  # the other rank's key is not this one's
        with pytest.raises(ValueError, match=r"'data.l' is list of 1 on rank 1, list of 2 on a"):
            uneven = {"l": [t(1), 2], "m": [t(3)]} if rank == 0 else {"l": [t(1)], "m": [t(3)]}
            save({"data": Holder(uneven)}, checkpoint_id=tmp_path / "d")

    run_ranks(fn, 2)
