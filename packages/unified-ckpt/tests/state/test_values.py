import json
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from unified_ckpt.state.values import encode_value, find_value, restore_value


class Point(NamedTuple):
    x: int
    y: tuple[int, ...]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, "x", (), [1, (2, 3)], {"a": (1, None)}, {3: 4, None: [True]},
        {"@items": 1}, Counter({30: 2}), OrderedDict(b=1, a=(2,)), {"deep": {1: {2: (3,)}}},
        defaultdict(list, a=[1]), Point(1, (2, 3)), {"p": [Point(0, ())]},
    ],
)  # fmt: skip
def test_values_come_back_through_json_in_the_templates_types(value: Any) -> None:
    text = json.dumps(encode_value(value, "path"))
    back = restore_value(json.loads(text), value)
    assert back == value and type(back) is type(value)


def test_a_defaultdict_keeps_its_factory_and_a_named_tuple_of_other_length_is_plain() -> None:
    back = restore_value({"a": 1}, defaultdict(list, b=[2]), typed=False)
    assert back == {"a": 1} and back["new"] == []
    assert type(restore_value([1, 2, 3], Point(1, ()), typed=False)) is tuple


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"a.0.b: a PosixPath is neither"):
        encode_value([{"b": Path("x")}], "a")
    with pytest.raises(TypeError, match=r"a key: a PosixPath"):
        encode_value({Path("x"): 1}, "a")


def test_values_are_found_whole_or_item_by_item() -> None:
    whole, items = {"a": {"b": {"c": 1}, "d.e": 2}}, {"a.b.c": 1, "a.d.e": 2}
    assert find_value(whole, "a.b.c") == (True, 1)
    assert find_value(whole, "a.b") == (True, {"c": 1})
    assert find_value(whole, "a.d.e") == (True, 2)
    assert find_value(items, "a.b") == (True, {"c": 1})
    assert find_value(items, "a")[1] == {"b": {"c": 1}, "d": {"e": 2}}
    assert find_value(whole, "a.x") == (False, {})
    assert find_value({"a": None}, "a") == (True, None)
    assert find_value({"a": None}, "a.b") == (False, {})
