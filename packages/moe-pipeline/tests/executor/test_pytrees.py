import json
from collections import namedtuple

import pytest
import torch

from moe_pipeline.executor.pytrees import flatten, map_tensors, unflatten

Pair = namedtuple("Pair", ["left", "right"])


class Outer:
    Inner = namedtuple("Inner", ["x"], module=__name__)


Outer.Inner.__qualname__ = "Outer.Inner"


def round_trip(tree):
    form, tensors = flatten(tree)
    return unflatten(json.loads(json.dumps(form)), tensors)


def test_nests_survive_json():
    a, b = torch.ones(2), torch.zeros(0, dtype=torch.int64)
    tree = (a, None, {"x": [b, (a,)], 3: {}}, [], (), 5, -0.5, True, "text", float("inf"))
    got = round_trip(tree)
    assert got[0] is a and got[2]["x"][0] is b and got[2]["x"][1][0] is a
    assert got[1] is None and got[2][3] == {} and got[3:] == tree[3:]
    assert [type(x) for x in got] == [type(x) for x in tree]
    assert round_trip(a) is a and round_trip(None) is None


def test_namedtuples_are_found_by_name():
    x = torch.ones(1)
    got = round_trip((Pair(x, Outer.Inner(None)),))
    assert type(got[0]) is Pair and type(got[0].right) is Outer.Inner and got[0].left is x


def test_an_unknown_namedtuple_is_refused():
    local = namedtuple("local", ["x"])
    form, tensors = flatten(local(torch.ones(1)))
    form[2] = "nowhere"
    with pytest.raises(TypeError, match=r"namedtuple .*nowhere, which is not known"):
        unflatten(form, tensors)
    form[1:3] = ["os", "system"]  # not everything with a name
    with pytest.raises(TypeError, match=r"os\.system, which is not known"):
        unflatten(form, tensors)


def test_what_cannot_travel_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"set at \[1\]\['a'\]\[0\] cannot go from stage to stage"):
        flatten((None, {"a": [set()]}))
    with pytest.raises(TypeError, match=r"dict at \[0\] has keys that are not str or int"):
        flatten(({None: 1},))


def test_map_tensors_keeps_the_nest():
    tree = {"a": [torch.ones(2), None], "b": Pair(torch.ones(3), 1)}
    assert map_tensors(lambda t: t.numel(), tree) == {"a": [2, None], "b": Pair(3, 1)}
