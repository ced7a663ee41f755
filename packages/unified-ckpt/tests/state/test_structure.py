from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from ranktest import run_ranks
from ranktest.stateful import Holder
from unified_ckpt import load, read_index, save
from unified_ckpt.errors import CheckpointValueError, LoadError
from unified_ckpt.geometry import Box
from unified_ckpt.options import SaveOptions
from unified_ckpt.state.structure import RANKS, Structures


def two(fill: float) -> TwoTensor:
    return TwoTensor(torch.full((2, 3), float(fill)), torch.full((2, 3), fill + 1.0))


def module(fill: float) -> nn.Module:
    layer = nn.Linear(3, 2, bias=False)
    layer.weight = nn.Parameter(two(fill))
    return layer


def test_tensors_made_of_others_are_stored_as_those(tmp_path: Path) -> None:
    state = {"model": module(3), "data": Holder({"t": two(7), "l": [two(8)]})}
    save(state, checkpoint_id=tmp_path / "c")
    assert set(read_index(tmp_path / "c")) == {"weight.a", "weight.b"}
    again, back = module(0), Holder({})
    load({"model": again, "data": back}, checkpoint_id=tmp_path / "c")
    assert again.weight.a.unique().tolist() == [3] and again.weight.b.unique().tolist() == [4]
    assert type(back.state["t"]) is TwoTensor and back.state["t"].b.unique().tolist() == [8]
    assert back.state["l"][0].a.unique().tolist() == [8]
    with pytest.raises(LoadError, match="lacks 'weight'"):
        load({"model": nn.Linear(3, 2, bias=False)}, checkpoint_id=tmp_path / "c")
    options = SaveOptions(layout={"weight": Box((4, 3), (0, 0), (2, 3))})
    with pytest.raises(ValueError, match="a TwoTensor is whole on each rank, but the layout"):
        save({"model": module(3)}, checkpoint_id=tmp_path / "d", options=options)


def test_what_a_rank_keeps_of_a_part_without_saying_of_which_is_refused(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([("w", weight)])
        optimizer.state[weight] = {"old_dirs": [torch.ones(4)]}
        with pytest.raises(ValueError, match="'old_dirs' of 'w' is a plain tensor of this rank"):
            save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
    optimizer = torch.optim.Adafactor([("w", nn.Parameter(torch.ones(2, 3)))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    optimizer.step()
    options = SaveOptions(layout={"w": Box((4, 3), (0, 0), (2, 3))})
    with pytest.raises(ValueError, match=r"'w/row_var' of shape \(2, 1\) is a state of a part"):
        save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c", options=options)


def test_structures_of_ranks_are_joined_by_key_or_refused() -> None:
    def node(*keys: str) -> Any:
        return {"@items": [None, [[key, "tensor"] for key in keys]]}

    merged = Structures.merge([{"a": node("x", "y")}, {"a": node("y", "z"), "b": node("x")}])
    assert merged == {"a": {RANKS: node("x", "y", "z")}, "b": node("x")}
    with pytest.raises(CheckpointValueError, match=r"'a.x' is a value on rank 1, a tensor on a"):
        Structures.merge([{"a": node("x")}, {"a": {"@items": [None, [["x", "value"]]]}}])
    found = Structures({"a": {"@list": [None, [node("x"), "array"]]}})
    assert found.find("a.0") == node("x") and found.find("a.1") == "array"
    assert found.find("a.0.x") is None and found.has_inside("a") and not found.has_inside("a.0")


def test_tensors_under_an_empty_key_are_refused_at_save_and_not_at_load(tmp_path: Path) -> None:
    for state in ({"m": {"": torch.ones(1)}}, {"m": {"a": {"": {"b": torch.ones(1)}}}}):
        with pytest.raises(ValueError, match=r"'m(\.a)?' has an empty key, which no path can say"):
            save(state, checkpoint_id=tmp_path / "x")
    save({"m": {"": 3}}, checkpoint_id=tmp_path / "c")
    found: dict = {"m": {"": 0}}
    load(found, checkpoint_id=tmp_path / "c")
    assert found == {"m": {"": 3}}
