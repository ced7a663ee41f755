"""The codec alone, without processes."""

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_collectives.nested_codec import decode, encode


class Point(NamedTuple):
    x: object


@dataclasses.dataclass
class Computed:
    a: int
    b: int = dataclasses.field(init=False, default=0)


class Colour(enum.IntEnum):
    RED = 1


_scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
_keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
_values = st.recursive(
    _scalars | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_keys, inner)
        | inner.map(Point)
    ),
    max_leaves=20,
)


@given(_values)
def test_values_survive_with_their_types(value: object) -> None:
    text, tensors = encode(value)
    got = decode(text, tensors)
    assert got == value
    assert repr(got) == repr(value)


def test_same_tensor_is_carried_once_and_stays_one() -> None:
    x = torch.ones(2)
    text, tensors = encode({"a": x, "b": [x, torch.ones(2)]})
    assert len(tensors) == 2
    got: Any = decode(text, tensors)
    assert got["a"] is got["b"][0]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": {1}}, r"obj\['a'\] is a set"),
        ([Colour.RED], r"obj\[0\] is a Colour"),
        (bytearray(b"x"), "obj is a bytearray"),
        (torch.eye(2).to_sparse(), "obj has layout"),
        (Computed(a=1), "init=False"),
        ({Point(x=object()): 1}, r"obj key\[0\] is a object"),
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


def test_receiver_builds_only_namedtuples_and_dataclasses() -> None:
    for module, name in (("os", "system"), ("builtins", "eval"), ("no.such", "Thing")):
        with pytest.raises(TypeError, match="is not a namedtuple or dataclass"):
            decode(f'["n", "{module}", "{name}", "echo"]', [])


def test_value_nested_in_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        encode(loop)
