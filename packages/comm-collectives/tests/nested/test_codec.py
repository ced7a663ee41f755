"""The codec alone, without processes."""

import dataclasses
import enum
import functools
import json
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_collectives.nested.codec import decode, encode


class Point(NamedTuple):
    x: object


@dataclasses.dataclass
class Computed:
    a: int
    b: int = dataclasses.field(init=False)
    scale: dataclasses.InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        self.b = self.a * scale

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.a


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    items: list[object]


@dataclasses.dataclass
class Failure(ValueError):
    code: int


class Colour(enum.IntEnum):
    RED = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


class Hiding:
    __slots__ = "hidden"


@dataclasses.dataclass(slots=True)
class Shown(Hiding):
    shown: int


class Row(Point):
    pass


_scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
_scalars |= st.complex_numbers(allow_nan=False) | st.floats(allow_nan=False)
_keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_keys, inner)
        | st.dictionaries(_keys, inner).map(OrderedDict)
        | inner.map(Point)
        | st.lists(inner).map(Slotted)
    ),
    max_leaves=20,
)


def _copy(value: object) -> Any:
    packed = encode(value)
    return decode(packed.text, packed.tensors, packed.blobs)


@given(_values)
def test_values_survive_with_their_types(value: object) -> None:
    got = _copy(value)
    assert got == value
    assert repr(got) == repr(value)


def test_ugly_scalars_survive() -> None:
    texts = ["\ud83d\ude00", "\ud800", "\U0001f600", "\x00\x7f\u2028"]
    numbers = [16**5000, -(2**64), 2**64, -0.0, 5e-324, float("inf"), complex(-0.0, float("nan"))]
    got = _copy([*texts, *numbers])
    assert got[:4] == texts
    assert got[4] == numbers[0]  # not compared as text, which Python limits
    assert len(_copy(np.bytes_(b"a\0"))) == len(_copy(np.str_("a\0"))) == 2
    assert [repr(x) for x in got[5:]] == [repr(x) for x in numbers[1:]]


@pytest.mark.parametrize(
    "value",
    [
        {1, "a", (2, None)},
        frozenset({b"x", 1.5}),
        {frozenset({1}): {Point(2)}},
        torch.Size([2, 0, 3]),
        [torch.float32, torch.complex32, torch.float8_e8m0fnu, torch.quint8],
        [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
        [Colour.RED, Mode.READ, Mode.BOTH, Mode(0), Mode.READ | Mode.WRITE],
        [np.float64(1.5), np.float32("nan"), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1)],
        [np.str_("é"), np.bytes_(b"ab"), np.datetime64("2020-01-01"), np.complex64(1 - 2j)],
        [np.str_(""), np.bytes_(b""), np.bytes_(b"a\0b\0"), np.str_("\ud800"), np.str_("\0")],
    ],
)
def test_what_states_hold_besides_tensors_survives(value: object) -> None:
    got = _copy(value)
    assert type(got) is type(value)
    assert repr(got) == repr(value) or got == value
    if isinstance(value, list):
        assert [type(item) for item in got] == [type(item) for item in value]


def test_parameters_stay_parameters_and_one_stays_one() -> None:
    tied = torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.arange(2), requires_grad=False)
    got = _copy({"w": tied, "head": [tied], "f": frozen, "view": tied.data})
    assert type(got["w"]) is type(got["f"]) is torch.nn.Parameter
    assert got["w"] is got["head"][0]
    assert (got["w"].requires_grad, got["f"].requires_grad) == (True, False)
    assert got["w"].is_leaf
    assert got["f"].dtype == torch.int64
    assert type(got["view"]) is torch.Tensor


def test_dtype_that_a_receiver_lacks_is_named() -> None:
    with pytest.raises(TypeError, match=r"torch.float3 came and is no dtype on this rank"):
        decode(b'[[],["y","float3"]]', [], [])


def test_same_tensor_is_carried_once_and_stays_one() -> None:
    x, blob = torch.ones(2), b"ab"
    packed = encode({"a": x, "b": [x, torch.ones(2)], "c": blob, "d": (blob,)})
    assert len(packed.tensors) == 2
    assert len(packed.blobs) == 1
    got: Any = decode(packed.text, packed.tensors, packed.blobs)
    assert got["a"] is got["b"][0]
    assert got["c"] is got["d"][0]


def _contents(value: object) -> list[object]:
    """Every container inside, in the order in which it is met, as often as it is met."""
    found: list[object] = []
    if isinstance(value, dict):
        found = [part for pair in value.items() for item in pair for part in _contents(item)]
    elif isinstance(value, list | tuple):
        found = [part for item in value for part in _contents(item)]
    elif dataclasses.is_dataclass(value):
        found = [p for f in dataclasses.fields(value) for p in _contents(getattr(value, f.name))]
    else:
        return []
    return [value, *found]


def test_same_container_arrives_as_one_wherever_it_occurs() -> None:
    inner: list[object] = [1]
    key = (1, ("two",))
    table = {key: inner, "again": key}
    slotted = Slotted([inner, table])
    ordered = OrderedDict(a=slotted, b=table)
    value = [inner, slotted, Point(slotted), ordered, ordered, [1], Computed(a=3), (inner,)]
    got = _copy(value)
    ours, theirs = _contents(value), _contents(got)
    assert [type(part) for part in theirs] == [type(part) for part in ours]
    first = {id(part): i for i, part in reversed(list(enumerate(ours)))}
    first_got = {id(part): i for i, part in reversed(list(enumerate(theirs)))}
    assert [first_got[id(part)] for part in theirs] == [first[id(part)] for part in ours]
    got[0].append(2)
    assert got[1].items[0] == got[3]["b"][key] == [1, 2]
    assert got[5] == [1]


def test_dataclasses_keep_every_field_and_run_no_constructor() -> None:
    value = Computed(a=2, scale=5)
    value.a = 3
    assert value.double == 6
    got = _copy(value)
    assert (got.a, got.b, got.double) == (3, 10, 6)
    del value.b
    assert "b" not in vars(_copy(value))


def test_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    got = _copy(state)
    assert type(got) is OrderedDict
    assert got._metadata == state._metadata  # type: ignore[attr-defined]
    torch.nn.BatchNorm1d(2).load_state_dict(got)


def _extra() -> Computed:
    value = Computed(a=1)
    vars(value)["note"] = 2
    return value


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _row() -> Row:
    value = Row(1)
    vars(value)["note"] = 2
    return value


def _freed() -> torch.Tensor:
    x = torch.ones(2)
    x.untyped_storage().resize_(0)
    return x


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": {object()}}, r"obj\['a'\]\[0\] is a object"),
        ([np.zeros(2)], r"obj\[0\] is a ndarray"),
        ([np.void(b"ab")], r"obj\[0\] is a void"),
        (bytearray(b"x"), "obj is a bytearray"),
        ([0, (torch.eye(2).to_sparse(),)], r"obj\[1\]\[0\] has layout torch.sparse_coo"),
        ({"w": torch.empty(2, device="meta")}, r"obj\['w'\] has layout .* device meta"),
        ([_nested()], r"obj\[0\] has layout"),
        ([_freed()], r"obj\[0\] has layout .* give a dense tensor with data"),
        (Slotted([torch.ones(2).as_subclass(Marked)]), r"obj.items\[0\] is a Marked; give a plain"),
        ([Failure(1)], r"obj\[0\]: object.__new__\(Failure\) is not safe"),
        ({Point(x=object()): 1}, r"obj key\.x is a object"),
        ([_extra()], r"obj\[0\] has the attribute note, which is no field of Computed"),
        (_row(), "obj has the attribute note"),
        ([Shown(1)], r"obj\[0\]: slots of Shown are no fields and would be lost: \['hidden'\]"),
        ([torch.nn.Parameter(torch.empty((), device="meta"))], r"obj\[0\].data has layout"),
    ],
)
def test_unsupported_parts_are_named_by_their_path(value: object, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        encode(value)


def test_class_without_a_findable_name_is_refused_by_the_sender() -> None:
    class Local(NamedTuple):
        x: int

    with pytest.raises(TypeError, match="define it at the top of a module"):
        encode(Local(x=1))


def test_receiver_builds_only_namedtuples_dataclasses_and_enums() -> None:
    for module, name in (("os", "system"), ("builtins", "eval"), ("no.such", "Thing")):
        text = json.dumps([[[module, name, ["x"]]], ["n", 0, "echo"]]).encode()
        with pytest.raises(TypeError, match="is not a namedtuple, dataclass or enum"):
            decode(text, [], [])


def test_receiver_notices_other_fields() -> None:
    text = encode(Point(1)).text.replace(b'["x"]', b'["x","y"]').replace(b",1]", b",1,2]")
    with pytest.raises(TypeError, match=r"Point has the fields \['x'\] here and \['x', 'y'\] on"):
        decode(text, [], [])


def test_value_that_contains_itself_is_refused_by_its_path() -> None:
    loop: dict[str, object] = {"a": [0, {}]}
    slotted = Slotted([loop])
    loop["a"][1]["back"] = slotted  # type: ignore[index]
    value = [slotted]
    match = r"^obj\[0\]\.items\[0\]\['a'\]\[1\]\['back'\] is obj\[0\] itself, which contains it; "
    with pytest.raises(ValueError, match=match):
        encode(value)
    own: list[object] = []
    own.append(own)
    with pytest.raises(ValueError, match=r"^obj\[0\] is obj itself"):
        encode(own)


def test_value_nested_too_deeply_is_refused() -> None:
    deep: list[object] = []
    for _ in range(99):
        deep = [deep]
    assert _copy(deep) == deep
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        encode([deep])
